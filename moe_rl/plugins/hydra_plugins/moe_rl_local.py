"""Hydra finds launchers and sweepers in the namespace package `hydra_plugins` only; this is moe_rl's part of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """Runs of a sweep on this machine, each in a process of its own; see moe_rl.launcher."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from moe_rl.launcher import launch

        done = launch(self.context, self.config, job_overrides)
        return [JobReturn(overrides=overrides, status=JobStatus.COMPLETED) for overrides in done]


class CheckedLauncher(Launcher):
    """Another launcher, which gets the runs that are not finished, once all configs are checked."""

    def __init__(self, launcher: Launcher):
        self.launcher = launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from moe_rl.launcher import delegate

        return delegate(self.launcher, self.context, self.config, job_overrides, initial_job_idx)


class LocalSweeper(BasicSweeper):
    """Hydra's own, for launchers that check all configs before the first run starts."""

    launcher: Launcher | None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        if not isinstance(self.launcher, LocalLauncher):
            self.launcher = CheckedLauncher(self.launcher)
            self.launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> Any:
        from moe_rl.store import make_folder

        make_folder(Path(self.config.hydra.sweep.dir))
        return super().sweep(arguments)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Composes each config once more; the launcher has to anyway."""
