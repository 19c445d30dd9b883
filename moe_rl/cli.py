"""`python experiments/train.py`: one run, a sweep (-m), or a study."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from moe_rl import config as settings
from moe_rl.cold_start import ColdStartError
from moe_rl.records import RoutingError
from moe_rl.store import StoreError, open_run, run_folder

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# What a user can put right; anything else is a fault of the program and keeps its traceback.
USER_ERRORS = (settings.ConfigError, StoreError, ColdStartError, RoutingError)

sys.path.append(str(Path(__file__).parent / "plugins"))  # where Hydra finds moe_rl's launcher
settings.register()
ConfigStore.instance().store(
    group="hydra/launcher", name="moe_rl", node={"_target_": "hydra_plugins.moe_rl_local.LocalLauncher"}
)


def run_one(config: DictConfig) -> None:
    """Train the run that `config` describes, unless it is finished."""
    from moe_rl import loop

    experiment = settings.build(config)
    varied = settings.knobs(config, HydraConfig.get().overrides.task)
    folder = run_folder(config.launch.results_dir, experiment.study_name, experiment.label, varied, experiment.seed)
    show = print_step if config.launch.progress else lambda row: None
    with open_run(folder, settings.identity(config)) as writer:
        if writer is None:
            print(f"finished before: {folder}")
            return
        state = loop.run(experiment, writer, f"{config.launch.results_dir}/.cache/cold_start", show)
    print(f"{state}: {folder}")


def print_step(row: dict[str, Any]) -> None:
    shown = {
        "step": "4d",
        "reward": ".3f",
        "eval_reward": ".3f",
        "entropy": ".3f",
        "slot_change": ".2%",
        "cpu_s": ".1f",
    }
    print(
        "  ".join(f"{key} {row[key]:{digits}}" for key, digits in shown.items() if row.get(key) is not None), flush=True
    )


@hydra.main(version_base="1.3", config_path=settings.config_folder(), config_name="config")
def _main(config: DictConfig) -> None:
    try:
        run_one(config)
    except USER_ERRORS as error:
        raise SystemExit(f"error: {error}") from None


def train() -> None:
    """The command-line entry point."""
    sys.exit(_main())
