"""Token-level ratios destabilise GRPO, and Mixture-of-Experts makes it worse."""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.claims._effects import Numbers, contrast, numbers_of, with_holm
from moe_rl.claims.base import NOT_TESTABLE, RELEVANT, Claim, Effect, Finding, above_zero, all_of, any_of, finding
from moe_rl.store import Study

TOKEN, SEQUENCE, DENSE = "grpo", "gspo", "dense"
CLAIM = Claim(
    id="C9",
    title="Token ratios destabilise GRPO, more so on MoE",
    said="The instability of GRPO comes from importance weights on single tokens, and is aggravated by the routing "
    "of MoE models, whose activated experts change between updates.",
    source="arXiv 2507.18071, sections 3 and 5.3",
    studies=("dense_twin",),
    measure="final reward (diverged: 0), gspo minus grpo, paired by seed, on the MoE model, and the same minus that "
    "difference on the dense twin of equal active size.",
    rule="At every learning rate that both models and both arms share. Supported: at some rate both lie above 0 with "
    f"p < .05 (Holm over all). Not supported: at every rate the interval of one ends below {RELEVANT:g}. Otherwise not "
    "testable.",
    figures=("reward", "knob_heat_map"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    numbers = numbers_of(studies["dense_twin"], lr="optim.lr", family="model.family")
    families = sorted({family for family in numbers.table["family"] if family not in (DENSE, None)})
    places = [(family, lr) for family in families for lr in sorted(set(numbers.table["lr"]))]
    pairs = [_pair(numbers, *place) for place in places]
    adjusted = with_holm([effect for pair in pairs for effect in pair])
    judged = [
        all_of(above_zero(on_moe), above_zero(more))
        for on_moe, more in zip(adjusted[::2], adjusted[1::2], strict=True)
        if more.estimate.n
    ]
    if not judged:
        return Finding(
            NOT_TESTABLE, "study dense_twin has no learning rate with both arms on both models", tuple(adjusted)
        )
    return finding(any_of(judged, "learning rates"), adjusted)


def _pair(numbers: Numbers, family: str, lr: float) -> tuple[Effect, Effect]:
    moe, dense = _difference(numbers, family, lr), _difference(numbers, DENSE, lr)
    at = f"{numbers.study.folder.name}, lr={lr:g}"
    return (
        contrast(f"final reward, {SEQUENCE} minus {TOKEN}, {family}", moe, dict.fromkeys(moe, 0.0), at),
        contrast(f"that difference, {family} minus {DENSE}", moe, dense, at),
    )


def _difference(numbers: Numbers, family: str, lr: float) -> dict[int, float]:
    a, b = (numbers.of("outcome", arm=arm, family=family, lr=lr) for arm in (SEQUENCE, TOKEN))
    return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}
