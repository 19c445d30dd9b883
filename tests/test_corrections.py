"""Corrections for what the sampler did differently: weights by hand, and the gradient they give to any loss."""

import math

import pytest
import torch

from moe_rl.corrections import Correction, router_shift, tails, weigh_gradient
from moe_rl.mini_batches import split_rows
from moe_rl.policy_losses.cispo import Cispo
from moe_rl.policy_losses.grpo import Grpo
from moe_rl.policy_losses.gspo import Gspo
from moe_rl.policy_losses.reinforce import Reinforce
from moe_rl.records import PolicyBatch
from moe_rl.router_pressure import RouterPressure

# c = old / sampler of two sequences, the second with one token of padding (whose numbers must not matter).
C = torch.tensor([[1.0, 3.0, 0.4], [6.0, 0.5, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.1, -3.0]], dtype=torch.float64)
ROLLOUT = OLD - C.log()
NEW = torch.tensor([[-1.1, -1.9, -0.6], [-0.6, -1.3, -3.0]], dtype=torch.float64)
A = torch.tensor([1.0, -0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction(), [[1, 1, 1], [1, 1, 1]]),
        (Correction(kind="tis"), [[1, 2, 0.4], [2, 0.5, 1]]),
        (Correction(kind="tis", cap=5.0), [[1, 3, 0.4], [5, 0.5, 1]]),
        (Correction(kind="icepop"), [[1, 3, 0], [0, 0.5, 1]]),
        # geometric means: (1 * 3 * 0.4) ** (1/3) = 1.0627, (6 * 0.5) ** (1/2) = 1.7321
        (Correction(kind="sequence_mask", high=1.7), [[1, 1, 1], [0, 0, 1]]),
        (Correction(kind="sequence_mask", high=1.74), [[1, 1, 1], [1, 1, 1]]),
        (Correction(kind="sequence_mask", low=1.07, high=9.0), [[0, 0, 0], [1, 1, 1]]),
    ],
    ids=repr,
)
def test_weights_by_hand(correction, expected):
    got = correction.weights(OLD, ROLLOUT, MASK)
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert not got.requires_grad


def gradient(loss, logprobs, weigh=lambda x: x):
    leaf = logprobs.clone().requires_grad_()
    output = loss(PolicyBatch.whole(weigh(leaf), OLD, MASK, A))
    output.loss.backward()
    return output, leaf.grad


@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence_mask"])
@pytest.mark.parametrize(
    "loss", [Grpo(), Gspo(clip_low=0.5, clip_high=0.5), Cispo(), Reinforce()], ids=lambda x: type(x).__name__
)
def test_a_corrected_loss_keeps_its_value_and_has_the_explicitly_weighted_gradient(loss, kind):
    correction = Correction(kind=kind, high=1.7)
    plain, gradient_BT = gradient(loss, NEW)
    corrected, got_BT = gradient(loss, NEW, lambda leaf: correction.apply(leaf, OLD, ROLLOUT, MASK))
    weights_BT = correction.weights(OLD, ROLLOUT, MASK)
    assert not torch.equal(weights_BT, torch.ones_like(weights_BT))
    assert torch.equal(corrected.loss, plain.loss)
    assert torch.equal(corrected.clipped_BT, plain.clipped_BT)
    assert gradient_BT.abs().sum() > 0
    assert torch.allclose(got_BT, weights_BT * gradient_BT, atol=1e-12)


def test_for_grpo_that_is_the_weighted_objective_itself():
    """sum_t c min(w A, clip(w) A), the form in which TIS and IcePop are published."""
    correction = Correction(kind="tis")
    _, got_BT = gradient(Grpo(), NEW, lambda leaf: correction.apply(leaf, OLD, ROLLOUT, MASK))
    leaf = NEW.clone().requires_grad_()
    ratio_BT, c_BT = (leaf - OLD).exp(), C.clamp(max=2.0)
    gain_BT = torch.minimum(ratio_BT * A[:, None], ratio_BT.clamp(0.8, 1.27) * A[:, None])
    (-((c_BT * gain_BT * MASK).sum(1) / MASK.sum(1)).mean()).backward()
    assert torch.allclose(got_BT, leaf.grad, atol=1e-12)


def test_values_stay_bit_for_bit():
    values = torch.randn(1000) * 7
    assert torch.equal(weigh_gradient(values, torch.rand(1000) * 9), values)


