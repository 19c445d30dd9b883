"""What differs in a study: pairs of arms, and pairs of an arm's settings, by their final rewards. No torch."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np
import pandas as pd

from moe_rl import stats
from moe_rl.store import Study, once_per_study
from moe_rl.summary import arms_of, is_number, knob_label, knob_pairs, knobs_of, run_measures, runs_in

COMPARISON = [
    "knobs", "other_knobs", "first", "second", "n", "difference", "low", "high", "p", "sign_flip_p", "claim",
]  # fmt: skip
USUAL = (None, "native", "all")  # a knob that is not given, router=native, optim.trains=all


def settings_to_compare(study: Study, first: str, second: str) -> list[tuple[str, str]]:
    """Knob settings at which two arms meet: those that both have, else the only one of each (each arm's own)."""
    one, other = ([knobs for knobs in knobs_of(study) if runs_in(study, arm, knobs)] for arm in (first, second))
    shared = [(knobs, knobs) for knobs in one if knobs in other]
    return shared or ([(one[0], other[0])] if len(one) == len(other) == 1 else [])


@once_per_study
def comparison_table(study: Study) -> pd.DataFrame:
    """A row per pair of arms at one knob setting: final reward, first minus second, paired by seed, finished runs only.

    Two arms that share no setting are compared if each has one only: its own. Columns: see `_compared`.
    """
    pairs = itertools.combinations(arms_of(study), 2)
    return _compared(
        study,
        [((a, here), (b, there)) for a, b in pairs for here, there in settings_to_compare(study, a, b)],
    )


@once_per_study
def setting_table(study: Study) -> pd.DataFrame:
    """As `comparison_table`, a row per arm and pair of its settings that differ in one choice, such as the router.

    A number that is swept is no choice, but giving one where the other setting gives none is. Settings in which the
    choice is the usual one are the second of all pairs, if there are any; else each is compared with each. Other models
    and tasks have other rewards to begin with and are not compared.
    """
    found = []
    for arm in arms_of(study):
        choices = collections.defaultdict(list)
        for here, there in itertools.combinations([k for k in knobs_of(study) if runs_in(study, arm, k)], 2):
            key, values = _choice_between(knob_pairs(here), knob_pairs(there))
            if key:
                usual = [value in USUAL for value in values]
                pair = (there, here) if usual[0] else (here, there)
                choices[key].append((any(usual), ((arm, pair[0]), (arm, pair[1]))))
        for pairs in choices.values():
            one_is_usual = any(usual for usual, _ in pairs)
            found += [pair for usual, pair in pairs if usual or not one_is_usual]
    return _compared(study, found)


def _choice_between(one: dict[str, str], other: dict[str, str]) -> tuple[str, list[str | None]]:
    """The knob in which two settings differ, and its values, None where it is not given; ('', []) for no choice."""
    differing = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
    if len(differing) != 1 or differing[0].split(".")[0] in ("model", "task"):
        return "", []
    values = [settings.get(differing[0]) for settings in (one, other)]
    return ("", []) if all(value is not None and is_number(value) for value in values) else (differing[0], values)


Cell = tuple[str, str]  # arm, knobs


def _compared(study: Study, pairs: list[tuple[Cell, Cell]]) -> pd.DataFrame:
    """A row per pair whose cells share seeds: final reward, first minus second, paired by seed, finished runs only.

    Columns: knobs (of the first), other_knobs (of the second), first, second, n, difference, low, high (95 % t
    interval, NaN below 2 pairs), p (paired t test) and sign_flip_p (exact; NaN above 20 pairs), both Holm over all rows
    and NaN below 5 pairs, and claim, by p: 'differ', 'no difference shown' or 'too few seeds for ...'.
    """
    runs = run_measures(study)
    runs = runs[(runs["state"] == "finished") & runs["final_reward"].notna()]
    rows: list[dict[str, Any]] = []
    for (first, knobs), (second, other_knobs) in pairs:
        a, b = (
            runs[(runs["arm"] == arm) & (runs["knobs"] == at)].set_index("seed")["final_reward"].to_dict()
            for arm, at in ((first, knobs), (second, other_knobs))
        )
        if not a.keys() & b.keys():
            continue
        differences = stats.paired(a, b)
        difference, (p, sign_flip_p) = stats.mean_interval(differences), stats.both_tests(differences)
        rows.append(
            {
                "knobs": knobs,
                "other_knobs": other_knobs,
                "first": first,
                "second": second,
                "n": difference.n,
                "difference": difference.value,
                "low": difference.low,
                "high": difference.high,
                "p": p,
                "sign_flip_p": sign_flip_p,
            }
        )
    adjusted = (stats.holm([row[test] for row in rows]) for test in ("p", "sign_flip_p"))
    for row, p, sign_flip_p in zip(rows, *adjusted, strict=True):
        row |= {"p": p, "sign_flip_p": sign_flip_p}
        row["claim"] = stats.TOO_FEW if np.isnan(row["p"]) else "differ" if row["p"] < 0.05 else "no difference shown"
    order = {knobs: place for place, knobs in enumerate(knobs_of(study))}
    rows.sort(key=lambda row: order[row["knobs"]])
    return pd.DataFrame(rows, columns=COMPARISON)


def pair_label(study: Study, row: dict[Any, Any]) -> str:
    """A row of `comparison_table` or `setting_table` in words: which arms or settings, first minus second."""
    everywhere = knobs_of(study)
    one, other = (knob_label(row[name], everywhere) or "as it is" for name in ("knobs", "other_knobs"))
    if row["first"] == row["second"]:
        return f"{row['first']}: {one} minus {other}"
    at = "" if one == other == "as it is" else f", {one}" if one == other else f", {one} against {other}"
    return f"{row['first']} minus {row['second']}{at}"
