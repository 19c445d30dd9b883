"""The rates of study=methods are those that the committed tuning study gives."""

import dataclasses
import runpy
from pathlib import Path

import pytest
import yaml

from moe_rl.store import StoreError, read_study

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


def test_the_replication_has_the_settings_of_methods_and_seeds_of_its_own():
    methods, again, tuning = (
        yaml.safe_load((ROOT / "conf" / "study" / f"{name}.yaml").read_text())
        for name in ("methods", "replication", "tuning")
    )
    swept = {study["study_name"]: study.pop("hydra")["sweeper"]["params"] for study in (methods, again, tuning)}
    seeds = {name: set(params["seed"].split(",")) for name, params in swept.items()}
    assert not seeds["replication"] & (seeds["methods"] | seeds["tuning"])
    rates = again.pop("lr_of_arm")
    assert rates.keys() == set(swept["replication"]["arm"].split(","))
    assert rates.items() <= methods.pop("lr_of_arm").items()
    assert again | {"study_name": "methods"} == methods


def test_the_replications_under_stress_are_side_by_side_with_other_seeds_and_without_experts():
    first, again, dense = (
        yaml.safe_load((ROOT / "conf" / "study" / f"{name}.yaml").read_text())
        for name in ("side_by_side", "replication_stress", "replication_dense")
    )
    arms, seeds = zip(
        *(study.pop("hydra")["sweeper"]["params"].values() for study in (first, again, dense)), strict=True
    )
    assert arms[0] == arms[1]
    assert seeds[1] == seeds[2]
    assert not {"0", "1", "2", "3", "4"} & set(seeds[1].split(","))
    assert first == again | {"study_name": "side_by_side"}
    assert dense == again | {"study_name": "replication_dense", "model": {"family": "dense"}}


def test_arms_with_fewer_runs_that_have_ended_are_refused():
    path = ROOT / "experiments" / "results" / "tuning"
    outcomes = runpy.run_path(str(ROOT / "experiments" / "tuned_rates.py"))["outcomes"]
    study = read_study(path)
    missing = study.runs.iloc[0]
    fewer = dataclasses.replace(study, runs=study.runs.iloc[1:].reset_index(drop=True), configs=study.configs[1:])
    outcomes.__globals__["read_study"] = lambda folder: fewer
    with pytest.raises(StoreError, match=f"{missing.arm} at .* has 1 runs that have ended, others 2; launch"):
        outcomes(path)
