"""A study in a few small files, from which all figures and reports are drawn again without training.

    <study>/runs.parquet  steps.parquet  updates.parquet  drift.parquet   the tables, numbers as float32
    <study>/configs.json    the settings that all runs share, of each run those that vary, and a digest of each file
    <study>/measures.parquet   numbers of each run that were taken before anything was left out: means stay exact

To stay small, lists keep 10 significant bits, and where that is not enough, updates and drift keep every n-th measured
step of a run and its last; steps at which more was measured on demand are thinned less. The metadata of a file say what
was done to it.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moe_rl.store.files import (
    FORMAT,
    StoreError,
    check_format,
    digest,
    from_json,
    read_bytes,
    read_json,
    seal,
    to_json,
    write_atomic,
)
from moe_rl.store.format import KEY, LEGEND, TABLES, Study, shared_and_varied, unflatten

THINNING = (  # every n-th measured step is kept: of updates, of drift, of drift with what is measured on demand
    *((1, 1, 1), (1, 2, 1), (1, 5, 1), (1, 5, 2), (2, 5, 2), (2, 10, 2), (5, 10, 2), (5, 20, 5)),
    *((10, 20, 5), (10, 50, 10)),
)
ON_DEMAND = ("max_violation", "flip_rms")  # measured at few steps only: drift.soft_every, drift.flips_every
LIST_BITS = 10
EXACT = ("step", "update", "n", "queries", "tokens", "reference")  # counts and names
LOCAL = ("folder", "pid")  # columns of runs that mean nothing elsewhere
CONFIGS = "configs.json"
ADVICE = "pack the study again"


def is_packed(folder: Path) -> bool:
    return (folder / "runs.parquet").exists()


# ------------------------------------------------------------------------------------------------------------- writing
def pack(study: Study, folder: str | Path, measures: pd.DataFrame, limit_bytes: int = 300_000) -> list[Path]:
    """Write a study to `folder` in its small form; returns the files.

    measures: one row a run with KEY columns, kept exactly. Tables are thinned until all is below `limit_bytes`.
    Errors: StoreError for a study whose runs still go on, or a folder that holds runs.
    """
    folder = Path(folder)
    if (study.runs["state"] == "running").any():
        raise StoreError(f"runs of {study.folder} are still running; wait for them, or stop them")
    if next(folder.glob("*/*/seed_*"), None):
        raise StoreError(f"{folder} holds the runs themselves; pack them into another folder")
    runs = study.runs.drop(columns=[name for name in LOCAL if name in study.runs])
    files = {"runs.parquet": _parquet(runs, ""), "steps.parquet": _parquet(_narrow(study.steps), "")}
    files |= {"measures.parquet": _parquet(measures, "")}
    richer = _richer(study.drift)
    for nth_update, nth_drift, nth_richer in THINNING:
        drift = [_thin(study.drift[~richer], nth_drift), _thin(study.drift[richer], nth_richer)]
        files |= {
            "updates.parquet": _parquet(_narrow(_thin(study.updates, nth_update)), _told(nth_update)),
            "drift.parquet": _parquet(_narrow(pd.concat(drift).sort_index()), _told(nth_drift, nth_richer)),
        }
        files[CONFIGS] = _configs(study, {name: digest(files[name]) for name in files if name != CONFIGS}).encode()
        if sum(map(len, files.values())) <= limit_bytes:
            break
    for name, content in files.items():
        write_atomic(folder / name, content)
    return [folder / name for name in files]


def _told(nth: int, nth_richer: int = 1) -> str:
    if nth == nth_richer == 1:
        return ""
    told = f"one of {nth} measured steps and the last of each run are kept"
    return told if nth_richer == 1 else f"{told}, of those with soft drift or flips one of {nth_richer}"


def _thin(table: pd.DataFrame, nth: int) -> pd.DataFrame:
    """Rows of a run's first measured step, of every n-th after it and of its last."""
    if nth == 1 or table.empty:
        return table
    step = table["step"].astype(int)
    runs = step.groupby([table[name] for name in KEY])
    place = runs.rank(method="dense") - 1
    return table[(place % nth == 0) | (step == runs.transform("max"))]


def _richer(drift: pd.DataFrame) -> pd.Series[bool]:
    """Whether a row is of a step at which something was measured on demand."""
    measured = drift[list(ON_DEMAND)].notna().any(axis=1)
    return measured.groupby([drift[name] for name in (*KEY, "step")]).transform("any").astype(bool)


def _narrow(table: pd.DataFrame) -> pd.DataFrame:
    """Without empty columns, floats as float32, lists with LIST_BITS significant bits."""
    narrow = table.dropna(axis="columns", how="all").copy()
    for name in narrow.columns.difference([*KEY, *EXACT]):
        values = narrow[name]
        if values.map(lambda value: isinstance(value, list)).any():
            narrow[name] = [None if not isinstance(x, list) else _short(x) for x in values]
        elif values.dtype == np.float64:
            narrow[name] = values.astype(np.float32)
    return narrow


