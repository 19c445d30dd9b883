"""Hydra finds launchers and sweepers in the namespace package `hydra_plugins` only; this is moe_rl's part of it."""

from collections.abc import Sequence

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


class LocalSweeper(BasicSweeper):
    """Hydra's own, which composes each run's config once instead of twice where the launcher checks them all anyway."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        if not isinstance(self.launcher, LocalLauncher):
            super().validate_batch_is_legal(batch)
