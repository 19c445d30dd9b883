"""The rates of study=methods are those that the committed tuning study gives."""

import runpy
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_each_arm_of_the_methods_study_has_the_rate_that_was_best_on_other_seeds():
    outcomes = runpy.run_path(str(ROOT / "experiments" / "tuned_rates.py"))["outcomes"]
    best = outcomes(ROOT / "experiments" / "results" / "tuning").idxmax(axis=1).to_dict()
    methods, tuning = (
        yaml.safe_load((ROOT / "conf" / "study" / f"{name}.yaml").read_text()) for name in ("methods", "tuning")
    )
    assert methods["lr_of_arm"] == best
    swept = [study["hydra"]["sweeper"]["params"] for study in (methods, tuning)]
    assert not {int(seed) for seed in swept[0]["seed"].split(",")} & {int(seed) for seed in swept[1]["seed"].split(",")}
    assert set(swept[0]["arm"].split(",")) == best.keys()
    assert {key: methods[key] for key in ("steps", "prompts", "model")} == {
        key: tuning[key] for key in ("steps", "prompts", "model")
    }
