"""GSPO can take the old likelihoods from the inference engine instead of recomputing them."""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.claims._effects import Numbers, contrast, level_of, numbers_of, with_holm
from moe_rl.claims.base import NOT_TESTABLE, RELEVANT, Claim, Effect, Finding, above_zero, all_of, finding, no_worse
from moe_rl.contrasts import settings_to_compare
from moe_rl.store import Study

OWN, ENGINE = "gspo", "gspo_engine_logprobs"
MISMATCH = {
    "mismatch_k3": "KL(engine || trainer) of a token, nats (k3)",
    "mismatch_f2": "share of tokens whose likelihood differs by a factor above 2",
    "routing_mismatch": "share of expert slots that differ between engine and trainer",
}
CLAIM = Claim(
    id="C7",
    title="GSPO can use the likelihoods of the engine",
    said="GSPO tolerates the precision gap between inference and training engine, so the likelihoods that the engine "
    "returned can be used without recomputing them.",
    source="arXiv 2507.18071, section 5.4",
    studies=("engine_likelihoods",),
    measure="final reward (diverged: 0), paired by seed, old likelihoods from the engine minus recomputed, where the "
    "engine computes in another precision than the trainer.",
    rule="At every such precision. Supported: GSPO with the engine's likelihoods gains reward (interval above 0, p < "
    f".05) and a loss of {RELEVANT:g} against recomputing is excluded, at each. Not supported: at one of them the "
    f"interval of the gain ends below {RELEVANT:g}, or the loss lies below 0 with p < .05, {RELEVANT:g} not being "
    "excluded. Otherwise not testable. Holm over these tests.",
    figures=("reward", "exceedance"),
)


def judge(studies: Mapping[str, Study]) -> Finding:
    study = studies["engine_likelihoods"]
    numbers = numbers_of(study, dtype="engine.dtype", fp8="engine.fp8_emulated", trained="model.dtype")
    gaps = [place for place in settings_to_compare(study, ENGINE, OWN) if _has_gap(numbers, place[0])]
    if not gaps:
        return Finding(NOT_TESTABLE, f"no setting with a precision gap has both {ENGINE} and {OWN}")
    adjusted = with_holm([effect for place in gaps for effect in _pair(numbers, *place)])
    parts = [part for i in range(0, len(adjusted), 2) for part in (above_zero(adjusted[i]), no_worse(adjusted[i + 1]))]
    token = [_loss(numbers, "grpo", *place) for place in settings_to_compare(study, "grpo_engine_logprobs", "grpo")]
    mismatch = [
        level_of(told, values, numbers.at(knobs), tested=False)
        for knobs, _ in gaps
        for name, told in MISMATCH.items()
        if (values := numbers.of(name, arm=ENGINE, knobs=knobs))
    ]
    return finding(all_of(*parts), [*adjusted, *with_holm(token), *mismatch])


def _has_gap(numbers: Numbers, knobs: str) -> bool:
    """Whether the engine computes in another precision than the trainer."""
    settings = numbers.rows(knobs=knobs)[["fp8", "dtype", "trained"]].to_numpy()
    return all(fp8 or dtype not in (None, "same", trained) for fp8, dtype, trained in settings)


def _pair(numbers: Numbers, engine: str, own: str) -> tuple[Effect, Effect]:
    gain = numbers.of("gain", arm=ENGINE, knobs=engine)
    return (
        level_of(f"the gain of {ENGINE}", gain, numbers.at(engine)),
        _loss(numbers, OWN, engine, own),
    )


def _loss(numbers: Numbers, arm: str, engine: str, own: str) -> Effect:
    a = numbers.of("outcome", arm=f"{arm}_engine_logprobs", knobs=engine)
    b = numbers.of("outcome", arm=arm, knobs=own)
    return contrast(f"final reward, {arm}, engine's minus recomputed likelihoods", a, b, numbers.at(engine, own))
