"""Clip bounds that clip a wanted share of tokens, from the log ratios that a study recorded."""

from __future__ import annotations

import numpy as np

from moe_rl.store import QUANTILES, StoreError, Study


def clip_bounds(study: Study, arm: str, target: float, level: str = "sequence", knobs: str = "") -> tuple[float, float]:
    """(clip_low, clip_high) at which an arm would clip a share `target` of its tokens, by both bounds alike.

        target = mean over updates of (P(log ratio > log(1 + clip_high)) + P(log ratio < log(1 - clip_low))) / 2

    A bound counts for advantages of one sign: half of them, whatever the ratio. level: sequence (log s) or token
    (log w). knobs: at which the arm ran, if it ran at several. The first update of a step has no ratio but 1 and is
    counted. The catch: other bounds train another policy, whose ratios differ: run it, and calibrate again.
    StoreError for an arm that the study lacks, or a target that lies outside of what was recorded.
    """
    rows = study.updates[study.updates["arm"] == arm]
    if rows.empty:
        raise StoreError(f"{study.folder} has no arm {arm}; it has {', '.join(sorted(set(study.updates['arm'])))}")
    settings = sorted(set(rows["knobs"]))
    if knobs not in settings and (knobs or len(settings) > 1):
        raise StoreError(f"{arm} ran at {' and at '.join(settings)}; choose one of them as knobs")
    rows = rows[rows["knobs"] == (knobs or settings[0])]
    quantiles = np.array(rows["log_s_q" if level == "sequence" else "log_w_q"].tolist(), dtype=float)
    moved = quantiles[:, 0] < quantiles[:, -1]
    least, most = QUANTILES[0] * moved.mean(), QUANTILES[2] * moved.mean()
    if not least <= target <= most:
        raise StoreError(f"the target is {target:g}; the recorded quantiles tell {least:.3g} to {most:.3g}")
    share = target / moved.mean()
    low, high = _threshold(quantiles[moved], share), -_threshold(-quantiles[moved][:, ::-1], share)
    return 1 - float(np.exp(low)), float(np.exp(high) - 1)


def _threshold(quantiles: np.ndarray, share: float) -> float:
    """Where the mean over rows of P(value < threshold) is `share`; a row's quantiles are joined by straight lines."""
    low, high = float(quantiles.min()), float(np.median(quantiles))
    for _ in range(60):
        middle = (low + high) / 2
        below = np.mean([np.interp(middle, row, QUANTILES, left=0.0, right=1.0) for row in quantiles])
        low, high = (middle, high) if below < share else (low, middle)
    return (low + high) / 2
