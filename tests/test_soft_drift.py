"""Soft drift against numbers worked by hand, and in its limits."""

import math

import pytest
import torch

from moe_rl.drift.soft import router_state, soft_drift
from moe_rl.routing_trace import RoutingTrace


def trace(logits_BSLE, top_k=2, valid=None, margins_from=lambda logits: logits):
    """A router that ranks its logits; margins in the unit of margins_from(logits)."""
    logits = torch.as_tensor(logits_BSLE, dtype=torch.float32)
    B, S, L, E = logits.shape
    best = margins_from(logits).topk(top_k + 1, -1).values
    return RoutingTrace(
        logits.topk(top_k, -1).indices.to(torch.uint8),
        torch.ones(B, S, dtype=torch.bool) if valid is None else torch.tensor(valid),
        tuple(f"layer{i}" for i in range(L)),
        E,
        extras={"router_logits": logits, "margins": best[..., top_k - 1 : top_k] - best[..., top_k:]},
    )


def random_logits(seed, shape=(10, 20, 3, 16)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_kl_and_js_by_hand():
    """p = (1/2, 1/2), q = (1/4, 3/4), m = (3/8, 5/8); the second layer stays."""
    old = torch.tensor([[[[0.5, 0.5], [0.9, 0.1]]]]).log()
    new = torch.tensor([[[[0.25, 0.75], [0.9, 0.1]]]]).log() + 3.0  # a shift of all logits changes nothing
    columns = soft_drift(trace(old, 1), trace(new, 1))
    assert columns["kl"] == pytest.approx([math.log(4 / 3) / 2, 0], abs=1e-6)
    to_p = 0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)
    to_q = 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    assert columns["js"] == pytest.approx([(to_p + to_q) / 2, 0], abs=1e-6)
    assert columns["js"][0] == pytest.approx(0.0338221, abs=1e-6)


def test_router_shift_looks_at_the_old_experts_alone():
    """Token 0: old experts 0 and 1 move by log 2 each in one of two layers, exp(-log(2) / 2). Token 1 stays: 1."""
    old = torch.tensor([[[[0.4, 0.3, 0.2, 0.1]] * 2] * 2]).log()
    new = old.clone()
    new[0, 0, 1] = torch.tensor([0.2, 0.6, 0.19, 0.01]).log()  # experts 2 and 3 moved, too
    assert soft_drift(trace(old), trace(new))["router_shift"] == pytest.approx((2**-0.5 + 1) / 2)


def test_margins_of_flipped_and_kept_tokens_by_hand():
    """K = 1. Leads of .1, .4 and .3 under the old router; tokens 0 and 2 choose another expert afterwards."""
    old = trace(torch.tensor([[[[1.1, 1.0, 0.0]], [[1.4, 1.0, 0.0]], [[1.3, 1.0, 0.0]]]]), 1)
    new = trace(torch.tensor([[[[1.0, 1.1, 0.0]], [[9.0, 1.0, 0.0]], [[0.0, 1.0, 0.0]]]]), 1)
    columns = soft_drift(old, new)
    assert columns["margin"] == pytest.approx([0.8 / 3])
    assert columns["margin_flipped"] == pytest.approx([0.2])
    assert columns["margin_kept"] == pytest.approx([0.4])


def test_identical_routers_have_no_soft_drift_at_all():
    one = trace(random_logits(0))
    columns = soft_drift(one, one)
    assert columns["kl"] == columns["js"] == [0.0, 0.0, 0.0]
    assert columns["router_shift"] == 1.0
    assert columns["margin"] == columns["margin_kept"]
    assert all(math.isnan(value) for value in columns["margin_flipped"])


@pytest.mark.parametrize("size", [40.0, 2000.0])
def test_routers_that_share_no_probability_differ_by_log_2(size):
    """Half of the experts each, with odds of exp(size) to 1; exp(2000) is more than a float64 holds."""
    old = torch.tensor([[[[size, size, 0.0, 0.0]]]])
    columns = soft_drift(trace(old), trace(old.flip(-1)))
    assert columns["js"] == pytest.approx([math.log(2)])
    assert columns["kl"] == pytest.approx([size])
    assert columns["router_shift"] == pytest.approx(0, abs=1e-12)
    assert columns["margin_flipped"] == [size]
    assert math.isnan(columns["margin_kept"][0])


def test_unrelated_routers():
    """Of independent logits a and b of mean 0, KL is E[sum p a], and only 1 of C(E, K) tokens keeps its set."""
    a = random_logits(0, (100, 100, 1, 4))
    old, new = trace(a), trace(random_logits(1, (100, 100, 1, 4)))
    columns = soft_drift(old, new)
    assert columns["kl"] == pytest.approx([float((a.softmax(-1) * a).sum(-1).mean())], rel=0.05)
    assert columns["js"] == pytest.approx(soft_drift(new, old)["js"])
    margin, flipped, kept = (columns[name][0] for name in ("margin", "margin_flipped", "margin_kept"))
    assert (margin - flipped) / (kept - flipped) == pytest.approx(1 / 6, abs=0.02)  # the share of kept tokens
    assert flipped == pytest.approx(kept, rel=0.05)  # the old margin says nothing about an unrelated router


def test_near_ties_are_what_a_small_change_flips():
    """Logits that move by at most d flip no expert that leads by 2 d or more."""
    a = random_logits(0)
    moved = a + 0.02 * (2 * torch.rand(a.shape, generator=torch.Generator().manual_seed(9)) - 1)
    columns = soft_drift(trace(a), trace(moved))
    assert max(columns["margin_flipped"]) < 0.04
    assert min(columns["margin_kept"]) > 0.2


def test_only_tokens_that_both_traces_know_count():
    old, new = random_logits(0, (1, 3, 2, 4)), random_logits(1, (1, 3, 2, 4))
    part = soft_drift(trace(old[:, :1]), trace(new[:, :1]))
    old[:, 2], new[:, 1] = float("nan"), 1e4
    masked = soft_drift(trace(old, valid=[[True, True, False]]), trace(new, valid=[[True, False, True]]))
    assert masked.keys() == part.keys()
    for name, value in part.items():
        assert masked[name] == pytest.approx(value, nan_ok=True), name


def test_what_a_trace_does_not_carry_is_left_out():
    old = trace(random_logits(0))
    bare = RoutingTrace(old.expert_ids_BSLK, old.valid_BS, old.layer_names, old.num_experts)
    assert soft_drift(bare, old) == {}
    assert soft_drift(old, bare).keys() == {"margin", "margin_flipped", "margin_kept"}
    assert router_state(bare).keys() == {"max_violation", "dead_experts"}


def test_the_state_of_one_policy_by_hand():
    """K = 1 of E = 3: layer 0 sends 2 of 3 tokens to expert 0, layer 1 all of them to expert 2 with p = 1/2."""
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]).log().repeat(1, 3, 1, 1)
    logits[0, 1, 0] = torch.tensor([0.25, 0.5, 0.25]).log()
    state = router_state(trace(logits, 1))
    assert state["max_violation"] == [1.0, 2.0]  # 2 / (3 / 3) - 1, and the worst, E/K - 1
    assert state["dead_experts"] == [1, 2]
    assert state["router_entropy"] == pytest.approx([1.5 * math.log(2)] * 2)
