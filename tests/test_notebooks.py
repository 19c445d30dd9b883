"""The guided tours run, what they say about themselves is so, and the ipynb files are what the py files say."""

import runpy
from pathlib import Path

import jupytext
import matplotlib
import pytest
import torch

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.py"))


def run(name):
    with torch.random.fork_rng(), matplotlib.rc_context():
        return runpy.run_path(str(NOTEBOOKS / f"{name}.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_is_generated_from_its_text_and_holds_no_outputs(source):
    """Run `jupytext --to ipynb notebooks/*.py` after an edit."""
    text, notebook = jupytext.read(source), jupytext.read(source.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in text.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]
    assert not any(cell.get("outputs") for cell in notebook.cells)


def test_the_instrument_in_your_own_training(capsys):
    names = run("instrument")
    assert names["ratio_ranges"][0] == (1.0, 1.0)
    assert "update 1: ratios 1.000 to 1.000" in capsys.readouterr().out
    assert names["old"].valid_BS.all()
    assert not names["sampled"].aligned_to(names["mask"]).valid_BS[:, -1].any()
    assert names["total"].slot_change > 0
    assert len(names["table"]) > 0


def test_a_study_is_read_and_its_claim_judged(capsys):
    names = run("01_read_a_study")
    assert names["slopes"]["weight_rms"].value > names["slopes"]["flip_rms"].value
    assert names["figure"] is not None
    assert names["finding"].verdict in capsys.readouterr().out


def test_one_rollout_is_looked_into():
    names = run("02_one_rollout")
    assert names["before"].expert_ids_BSLK.shape[0] == 4
    assert (names["changed"].sum() > 0) == (names["drift"].slot_change > 0)


def test_a_router_variant_from_an_empty_page_has_a_drift_of_its_own():
    drifts = run("03_add_a_router")["drifts"]
    assert all(0 < drift < 1 for drift in drifts.values())
    assert drifts["native", 1e-3] > drifts["native", 1e-5]
    assert drifts["grid 0.2", 1e-3] != drifts["native", 1e-3]


def test_two_checkpoints_are_compared():
    layers = run("04_compare_checkpoints")["layers"]
    assert (layers["slot_change"] > 0).all()
    assert (layers["noise_slot_change"] == 0).all()
