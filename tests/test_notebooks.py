"""The guided tours run, and what they say about themselves is so."""

import runpy
from pathlib import Path

import torch

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def test_the_instrument_in_your_own_training(capsys):
    with torch.random.fork_rng():
        names = runpy.run_path(str(NOTEBOOKS / "instrument.py"))
    assert names["ratio_ranges"][0] == (1.0, 1.0)
    assert "update 1: ratios 1.000 to 1.000" in capsys.readouterr().out
    assert names["old"].valid_BS.all()
    assert not names["sampled"].aligned_to(names["mask"]).valid_BS[:, -1].any()
    assert names["total"].slot_change > 0
    assert len(names["table"]) > 0
