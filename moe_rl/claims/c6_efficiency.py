"""GSPO reaches more reward than GRPO with Routing Replay for the same queries and the same compute."""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.claims._effects import contrast, first_with_seeds, with_holm
from moe_rl.claims.base import NOT_TESTABLE, RELEVANT, Claim, Effect, Finding, above_zero, all_of, finding
from moe_rl.measures import BUDGETS, reward_at_equal
from moe_rl.store import Study

ARM, RIVALS = "gspo", ("grpo_routing_replay", "grpo")
CLAIM = Claim(
    id="C6",
    title="GSPO is more efficient at equal queries and equal compute",
    said="At the same training compute and the same number of queries, GSPO reaches better reward and benchmark "
    "scores than GRPO with Routing Replay.",
    source="arXiv 2507.18071, section 5.1 and figure 1",
    studies=("replication", "methods", "drift_per_update", "side_by_side"),
    measure="evaluation reward where a run had spent as many queries, response tokens, or CPU seconds of sampling, "
    "old pass and updates as the cheapest of the compared runs spent in all; interpolated, paired by seed, each arm "
    "at its best setting, diverged runs with reward 0.",
    rule="GSPO minus GRPO with replay (as in the source), at equal queries and at equal CPU seconds, in the first of "
    "these studies in which GSPO has 5 seeds. Supported: both lie above 0 with p < .05 (Holm over both). Not "
    f"supported: the interval of one ends below {RELEVANT:g}. Otherwise not testable.",
    figures=("reward_by_budget",),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    numbers = first_with_seeds(studies, CLAIM.studies, ARM)
    best = {arm: knobs for arm in (ARM, *RIVALS) if (knobs := numbers.best_setting(arm)) is not None}
    if ARM not in best or RIVALS[0] not in best:
        return Finding(
            NOT_TESTABLE, f"study {numbers.study.folder.name} lacks runs of {ARM} or {RIVALS[0]} with a result"
        )
    table = numbers.table
    compared = table[[best.get(arm) == knobs for arm, knobs in zip(table["arm"], table["knobs"], strict=True)]]
    found: dict[tuple[str, str], Effect] = {}
    for budget, told in BUDGETS.items():
        reached = compared.assign(reached=reward_at_equal(numbers.study, compared, budget)).dropna(subset="reached")
        by_arm = {arm: dict(zip(rows["seed"], rows["reached"], strict=True)) for arm, rows in reached.groupby("arm")}
        for rival in RIVALS:
            if rival in by_arm:
                at = numbers.at(best[ARM], best[rival])
                what = f"reward at equal {told}, {ARM} minus {rival}"
                found[budget, rival] = contrast(what, by_arm.get(ARM, {}), by_arm[rival], at)
    deciding = [(budget, RIVALS[0]) for budget in ("queries", "train_cpu_s")]
    effects = with_holm([found[place] for place in deciding])
    others = with_holm([effect for place, effect in found.items() if place not in deciding])
    return finding(all_of(*map(above_zero, effects)), [*effects, *others])
