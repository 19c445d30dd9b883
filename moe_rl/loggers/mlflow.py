"""MLflow: `mlflow ui --backend-store-uri sqlite:///<run>/mlflow/mlflow.db` shows a run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import ClassVar

from moe_rl.loggers.base import Log, Logger, Told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlflow(Logger):
    """A database in mlflow/, for MLflow refuses a store of plain files."""

    package: ClassVar = "mlflow"

    @contextlib.contextmanager
    def open(self, run: Told) -> Iterator[Log]:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        folder = run.folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
        known = client.get_experiment_by_name(run.study)
        place = known.experiment_id if known else client.create_experiment(run.study, folder.as_uri())
        before = client.search_runs([place])
        tracked = before[0] if before else client.create_run(place, run_name=run.name, tags={"config": str(run.config)})
        tracker = tracked.info.run_id

        def log(taken: int, numbers: dict[str, float]) -> None:
            now = int(time.time() * 1000)
            client.log_batch(tracker, [Metric(name, number, now, taken) for name, number in numbers.items()])

        yield log
        client.set_terminated(tracker)