def _short(values: list[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    return np.ldexp(np.round(np.ldexp(mantissa, LIST_BITS)), exponent - LIST_BITS).astype(np.float32)


def _parquet(table: pd.DataFrame, thinned: str) -> bytes:
    """A table as parquet bytes; cells that hold objects (versions, noise floor) as JSON, named in the metadata."""
    as_json = [name for name in table if table[name].map(lambda cell: isinstance(cell, (dict, list))).any()]
    table = table.assign(**{name: [_to_text(cell) for cell in table[name]] for name in as_json})
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    facts = {"format": FORMAT, "thinned": thinned, "json": as_json}
    arrow = arrow.replace_schema_metadata({"moe_rl": json.dumps(facts)})
    leaves = {
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name: pa.types.is_floating(
            field.type.value_type if pa.types.is_list(field.type) else field.type
        )
        for field in arrow.schema
    }
    buffer = io.BytesIO()
    pq.write_table(
        arrow,
        buffer,
        compression="zstd",
        compression_level=19,
        use_byte_stream_split=[name for name, floating in leaves.items() if floating],
        use_dictionary=[name for name, floating in leaves.items() if not floating],
        write_statistics=False,
    )
    return buffer.getvalue()


def _to_text(cell: Any) -> str | None:
    return json.dumps(to_json(cell)) if isinstance(cell, (dict, list)) else None


def _configs(study: Study, digests: dict[str, str]) -> str:
    """configs.json: one line a run, so that two runs can be compared by eye."""
    shared, varied = shared_and_varied(study.configs)
    keys = study.runs[list(KEY)].to_dict("records")
    runs = [{**key, "varied": settings} for key, settings in zip(keys, varied, strict=True)]
    told = seal({"shared": shared, "files": digests, "runs": runs})
    lines = ",\n".join(json.dumps(run) for run in told.pop("runs"))
    head = json.dumps(told, indent=1).removesuffix("\n}")
    return f'{head},\n "runs": [\n{lines}\n]}}\n'


# ------------------------------------------------------------------------------------------------------------- reading
def unpack(folder: Path) -> Study:
    """The study that `pack` wrote. Errors: StoreError for a file that is missing, damaged or newer than this code."""
    if not (folder / CONFIGS).exists():
        raise StoreError(f"{folder / CONFIGS} is missing; {ADVICE}")
    configs = read_json(folder / CONFIGS, marker="files", advice=ADVICE)
    data = {name: _whole(folder / f"{name}.parquet", configs.get("files")) for name in ("runs", *TABLES, "measures")}
    tables, thinned = {}, []
    for name, content in data.items():
        tables[name], left_out = _read(folder / f"{name}.parquet", content)
        thinned += [f"{name}: {left_out}"] if left_out else []
    runs, exact = tables.pop("runs"), tables.pop("measures")
    runs["folder"] = [str(folder.joinpath(*map(str, key[:2]), f"seed_{key[2]}")) for key in runs[list(KEY)].to_numpy()]
    for name, table in tables.items():
        tables[name] = table.reindex(columns=[*KEY, *LEGEND[name]])
    told = configs.get("runs", ())
    if len(told) != len(runs):
        raise StoreError(f"{folder / CONFIGS} has {len(told)} runs, runs.parquet {len(runs)}; {ADVICE}")
    settings = [unflatten({**configs["shared"], **run["varied"]}) for run in told]
    return Study(folder, runs, **tables, configs=settings, exact=exact, thinned="; ".join(thinned))


def _whole(path: Path, digests: dict[str, str] | None) -> bytes:
    """The content of a file as it was packed. digests: None where it was packed before there were any."""
    try:
        data = read_bytes(path)
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing; {ADVICE}") from error
    if digests is not None and digest(data) != digests.get(path.name):
        raise StoreError(f"{path} is damaged (its digest does not match); {ADVICE}")
    return data


def _read(path: Path, data: bytes) -> tuple[pd.DataFrame, str]:
    """(table, what it leaves out)."""
    try:
        arrow = pq.read_table(pa.BufferReader(data))
        facts = json.loads(arrow.schema.metadata[b"moe_rl"])
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({str(error).splitlines()[0]}); {ADVICE}") from error
    check_format(path, facts["format"])
    table = arrow.to_pandas()
    nothing = float("nan")
    for field in arrow.schema:
        if pa.types.is_list(field.type):
            table[field.name] = [nothing if x is None else x for x in arrow.column(field.name).to_pylist()]
    for name in facts["json"]:
        table[name] = [nothing if not isinstance(x, str) else _from_text(x) for x in table[name]]
    return table, facts["thinned"]


def _from_text(text: str) -> Any:
    value = json.loads(text)
    return {key: from_json(item) for key, item in value.items()} if isinstance(value, dict) else from_json(value)
