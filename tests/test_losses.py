"""Policy losses: the reference table, and the contract that every loss file must keep."""

import dataclasses
import math

import pytest
import torch

from moe_rl import discovery
from moe_rl.advantage import ADVANTAGES
from moe_rl.policy_losses.base import ClippedLoss, PolicyLoss, sequence_mean, token_log_ratio
from moe_rl.policy_losses.cispo import Cispo
from moe_rl.policy_losses.dapo import Dapo
from moe_rl.policy_losses.dr_grpo import DrGrpo
from moe_rl.policy_losses.gmpo import Gmpo
from moe_rl.policy_losses.grpo import Grpo
from moe_rl.policy_losses.gspo import Gspo
from moe_rl.policy_losses.gspo_token import GspoToken
from moe_rl.policy_losses.minirl import Minirl
from moe_rl.policy_losses.reinforce import Reinforce
from moe_rl.policy_losses.sapo import Sapo
from moe_rl.records import PolicyBatch
from moe_rl.update import clip_columns

LOSSES = discovery.variants("moe_rl.policy_losses", PolicyLoss)
NEW = [[-1.0, -2.0, -0.5, -9.0], [-0.7, -1.1, -3.0, -2.0]]
OLD = [[-1.1, -1.8, -0.7, 3.0], [-0.9, -1.0, -3.3, -1.6]]
MASK = [[1, 1, 1, 0], [1, 1, 1, 1]]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def evaluate(loss, new, old, mask, advantages, num_sequences=None, num_tokens=None):
    """(value, gradient to the new log probabilities, where it clipped) of a loss on a batch."""
    new = new.detach().clone().requires_grad_()
    batch = PolicyBatch.whole(new, old, mask, advantages)
    if num_sequences is not None:
        batch = dataclasses.replace(batch, num_sequences=num_sequences, num_tokens=num_tokens)
    output = loss(batch)
    output.loss.backward()
    return output.loss.item(), new.grad, output.clipped_BT


def bounded(loss, low, high):
    """The loss with these clip bounds, as far as it has any."""
    bounds = {"clip_low": low, "clip_high": high}
    return dataclasses.replace(loss, **{name: value for name, value in bounds.items() if hasattr(loss, name)})


def random_batch(seed=0, B=6, T=7, spread=0.3):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(B, T, dtype=torch.float64, generator=generator) * 3
    new = old + spread * torch.randn(B, T, dtype=torch.float64, generator=generator)
    mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=generator)
    return new, old, mask, torch.randn(B, dtype=torch.float64, generator=generator)


# ------------------------------------------------------------------------------------------------------ reference table
GSPO_WIDE = (-0.2669476, [-0.1723159, -0.1723159, -0.1723159, 0], [0.0625] * 4)
GSPO_PAPER = (-0.2502000, [0.0] * 4, [0.0625] * 4)
GRPO_ROW_1 = [0.0763377, 0.0565523, 0.0843662, 0]
TABLE = [
    (Gspo(clip_low=0.2, clip_high=0.2), GSPO_WIDE),
    (GspoToken(clip_low=0.2, clip_high=0.2), GSPO_WIDE),
    (Gspo(clip_low=3e-4, clip_high=4e-4), GSPO_PAPER),
    (GspoToken(clip_low=3e-4, clip_high=4e-4), GSPO_PAPER),
    (Grpo(clip_low=0.2, clip_high=0.2), (-0.2533941, [-0.1841952, -0.1364551, 0, 0], GRPO_ROW_1)),
    (Grpo(clip_low=0.2, clip_high=0.27), (-0.2569612, [-0.1841952, -0.1364551, -0.2035671, 0], GRPO_ROW_1)),
    (
        Dapo(),
        (-0.1438936, [-0.1578816, -0.1169615, -0.1744861, 0], [0.0872431, 0.0646312, 0.0964185, 0]),
    ),
    (
        Cispo(),
        (-0.0381323, [-0.1578816, -0.1169615, -0.1744861, 0], [0.0872431, 0.0646312, 0.0964185, 0.0478800]),
    ),
    (
        Sapo(),
        (-0.5388884, [-0.1836867, -0.1353403, -0.2010927, 0], [0.0753155, 0.0564114, 0.0815827, 0.0406646]),
    ),
    (Gmpo(), GSPO_WIDE),
    (
        Gmpo(clip_low=0.05, clip_high=0.05),
        (-0.2073153, [0, -0.1612027, 0, 0], [0.0690732, 0, 0.0690732, 0]),
    ),
    # By hand. Ratios w of row 0: 1.1051709 .8187308 1.2214028; of row 1: 1.2214028 .9048374 1.3498588 .6703200.
    # Row 0 gains 1.1051709 + .8187308 + 1.2 (clipped), row 1 -.5 (1.2214028 + .9048374 + 1.3498588 + .8 (clipped)):
    # .9858522 in all; over 2 sequences and length 4. Gradients: -w A / 8 where not clipped.
    (
        DrGrpo(length=4),
        (-0.1232315, [-0.1381464, -0.1023414, 0, 0], [0.0763377, 0.0565523, 0.0843662, 0]),
    ),
    # sum of w A log pi: -1.1051709 - 2 x .8187308 - .5 x 1.2214028 = -3.3533339 in row 0; in row 1, its last token
    # masked (.67 < .8), -.5 (-.7 x 1.2214028 - 1.1 x .9048374 - 3 x 1.3498588) = 2.9499397. Over 2 sequences.
    (
        Minirl(),
        (0.2016971, [-0.5525855, -0.4093654, -0.6107014, 0], [0.3053507, 0.2262094, 0.3374647, 0]),
    ),
    # -(1 (-1 - 2 - .5) - .5 (-.7 - 1.1 - 3 - 2)) / 2 = .05, whatever the old policy said.
    (Reinforce(), (0.05, [-0.5, -0.5, -0.5, 0], [0.25] * 4)),
]


