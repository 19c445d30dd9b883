"""What the README shows works as it is shown."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_cli import FIGURES, SMALL, TRAIN, train_here

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = README + (ROOT / "experiments" / "CLUSTERS.md").read_text()


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_router_variant_of_the_readme_runs_from_outside_the_package(tmp_path, monkeypatch, capsys):
    (code,) = [block for block in python_blocks() if "class StickyTop" in block]
    (tmp_path / "my_lab.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = [
        "router._target_=my_lab.StickyTop",
        "+router.grid=0.1",
        f"launch.results_dir={tmp_path}/results",
        *SMALL,
    ]
    code, _, err = train_here(monkeypatch, capsys, *arguments)
    assert code == 0, err
    (config,) = tmp_path.glob("results/playground/grpo/*/seed_0/config.yaml")
    assert "_target_: my_lab.StickyTop" in config.read_text()
    assert "grid: 0.1" in config.read_text()


def test_a_router_and_a_loss_from_empty_files_outside_the_package_are_in_table_and_figures(tmp_path):
    """The README's two files and its arm, followed to the letter; only the study's values are made small."""
    for name, kind in (("my_lab", "StickyTop"), ("pulled", "Pulled")):
        (code,) = [block for block in python_blocks() if f"class {kind}" in block]
        (tmp_path / f"{name}.py").write_text(code)
    for folder in ("arm", "study"):
        (tmp_path / "my_conf" / folder).mkdir(parents=True)
    (arm,) = re.findall(r"^    (defaults: \[schema, _self_\]\n    policy_loss: {_target_: pulled.*)$", README, re.M)
    (tmp_path / "my_conf" / "arm" / "pulled.yaml").write_text(textwrap.dedent("    " + arm))
    values = "\n".join("{}: {}".format(*x.split("=")) for x in SMALL if "." not in x)
    groups = "drift: {probe: 2, rollouts: 2}\ncold_start: {steps: 2}\nmodel: {layers: 2, hidden_size: 32, experts: 8}"
    study = f"# @package _global_\nstudy_name: mine\n{values}\n{groups}\n"
    (tmp_path / "my_conf" / "study" / "mine.yaml").write_text(study)
    assert "--config-dir my_conf -m study=mine arm=grpo,pulled" in README
    routers = "router._target_=moe_rl.routers.native.Native,my_lab.StickyTop"
    words = ["--config-dir", "my_conf", "-m", "study=mine", "arm=pulled", routers, "seed=0"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(TRAIN).parents[1]}"}
    results = tmp_path / "results" / "mine"
    for command in (
        [TRAIN, *words, f"launch.results_dir={tmp_path}/results", "launch.jobs=1"],
        [FIGURES, str(results), "--only", "reward"],
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = (results / "summary.csv").read_text().splitlines()[1:]
    assert [row.startswith("pulled,") for row in rows] == [True, True]
    assert ["my_lab.StickyTop" in row for row in rows] == [False, True]
    drawn = (results / "figures" / "reward.svg").read_text()
    assert "pulled" in drawn
    assert "my_lab.StickyTop" in drawn


def test_the_arms_of_the_readme_are_those_of_the_configs():
    import yaml

    from moe_rl.config import config_folder

    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d.e-]+) / ([\d.e-]+) \| (.*) \|$", README, re.M)
    assert {name for name, *_ in rows} >= {"grpo", "grpo_routing_replay", "gspo"}
    for name, low, high, replay in rows:
        arm = yaml.safe_load((Path(config_folder()) / "arm" / f"{name}.yaml").read_text())
        assert (float(low), float(high)) == (arm["policy_loss"]["clip_low"], arm["policy_loss"]["clip_high"])
        assert (replay == "none") == (arm["replay"] == "none")


def test_the_options_that_the_readme_offers_are_there_and_no_arm_is_missing():
    rows = re.findall(r"^\| [^|]+ \| (.*) \|$", README, re.M)
    named = {group: set() for group in ("arm", "router", "model")}
    for row in rows:
        for part in re.split(r"(?=`(?:arm|router|model)=)", row):
            group = part[1:].partition("=")[0]
            if group in named:
                named[group] |= set(re.findall(r"`(?:\w+=)?([a-z]\w+)`", part))
    folder = ROOT / "conf"
    arms = {path.stem for path in (folder / "arm").glob("*.yaml")}
    routers = {path.stem for path in (ROOT / "moe_rl" / "routers").glob("*.py")} - {"__init__", "base", "native"}
    models = {path.stem for path in (folder / "model").glob("tiny_*.yaml")} - {"tiny_qwen3_moe"}
    assert arms - named["arm"] == {"grpo", "gspo", "grpo_routing_replay"}  # the table above has these
    assert (routers - named["router"], models - named["model"]) == (set(), set())


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"^    python experiments/train\.py (.*?)(?:  +#.*)?$", COMMANDS, re.M)))
)
def test_the_commands_of_the_readme_compose(command, monkeypatch, capsys, tmp_path):
    extras = ("hydra/", "hydra.", "+hydra.")  # launchers that are installed apart
    words = [word for word in command.split() if word not in ("-m", "\\") and not word.startswith(extras)]
    if "sticky_top" in command or "my_conf" in command or "--help" in command:
        return  # the first two are files that the reader writes, tried above
    code, out, err = train_here(monkeypatch, capsys, *[w.split(",")[0] for w in words], "--cfg", "job")
    assert code == 0, err
    assert "policy_loss" in out
