"""Runs on disk: the only bridge between training and figures. Imports no torch.

    results/<study>/<arm>/<knob=value,...>/seed_<n>/
        config.yaml     the resolved config: the run's identity
        run.json        what it ran on: versions, commit, machine, model size, L, K, E
        status.json     state (running, finished, diverged, failed), progress, reason, and how much of each table is the
                        run's, with a digest; replaced atomically
        steps.jsonl     one line a step      \
        updates.jsonl   one line an update    >  columns: LEGEND
        drift.jsonl     one line a comparison /
        traces/         routing of some rollouts at some steps, if drift.trace_every says so
        policy/         the trained model, if launch.keep_policy says so
        checkpoint.safetensors   the state after the last whole step, while the run is not finished
        lock            held by the process that writes; the kernel frees it when that process dies

A study can also be packed into a few small files (packing.py); `read_study` reads either.

A second launch of a finished run does nothing, of one that was cut off goes on from its checkpoint, of a failed one
starts it again; with another config it is refused.
"""

from moe_rl.store.files import StoreError, WriteError, read_json, write_errors
from moe_rl.store.format import (
    DONE,
    KEY,
    LEGEND,
    LONGEST_NAME,
    QUANTILES,
    TABLES,
    Study,
    differing_keys,
    flatten,
    once_per_study,
    run_folder,
    settings_name,
    shared_and_varied,
)
from moe_rl.store.packing import is_packed, pack
from moe_rl.store.reading import read_status, read_study, read_table, run_folders, state_of
from moe_rl.store.writing import RunWriter, check_config, make_folder, open_run

__all__ = [
    "DONE", "KEY", "LEGEND", "LONGEST_NAME", "QUANTILES", "TABLES", "RunWriter", "StoreError", "Study", "WriteError",
    "check_config", "differing_keys", "flatten", "is_packed", "make_folder", "once_per_study", "open_run", "pack",
    "read_json", "read_status", "read_study", "read_table", "run_folder", "run_folders", "settings_name",
    "shared_and_varied", "state_of", "write_errors",
]  # fmt: skip
