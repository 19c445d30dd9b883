"""The scripts of experiments/, as somebody calls them who does not know them."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent.parent / "experiments").glob("*.py"))
WITHOUT_ARGUMENTS = ("train.py", "family_table.py", "method_table.py")  # these have something to do then


def called(script, *arguments):
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_shows_how_to_call_a_script(script):
    done = called(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python experiments/{script.name}" in done.stdout


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.name not in WITHOUT_ARGUMENTS], ids=lambda s: s.stem)
def test_a_missing_argument_is_one_line_with_exit_code_2(script):
    done = called(script)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")