@pytest.mark.parametrize(("loss", "expected"), TABLE, ids=[str(loss) for loss, _ in TABLE])
def test_the_reference_table_holds(loss, expected):
    value, grad, _ = evaluate(loss, double(NEW), double(OLD), torch.tensor(MASK).bool(), double([1, -0.5]))
    assert value == pytest.approx(expected[0], abs=1e-6)
    assert torch.allclose(grad, double([expected[1], expected[2]]), atol=1e-6, rtol=0), grad


def sequence_ratios():
    batch = PolicyBatch.whole(double(NEW), double(OLD), torch.tensor(MASK), double([1, -0.5]))
    return sequence_mean(token_log_ratio(batch), batch.mask_BT).exp().tolist()


def test_e1_gspo_is_not_weighted_by_length():
    for kind in (Gspo, GspoToken):
        loss = kind(clip_low=0.2, clip_high=0.2)
        value, _, _ = evaluate(loss, double(NEW), double(OLD), torch.tensor(MASK).bool(), double([1, -0.5]))
        assert abs(value - -0.1573836) > 0.1


def test_e5_the_sequence_ratio_is_normalised_by_length():
    assert sequence_ratios()[0] == pytest.approx(1.0338951, abs=1e-7)
    assert sequence_ratios()[0] != pytest.approx(1.1051709, abs=1e-3)


def test_e6_the_sequence_ratio_is_not_divided_by_the_padded_width():
    assert sequence_ratios()[0] != pytest.approx(1.0253151, abs=1e-3)
    assert sequence_ratios()[1] == pytest.approx(1.0, abs=1e-12)  # .2 - .1 + .3 - .4 = 0


def test_e2_default_bounds_suit_each_loss_and_clipping_is_counted_per_token_and_per_sequence():
    assert (Grpo().clip_low, Grpo().clip_high) == (0.2, 0.27)
    for kind in (Gspo, GspoToken):
        assert (kind().clip_low, kind().clip_high) == (3e-4, 4e-4)
    new, old, mask, advantages = random_batch(B=400, T=10, spread=0.02)
    shares = {}
    for name, loss in (("paper", Gspo()), ("grpo's", Gspo(clip_low=0.2, clip_high=0.2)), ("tokens", Grpo())):
        _, _, clipped = evaluate(loss, new, old, mask, advantages)
        shares[name] = clip_columns([clipped], len(mask), int(mask.sum()))
    assert shares["grpo's"] == {"clip_frac": 0, "clip_frac_sequences": 0}  # .2 never clips a sequence ratio
    assert 0.3 < shares["paper"]["clip_frac_sequences"] < 0.5  # 3e-4 clips nearly all that it can: half by sign
    assert shares["tokens"]["clip_frac"] == 0
    _, _, clipped = evaluate(
        Grpo(clip_low=0.2, clip_high=0.2), double(NEW), double(OLD), torch.tensor(MASK).bool(), double([1, -0.5])
    )
    assert clipped.tolist() == [[False, False, True, False], [False, False, False, True]]
    assert clip_columns([clipped], 2, 7) == {"clip_frac": 2 / 7, "clip_frac_sequences": 1.0}