def test_router_shift_by_hand_is_of_the_old_experts_and_its_floor_is_low():
    """Two layers, one sequence of two tokens, three experts, of which the old policy used one a layer."""
    old = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    new = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log()
    old_BSLE = torch.stack([old, old])[None]  # both tokens: layer 0 old[0], layer 1 old[1]
    new_layers = [torch.stack([new[0] + 5, new[0]]), torch.stack([new[1] - 3, new[1]])]
    ids_BSLK = torch.tensor([[[[0], [2]], [[2], [0]]]], dtype=torch.uint8)
    # token 0: |log .25/.5| and 0, mean log(2) / 2; token 1: expert 2 of layer 0 and expert 0 of layer 1 stayed
    got = router_shift(old_BSLE, new_layers, ids_BSLK)
    assert got.tolist()[0] == pytest.approx([2**-0.5, 1.0], abs=1e-6)
    mask = torch.tensor([[True, True, False]])
    weights = Correction(kind="rspo", low=0.8).weights(mask, mask, mask, torch.tensor([[2**-0.5, 0.9, 0.1]]))
    assert weights.tolist()[0] == pytest.approx([0.8, 0.9, 1.0])
    with pytest.raises(ValueError, match="needs the routers' shift"):
        Correction(kind="rspo").weights(mask, mask, mask)


@pytest.mark.parametrize("replayed", ["none", "old_policy"])
def test_rspo_leaves_the_first_update_alone_and_the_value_of_the_second(replayed, monkeypatch):
    from models import tiny
    from test_update import advantages, grpo, rollouts, seen_by_old

    from moe_rl import update
    from moe_rl.optim import Optim

    given = []
    shift = update.predicting_shift
    monkeypatch.setattr(update, "predicting_shift", lambda *a: given.append(shift(*a)) or given[-1])
    rows = {}
    for correction in (Correction(), Correction(kind="rspo", low=0.0)):
        model, data = tiny(), rollouts()
        parts = split_rows(8, 2, 0)
        batches = seen_by_old(
            model, data, advantages(), parts, grpo(replayed), micro_batch=2, pressure=RouterPressure(router_kl=1.0)
        )
        optimizer, schedule = Optim(lr=1e-2).build(model, 2)
        rows[correction.kind] = [
            update.take_update(model, optimizer, schedule, batch, grpo(replayed, correction=correction))
            for batch in batches
        ]
    plain, weighed = rows["none"], rows["rspo"]
    assert weighed[0] == plain[0]
    assert all(torch.equal(x, torch.ones_like(x)) for x in given[:2]), "two micro-batches an update"
    assert all((x < 1).all() for x in given[2:])
    assert (weighed[1]["loss"], weighed[1]["log_w_sd"]) == (plain[1]["loss"], plain[1]["log_w_sd"])
    assert weighed[1]["grad_norm"] < plain[1]["grad_norm"]
    bare = seen_by_old(model, data, advantages(), parts, grpo("old_policy"))[0]
    with pytest.raises(ValueError, match="give old_pass the same arm"):
        update.take_update(model, optimizer, schedule, bare, grpo("old_policy", correction=correction))


def test_no_correction_is_the_very_tensor():
    assert Correction().apply(NEW, OLD, ROLLOUT, MASK) is NEW


def test_tails_by_hand():
    r = [1.0, 3.0, 0.4, 6.0, 0.15]  # beyond 2: 3, 0.4 (1/0.4 = 2.5), 6, 0.15; beyond 5: 6, 0.15 (1/0.15 = 6.7)
    got = tails(torch.tensor(r, dtype=torch.float64).log())
    assert (got["f2"], got["f5"]) == (0.8, 0.4)
    assert got["ess"] == pytest.approx(10.55**2 / (5 * (1 + 9 + 0.16 + 36 + 0.0225)))
    assert got["k3"] == pytest.approx(sum(x - 1 - math.log(x) for x in r) / 5)


def test_tails_at_the_limits():
    assert tails(torch.zeros(7)) == {"k3": 0.0, "f2": 0.0, "f5": 0.0, "ess": 1.0}
    assert tails(torch.tensor([0.0, 800.0]))["ess"] == pytest.approx(0.5), "one weight that overflows counts alone"
    assert all(math.isnan(value) for value in tails(torch.zeros(0)).values())


@pytest.mark.parametrize(
    "wrong", [{"kind": "x"}, {"cap": 0.0}, {"cap": math.inf}, {"low": 6.0}, {"low": -1.0}, {"high": math.inf}], ids=repr
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError, match=r"arm\.correction"):
        Correction(**wrong)
