"""What the README shows works as it is shown."""

import re
from pathlib import Path

import pytest
from test_cli import SMALL, train_here

README = (Path(__file__).parent.parent / "README.md").read_text()


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


def test_the_arms_of_the_readme_are_those_of_the_configs():
    import yaml

    from moe_rl.config import config_folder

    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d.e-]+) / ([\d.e-]+) \| (.*) \|$", README, re.M)
    assert {name for name, *_ in rows} >= {"grpo", "grpo_routing_replay", "gspo"}
    for name, low, high, replay in rows:
        arm = yaml.safe_load((Path(config_folder()) / "arm" / f"{name}.yaml").read_text())
        assert (float(low), float(high)) == (arm["policy_loss"]["clip_low"], arm["policy_loss"]["clip_high"])
        assert (replay == "none") == (arm["replay"] == "none")


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"^    python experiments/train\.py (.*?)(?:  +#.*)?$", README, re.M)))
)
def test_the_commands_of_the_readme_compose(command, monkeypatch, capsys, tmp_path):
    words = [word for word in command.split() if word != "-m"]
    if "sticky_top" in command or "--help" in command:
        return  # the first is a file that the reader writes, tried above
    code, out, err = train_here(monkeypatch, capsys, *[w.split(",")[0] for w in words], "--cfg", "job")
    assert code == 0, err
    assert "policy_loss" in out