def test_one_token_in_one_sequence_has_the_same_ratio_under_every_loss():
    new, old, mask = double([[-1.0]]), double([[-1.05]]), torch.ones(1, 1, dtype=torch.bool)
    with_ratio = {type(loss) for loss, _ in TABLE if loss.ratio != "none"} - {Sapo}  # Sapo has a gate on it
    for kind in with_ratio:
        value, grad, _ = evaluate(bounded(kind(), 0.2, 0.2), new, old, mask, double([2.0]))
        assert grad.item() == pytest.approx(-2 * math.exp(0.05))
        if not kind.surrogate:
            assert value == pytest.approx(-2 * math.exp(0.05))


@pytest.mark.parametrize("kind", [Gspo, GspoToken])
def test_e7_a_long_sequence_does_not_collapse(kind):
    T, mean = 9000, -3.13e-4
    noise = torch.randn(1, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_ratio = mean + 0.05 * (noise - noise.mean())
    new, old, mask = log_ratio, torch.zeros(1, T, dtype=torch.float64), torch.ones(1, T, dtype=torch.bool)
    value, _, clipped = evaluate(kind(clip_low=0.2, clip_high=0.2), new, old, mask, double([1.0]))
    assert math.exp(T * mean) == pytest.approx(0.0598, abs=1e-4)  # what a weight of the sum would be
    assert -value == pytest.approx(0.9997, abs=5e-5)
    assert not clipped.any()


# ------------------------------------------------------------------------------------------------------------- contract
def policy_gradient(loss, mask, advantages):
    """Gradient of -A log pi under the loss's own reduction."""
    sequences = mask.any(1).sum()
    count = {
        "sequence_mean": mask.sum(1, keepdim=True).clamp(min=1) * sequences,
        "token_mean": mask.sum(),
        "token_sum": sequences * getattr(loss, "length", 1),
    }[loss.reduction]
    return -(advantages[:, None] * mask) / count


def test_each_token_may_have_an_advantage_of_its_own_where_the_loss_says_so(loss):
    """At ratio 1 the gradient is -A_it; one token without advantage changes no other token's."""
    new, _, mask, _ = random_batch()
    advantages = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    advantages[:, 0] = 0
    if not loss.token_advantages:
        with pytest.raises(ValueError, match="one advantage a sequence and a critic gives one a token"):
            evaluate(loss, new, new, mask, advantages)
        return
    _, grad, _ = evaluate(loss, new, new, mask, advantages)
    unit = policy_gradient(loss, mask, -torch.ones(len(mask), dtype=torch.float64))
    assert torch.allclose(grad, -advantages * unit, atol=1e-12, rtol=0)
    old = new + 0.05 * torch.randn(new.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    _, grad, _ = evaluate(bounded(loss, 0.9, 9.0), new, old, mask, advantages)
    advantages[:, 0] = 1.0
    _, other, _ = evaluate(bounded(loss, 0.9, 9.0), new, old, mask, advantages)
    assert torch.allclose(grad[:, 1:], other[:, 1:], atol=1e-14, rtol=0)


@pytest.fixture(params=LOSSES, ids=str)
def loss(request):
    return LOSSES[request.param]()


def test_every_file_is_found():
    tested = {type(loss) for loss, _ in TABLE}
    assert tested <= set(LOSSES.values())
    assert {"grpo", "gspo", "gspo_token", "dr_grpo", "dapo", "cispo", "sapo", "gmpo", "minirl"} <= LOSSES.keys()


def test_e9_at_ratio_1_the_gradient_is_that_of_reinforce_under_the_stated_reduction(loss):
    new, _, mask, advantages = random_batch()
    _, grad, clipped = evaluate(loss, new, new, mask, advantages)
    assert torch.allclose(grad, policy_gradient(loss, mask, advantages), atol=1e-12, rtol=0)
    assert (grad[mask] != 0).all()
    assert not clipped.any()


def test_at_ratio_1_a_loss_is_minus_the_advantage_unless_it_states_to_be_a_surrogate(loss):
    new, _, mask, advantages = random_batch()
    value, _, _ = evaluate(loss, new, new, mask, advantages)
    gain = policy_gradient(loss, mask, advantages).sum().item()
    assert (value == pytest.approx(gain, abs=1e-12)) == (not loss.surrogate)


def test_the_stated_ratio_is_the_one_that_weighs_a_token(loss):
    loss = bounded(loss, 1.0, 5.0)
    new, old, mask, advantages = random_batch(B=1, T=3)
    mask[:] = True
    _, grad, _ = evaluate(loss, new, old, mask, advantages)
    moved = {}
    for place, token in (("own", 0), ("other", 1)):
        shifted = old.clone()
        shifted[0, token] -= 0.1
        moved[place] = evaluate(loss, new, shifted, mask, advantages)[1][0, 0] != grad[0, 0]
    assert moved == {"own": loss.ratio != "none", "other": loss.ratio == "sequence"}


def test_the_stated_advantage_exists(loss):
    assert loss.advantage in ADVANTAGES


def test_e10_zero_mean_advantages_give_loss_0_at_ratio_1(loss):
    new, _, _, advantages = random_batch()
    mask = torch.ones_like(new, dtype=torch.bool)
    value, grad, _ = evaluate(loss, new, new, mask, advantages - advantages.mean())
    assert loss.surrogate or value == pytest.approx(0, abs=1e-12)
    assert grad.sum() == pytest.approx(0, abs=1e-12)
    assert grad.abs().sum() > 0.1


def test_e13_a_fully_masked_sequence_counts_nowhere(loss):
    new, old, mask, advantages = random_batch(B=3)
    mask[1] = False
    kept = torch.tensor([0, 2])
    value, grad, clipped = evaluate(loss, new, old, mask, advantages)
    alone, alone_grad, _ = evaluate(loss, new[kept], old[kept], mask[kept], advantages[kept])  # a mean over 2
    assert value == pytest.approx(alone, abs=1e-14)
    assert torch.allclose(grad[kept], alone_grad, atol=1e-14)
    assert not grad[1].any()
    assert not clipped[1].any()


def test_e11_a_sequence_without_advantage_gives_no_gradient_and_no_nan(loss):
    new, old, mask, advantages = random_batch()
    advantages[2] = 0
    value, grad, clipped = evaluate(loss, new, old, mask, advantages)
    for log_ratio in (2000.0, -2000.0):  # exp overflows, and underflows
        wild = new.clone()
        wild[2] = old[2] + log_ratio
        again, wild_grad, wild_clipped = evaluate(loss, wild, old, mask, advantages)
        assert not wild_grad[2].any()
        assert again == value
        assert torch.equal(wild_grad, grad)
        assert torch.equal(wild_clipped, clipped)
        assert not wild_clipped[2].any()


def test_an_overflowing_ratio_gives_no_nan_where_it_is_held(loss):
    new, old, mask, advantages = random_batch()
    advantages[2] = 1.0
    new[2] = old[2] + 2000.0
    value, grad, clipped = evaluate(loss, new, old, mask, advantages)
    assert math.isfinite(value)
    assert grad.isfinite().all()
    assert torch.equal(clipped[2], mask[2] & (grad[2] == 0))
    if hasattr(loss, "clip_low") or isinstance(loss, Sapo):
        assert torch.equal(clipped[2], mask[2])


@pytest.mark.parametrize("garbage", [123.0, -math.inf, math.inf, math.nan])
def test_padding_never_matters(loss, garbage):
    new, old, mask, advantages = random_batch()
    mask[4] = False
    value, grad, clipped = evaluate(loss, new, old, mask, advantages)
    for filled in ((new.masked_fill(~mask, garbage), old), (new, old.masked_fill(~mask, garbage))):
        again, again_grad, again_clipped = evaluate(loss, *filled, mask, advantages)
        assert again == value
        assert torch.equal(again_grad, grad)
        assert torch.equal(again_clipped, clipped)
    assert not grad[~mask].any()


def test_micro_batches_add_up_to_the_mini_batch(loss):
    new, old, mask, advantages = random_batch(B=7)
    value, grad, clipped = evaluate(loss, new, old, mask, advantages)
    totals = int(mask.any(1).sum()), int(mask.sum())
    parts = [
        evaluate(loss, new[rows], old[rows], mask[rows], advantages[rows], *totals)
        for rows in (slice(0, 1), slice(1, 4), slice(4, 7))
    ]
    assert sum(part[0] for part in parts) == pytest.approx(value, abs=1e-14)
    assert torch.allclose(torch.cat([part[1] for part in parts]), grad, atol=1e-15)
    assert torch.equal(torch.cat([part[2] for part in parts]), clipped)


@pytest.mark.parametrize("bounds", [None, (0.2, 0.2), (0.05, 0.01), (1.0, 0.0)])
def test_clipped_is_true_exactly_where_a_token_with_advantage_has_no_gradient(loss, bounds):
    if bounds is not None:
        loss = bounded(loss, *bounds)
    seen = 0
    for seed in range(5):
        new, old, mask, advantages = random_batch(seed, B=30)
        advantages[::5] = 0
        _, grad, clipped = evaluate(loss, new, old, mask, advantages)
        assert clipped.dtype == torch.bool
        assert torch.equal(clipped, (grad == 0) & mask & (advantages != 0)[:, None])
        seen += int(clipped.sum())
    assert seen > 0 or not hasattr(loss, "clip_low"), "a test in which nothing is clipped shows nothing"


@pytest.mark.parametrize("kind", [Grpo, Gspo, DrGrpo, Dapo, Gmpo, Sapo])
def test_the_gradient_is_that_of_the_value(kind):
    loss = bounded(kind(), 0.1, 0.1)
    new, old, mask, advantages = random_batch(B=3, T=3)
    _, grad, _ = evaluate(loss, new, old, mask, advantages)
    for place in mask.nonzero().tolist():
        step = torch.zeros_like(new)
        step[tuple(place)] = 1e-6
        up, down = (evaluate(loss, new + sign * step, old, mask, advantages)[0] for sign in (1, -1))
        assert (up - down) / 2e-6 == pytest.approx(grad[tuple(place)].item(), abs=1e-8)


def test_no_gradient_reaches_the_old_policy(loss):
    new, old, mask, advantages = random_batch()
    output = loss(PolicyBatch.whole(new.requires_grad_(), old, mask, advantages))
    assert output.loss.dim() == 0
    assert not output.clipped_BT.requires_grad


@pytest.mark.parametrize("bounds", [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (math.nan, 0.2), (0.2, math.nan)])
def test_impossible_clip_bounds_are_refused(bounds):
    for kind in LOSSES.values():
        if issubclass(kind, ClippedLoss) or (kind is Gmpo and bounds[0] != 1.1):
            with pytest.raises(ValueError, match=r"clip bounds low .* are impossible"):
                kind(clip_low=bounds[0], clip_high=bounds[1])


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_settings_are_refused(value):
    for kind, name in ((Cispo, "clip_high"), (DrGrpo, "length"), (Sapo, "tau_positive"), (Sapo, "tau_negative")):
        with pytest.raises(ValueError, match=name):
            kind(**{name: value})


# ----------------------------------------------------------------------------------------------------------------- laws
def test_law_1_gradients_of_grpo_and_gspo_are_equal_at_ratio_1():
    new, _, mask, advantages = random_batch()
    one, other = (evaluate(kind(), new, new, mask, advantages) for kind in (Grpo, Gspo))
    assert one[0] == pytest.approx(other[0], abs=1e-15)
    assert torch.allclose(one[1], other[1], atol=1e-16, rtol=1e-14)


@pytest.mark.parametrize("bounds", [(3e-4, 4e-4), (0.1, 0.15), (1.0, 5.0)])
@pytest.mark.parametrize("seed", range(4))
def test_gspo_token_equals_gspo_in_value_gradient_and_clipping(seed, bounds):
    batch = random_batch(seed, B=12)
    one, other = (evaluate(kind(clip_low=bounds[0], clip_high=bounds[1]), *batch) for kind in (Gspo, GspoToken))
    assert one[0] == pytest.approx(other[0], abs=1e-14)
    assert torch.allclose(one[1], other[1], atol=1e-15)
    assert torch.equal(one[2], other[2])


def test_grpo_and_gspo_differ_away_from_ratio_1():
    batch = random_batch()
    assert evaluate(Grpo(), *batch)[0] != pytest.approx(evaluate(Gspo(), *batch)[0], abs=1e-3)


def test_dapo_is_grpo_where_all_sequences_are_equally_long():
    new, old, mask, advantages = random_batch()
    one, other = (evaluate(bounded(kind(), 0.2, 0.28), new, old, mask, advantages) for kind in (Dapo, Grpo))
    assert one[0] != pytest.approx(other[0], abs=1e-3)
    mask[:] = True
    one, other = (evaluate(bounded(kind(), 0.2, 0.28), new, old, mask, advantages) for kind in (Dapo, Grpo))
    assert one[0] == pytest.approx(other[0], abs=1e-14)
    assert torch.allclose(one[1], other[1], atol=1e-15)


def test_dr_grpo_is_grpo_where_every_sequence_has_its_length():
    new, old, mask, advantages = random_batch()
    mask[:] = True
    one, other = (evaluate(loss, new, old, mask, advantages) for loss in (DrGrpo(length=7), bounded(Grpo(), 0.2, 0.2)))
    assert one[0] == pytest.approx(other[0], abs=1e-14)
    assert torch.allclose(one[1], other[1], atol=1e-15)


def test_minirl_has_the_gradient_of_dr_grpo_of_length_1_and_clips_the_same_tokens():
    batch = random_batch(B=20)
    one, other = (evaluate(bounded(kind(), 0.2, 0.27), *batch) for kind in (Minirl, DrGrpo))
    assert torch.allclose(one[1], other[1], atol=1e-15)
    assert torch.equal(one[2], other[2])
    assert one[2].any()


def test_cispo_weighs_a_token_by_its_ratio_up_to_the_bound_and_never_drops_one():
    new, old, mask, advantages = random_batch(B=20, spread=2.0)
    _, grad, clipped = evaluate(Cispo(clip_high=1.0), new, old, mask, advantages)
    weight = (new - old).exp()
    assert (weight > 2)[mask].any()
    assert torch.allclose(grad, policy_gradient(Cispo(), mask, advantages) * weight.clamp(max=2), atol=1e-15)
    assert not clipped.any()


@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.0), (-1.0, 1.05)])
def test_sapo_fades_symmetrically_around_ratio_1_and_is_steeper_for_negative_advantages(advantage, tau):
    mask, old = torch.ones(1, 1, dtype=torch.bool), double([[0.0]])
    for ratio in (0.5, 1.0, 1.5, 4.0):
        _, grad, _ = evaluate(Sapo(), double([[math.log(ratio)]]), old, mask, double([advantage]))
        expected = -advantage * ratio / math.cosh(tau * (ratio - 1) / 2) ** 2  # 4 sigmoid' = 1 / cosh^2
        assert grad.item() == pytest.approx(expected, rel=1e-12)


