"""Effects from the numbers of runs: what the rules judge."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from moe_rl import measures, stats, summary
from moe_rl.claims.base import Effect, Values
from moe_rl.figures.base import model_text
from moe_rl.store import Study

# The studies that compare GRPO, GRPO with Routing Replay and GSPO.
COMPARISONS = ("replication", "replication_stress", "methods", "drift_per_update", "side_by_side", "stability_frontier")


def contrast(what: str, a: Values, b: Values, at: str = "") -> Effect:
    """Mean of a - b over common seeds, with the raw p of both tests. No common seed: n = 0."""
    common = a.keys() & b.keys()
    return level_of(what, {seed: a[seed] - b[seed] for seed in sorted(common)}, at)


def level_of(what: str, values: Values, at: str = "", tested: bool = True) -> Effect:
    """Mean of one number a seed; `tested`: against 0."""
    numbers = [value for value in values.values() if math.isfinite(value)]
    if not numbers:
        return Effect(what, stats.Estimate(math.nan, math.nan, math.nan, 0), at)
    p, exact = stats.both_tests(numbers) if tested else (math.nan, math.nan)
    return Effect(what, stats.mean_interval(numbers), at, p, exact)


def with_holm(effects: Sequence[Effect]) -> list[Effect]:
    """The same effects, both p values adjusted over all of them that have one."""
    adjusted = (stats.holm([getattr(effect, test) for effect in effects]) for test in ("p", "sign_flip_p"))
    return [dataclasses.replace(e, p=p, sign_flip_p=exact) for e, p, exact in zip(effects, *adjusted, strict=True)]


# ------------------------------------------------------------------------------------------------- numbers of one study
@dataclasses.dataclass(frozen=True)
class Numbers:
    """A study's numbers, a row a run: `measures.run_numbers` with the settings that were asked for as columns."""

    study: Study
    table: pd.DataFrame

    def of(self, column: str, **where: object) -> dict[int, float]:
        """Seed -> the column's value, for the runs whose columns equal `where`; runs without it are left out."""
        rows = self.rows(**where)
        if rows["seed"].duplicated().any():
            raise ValueError(f"{where} names several runs a seed in study {self.study.folder.name}")
        return {int(s): float(v) for s, v in zip(rows["seed"], rows[column], strict=True) if math.isfinite(float(v))}

    def settings(self, arm: str, **where: object) -> list[str]:
        """The knob settings at which an arm was run, in order, of those whose columns equal `where`."""
        rows = self.rows(arm=arm, **where)
        present = set(rows["knobs"])
        return [knobs for knobs in summary.knobs_of(self.study) if knobs in present]

    def best_setting(self, arm: str, **where: object) -> str | None:
        """The setting with the highest mean outcome; None without the arm, or where no run of it has ended."""
        found = self.settings(arm, **where)
        means = {knobs: list(self.of("outcome", arm=arm, knobs=knobs).values()) for knobs in found}
        reached = {knobs: float(np.mean(values)) for knobs, values in means.items() if values}
        return max(reached, key=lambda knobs: reached[knobs]) if reached else None

    def at_best(self, column: str, arm: str, **where: object) -> dict[int, float]:
        """Seed -> the column's value at the arm's best setting; {} where it has none."""
        knobs = self.best_setting(arm, **where)
        return {} if knobs is None else self.of(column, arm=arm, knobs=knobs)

    def rows(self, **where: object) -> pd.DataFrame:
        rows = self.table
        for name, value in where.items():
            rows = rows.loc[np.array([cell == value for cell in rows[name]], dtype=bool)]
        return rows

    def at(self, *knobs: str) -> str:
        """Study and setting in words."""
        labels = [summary.knob_label(one, summary.knobs_of(self.study)) for one in dict.fromkeys(knobs)]
        return ", ".join([self.study.folder.name, *(label for label in labels if label)])


def first_with_seeds(studies: Mapping[str, Study], names: Sequence[str], arm: str) -> Numbers:
    """Numbers of the first of these studies in which `arm` has enough seeds for a claim, else of the first that ran."""
    every = [numbers_of(studies[name]) for name in names if name in studies]
    enough = (one for one in every if len(one.at_best("outcome", arm)) >= stats.CLAIM_RUNS)
    return next(enough, every[0])


def numbers_of(study: Study, **settings: str) -> Numbers:
    """Run numbers of a study. settings: column name -> dotted name of the setting, such as lr='optim.lr'."""
    table = measures.run_numbers(study)
    return Numbers(study, table.assign(**{column: list(study.setting(name)) for column, name in settings.items()}))


def model_note(study: Study) -> str:
    """Sizes and floors that a number of drift is never told without."""
    models = study.runs.reindex(columns=["top_k", "num_experts"]).dropna().astype(int).drop_duplicates()
    chance = ", ".join(f"{k / e:.3g}" for k, e in models.itertuples(index=False, name=None) if e)
    shared = f" Unrelated routers share K/E = {chance} of their slots." if chance else ""
    return f"{model_text(study)}.{shared}{summary.noise_text(study)}"


def nothing_to_cure(numbers: Numbers, **where: object) -> list[str]:
    """A note, if GRPO without any cure gains reward at its best setting, too."""
    gain = level_of("", numbers.at_best("gain", "grpo", **where)).estimate
    return [f"Plain GRPO gains {gain} here: there was nothing to cure."] if gain.low > 0 else []


def frontier_effects(studies: Mapping[str, Study]) -> list[Effect]:
    """The largest learning rate that each arm survives, and by how many doublings each two differ.

    Of study stability_frontier; nothing where it was not run.
    """
    if (study := studies.get("stability_frontier")) is None:
        return []
    numbers = numbers_of(study, lr="optim.lr", at="updates")
    table = measures.largest_surviving(numbers.table, numbers.table["lr"])
    effects, doublings = [], []
    for at in sorted(set(table["at"])):
        reached = {
            arm: dict(zip(rows["seed"], rows["largest"], strict=True))
            for arm, rows in table[table["at"] == at].groupby("arm")
        }
        where = f"{study.folder.name}, M={at}"
        arms = [arm for arm in summary.arms_of(study) if arm in reached]
        for arm in arms:
            effects.append(level_of(f"{arm}: largest learning rate survived", reached[arm], where, tested=False))
        for one, other in itertools.combinations(arms, 2):
            a, b = ({s: math.log2(lr) for s, lr in reached[arm].items() if lr > 0} for arm in (other, one))
            doublings.append(contrast(f"doublings of that rate, {other} minus {one}", a, b, where))
    return [*effects, *with_holm(doublings)]


def slope_by_seed(numbers: Numbers, arm: str, x: str, y: str, **where: object) -> dict[int, float]:
    """Seed -> exponent b of y ~ x^b over an arm's runs. Seeds with fewer than 3 positive points are left out."""
    found = {}
    for seed in sorted(set(numbers.table["seed"])):
        points = numbers.rows(arm=arm, seed=seed, **where)[[x, y]].astype(float)
        points = points[np.isfinite(points).all(axis=1) & (points > 0).all(axis=1)]
        if len(points) >= 3 and points[x].nunique() >= 2:
            found[int(seed)] = stats.log_log_slope(points[x].to_list(), points[y].to_list()).slope.value
    return found
