# `make compare` runs the side-by-side study and draws it; `make test` runs every test. Both make their own environment.
PYTHON ?= python3
VENV ?= .venv
RESULTS ?= results
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: compare test lint clean

compare: $(READY)
	$(BIN)/python experiments/train.py study=side_by_side launch.results_dir=$(RESULTS)
	$(BIN)/python experiments/make_figures.py $(RESULTS)/side_by_side

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tested versions are pinned in constraints.txt. torch comes first, in the version of that file, so that pip
# takes the build that is at hand for it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