def test_gmpo_is_gspo_where_nothing_is_clipped():
    batch = random_batch(B=12)
    one, other = (evaluate(bounded(kind(), *bounds), *batch) for kind, bounds in ((Gmpo, (9, 9)), (Gspo, (1, 9))))
    assert one[0] == pytest.approx(other[0], abs=1e-14)
    assert torch.allclose(one[1], other[1], atol=1e-15)


def test_gmpo_keeps_the_rest_of_a_sequence_whose_outlier_it_clips_and_gspo_drops_it():
    new, old, mask = double([[2.0, 0.1, 0.0]]), double([[0.0, 0.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool)
    _, _, clipped = evaluate(Gmpo(), new, old, mask, double([1.0]))
    assert clipped.tolist() == [[True, False, False]]
    _, _, clipped = evaluate(Gspo(), new, old, mask, double([1.0]))
    assert clipped.all()


def test_a_loss_with_the_advantage_of_its_source_has_its_own_name_and_with_another_says_so():
    assert [kind.name(kind.advantage) for kind in LOSSES.values()] == list(LOSSES)
    assert Grpo.name("group_mean") == "grpo_group_mean"
    assert DrGrpo.name("group_std") == "dr_grpo_group_std"
    assert Reinforce.name("leave_one_out") == "rloo"
    names = [kind.name(advantage) for kind in LOSSES.values() for advantage in ADVANTAGES]
    assert len(set(names)) == len(names)
