"""Router variants: the contract that every file must keep on every family, and what each variant means."""

import copy
import sys
import types

import pytest
import torch
from models import FAMILIES, random_trace_like, sets_differ, tiny, tokens
from test_record import forward

from moe_rl import discovery, record, replay
from moe_rl.models.families import find_routers
from moe_rl.routers.balanced import Balanced
from moe_rl.routers.base import Router, changes_routing, counted, install
from moe_rl.routers.binned import Binned
from moe_rl.routers.expert_dropout import ExpertDropout
from moe_rl.routers.learned_prior import LearnedPrior
from moe_rl.routers.native import Native
from moe_rl.routers.noisy import Noisy
from moe_rl.routers.predictive import Predictive
from moe_rl.routers.sigmoid_bias import SigmoidBias
from moe_rl.routers.tempered import Tempered
from moe_rl.routing_trace import RoutingError

ROUTERS = discovery.variants("moe_rl.routers", Router)


def run(model, ids, mask):
    """(routing, logits) of one forward without gradient."""
    with torch.no_grad(), record(model) as recorder:
        logits = forward(model, ids, mask).logits
    return recorder.trace, logits


def gates_of(model, ids, mask):
    """What each router returns: [(logits, gates, ids)]."""
    seen = []
    hooks = [site.module.register_forward_hook(lambda m, a, out: seen.append(out)) for site in find_routers(model)]
    with torch.no_grad():
        forward(model, ids, mask)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture(params=ROUTERS, ids=str)
def variant(request):
    return ROUTERS[request.param]()


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def test_every_file_is_found():
    assert {"native", "binned", "tempered", "balanced", "learned_prior", "predictive"} <= ROUTERS.keys()


# ------------------------------------------------------------------------------------------------------------- contract
def test_chosen_experts_exist_and_are_distinct_and_every_router_parameter_learns(variant, family):
    model, (ids, mask) = tiny(family), tokens()
    install(model, variant)
    with record(model) as recorder:
        forward(model, ids, mask).logits.logsumexp(-1).sum().backward()
    recorder.trace.check()
    chosen = recorder.trace.expert_ids_BSLK[mask.bool()].long()
    assert chosen.unique().numel() > 4, "a test in which all tokens use the same experts shows nothing"
    for site in find_routers(model):
        for name, parameter in site.module.named_parameters():
            assert parameter.grad is not None, f"{site.name}.{name}"
            assert parameter.grad.abs().sum() > 1e-6, f"{site.name}.{name}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_of_own_routing_is_the_identity_bit_for_bit(variant, family, dtype):
    model, (ids, mask) = tiny(family, dtype=dtype), tokens()
    install(model, variant)
    trace, logits = run(model, ids, mask)
    with torch.no_grad(), replay(model, trace):
        assert torch.equal(forward(model, ids, mask).logits, logits)


def test_foreign_experts_are_executed_and_the_router_still_learns(variant, family):
    model, (ids, mask) = tiny(family), tokens()
    install(model, variant)
    trace, _ = run(model, ids, mask)
    foreign = random_trace_like(trace)
    received = []
    experts = [m.experts for m in model.modules() if isinstance(getattr(m, "experts", None), torch.nn.Module)]
    for module in experts:
        module.register_forward_pre_hook(lambda m, args: received.append(args[1].clone()))
    with replay(model, foreign):
        forward(model, ids, mask).logits.logsumexp(-1).sum().backward()
    assert len(received) == 3
    for layer, seen in enumerate(received):
        wanted = foreign.expert_ids_BSLK[:, :, layer][mask.bool()].long()
        assert torch.equal(seen.view(*ids.shape, -1)[mask.bool()], wanted)
    assert all(site.module.weight.grad.norm() > 1e-4 for site in find_routers(model))


def test_uninstalling_restores_the_model(variant, family):
    model, (ids, mask) = tiny(family), tokens()
    names = set(model.state_dict())
    _, before = run(model, ids, mask)
    remove = install(model, variant)
    run(model, ids, mask)
    remove()
    assert torch.equal(run(model, ids, mask)[1], before)
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert set(model.state_dict()) == names


def test_a_copy_of_the_model_and_the_model_do_not_disturb_each_other(variant, family):
    model, (ids, mask) = tiny(family), tokens()
    native = run(model, ids, mask)[1]
    install(model, variant)
    trace, logits = run(model, ids, mask)
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin, ids, mask)[1], native)  # a variant is installed on one model, not on its copies
    assert torch.equal(run(model, ids, mask)[1], logits)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    again, logits_again = run(model, ids, mask)
    assert torch.equal(again.expert_ids_BSLK, trace.expert_ids_BSLK)
    assert torch.equal(logits_again, logits)


def test_the_state_of_a_variant_travels_in_the_state_dict(variant, family):
    model, (ids, mask) = tiny(family), tokens()
    install(model, variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        forward(model, ids, mask).logits.logsumexp(-1).mean().backward()
        optimizer.step()
        for site in find_routers(model):
            scores = torch.rand(2, 50, site.num_experts, generator=torch.Generator().manual_seed(0))
            variant.learn(*scores.softmax(-1), site.module)
            variant.after_update(site.module)
    trace, logits = run(model, ids, mask)
    other = tiny(family, seed=1)
    install(other, variant)
    other.load_state_dict(model.state_dict())
    again, logits_again = run(other, ids, mask)
    assert torch.equal(again.expert_ids_BSLK, trace.expert_ids_BSLK)
    assert torch.equal(logits_again, logits)


def test_a_token_is_routed_the_same_in_any_batch(variant, family):
    model, (ids, mask) = tiny(family, experts=4, initializer_range=0.3), tokens(8, 9, padded=False)
    install(model, variant)
    for number, site in enumerate(find_routers(model)):
        for name, tensor in [*site.module.named_parameters(), *site.module.named_buffers()]:
            if name != "weight":  # offsets that matter
                generator = torch.Generator().manual_seed(number)
                tensor.data = torch.rand(tensor.shape, generator=generator) * 2
    whole = run(model, ids, mask)[0].expert_ids_BSLK.sort(-1).values
    for row in range(5):
        for width in (1, 9):
            alone, _ = run(model, ids[row : row + 1, :width], mask[row : row + 1, :width])
            assert torch.equal(alone.expert_ids_BSLK.sort(-1).values, whole[row : row + 1, :width])


def test_a_choice_does_not_depend_on_the_tokens_beside_it(variant):
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(4, 8)
    variant.attach(module, 8, 2)
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = torch.rand(tensor.shape, generator=generator) * 4
    probabilities, logits = torch.rand(20, 8, generator=generator), 3 * torch.randn(20, 8, generator=generator)
    scores = torch.cat([probabilities, logits])
    together = variant.select(scores, 2, module)
    assert all(
        torch.equal(variant.select(row[None], 2, module)[0], ids) for row, ids in zip(scores, together, strict=True)
    )


def test_a_dense_model_takes_only_a_variant_that_changes_nothing(variant):
    model, (ids, mask) = tiny("dense"), tokens()
    before = forward(model, ids, mask).logits
    if changes_routing(variant):
        with pytest.raises(RoutingError, match="no MoE layers"):
            install(model, variant)
    else:
        install(model, variant)
    assert torch.equal(forward(model, ids, mask).logits, before)


def test_recomputation_under_activation_checkpointing_gives_the_same_gradients(variant):
    model, (ids, mask) = tiny(), tokens()
    install(model, variant)
    expected = {}
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.train()
        model.zero_grad()
        forward(model, ids, mask, use_cache=False).logits.logsumexp(-1).sum().backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(expected.setdefault(name, parameter.grad), parameter.grad), name


# ------------------------------------------------------------------------------------------------------- what they mean
def test_native_is_the_model_itself(family):
    model, (ids, mask) = tiny(family), tokens()
    trace, logits = run(model, ids, mask)
    install(model, Native())
    again, logits_again = run(model, ids, mask)
    assert torch.equal(logits_again, logits)
    assert torch.equal(again.expert_ids_BSLK, trace.expert_ids_BSLK)
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_binned_does_not_see_noise_within_a_bin_and_gives_ties_to_the_lower_id():
    router, scores = Binned(width=0.1), torch.tensor([[0.31, 0.39, 0.05, 0.25], [0.12, 0.18, 0.11, 0.19]])
    assert router.select(scores, 2, torch.nn.Identity()).tolist() == [[0, 1], [0, 1]]
    noisy = scores + torch.tensor([[0.08, -0.08, 0.04, 0.04], [0.07, -0.07, 0.08, -0.08]])
    assert not torch.equal(noisy.topk(2).indices.sort(-1).values, scores.topk(2).indices.sort(-1).values)
    assert router.select(noisy, 2, torch.nn.Identity()).tolist() == [[0, 1], [0, 1]]
    crossing = scores + torch.tensor([[0.0, 0.0, 0.0, 0.2], [0.0, 0.03, 0.0, 0.0]])
    assert router.select(crossing, 2, torch.nn.Identity()).tolist() == [[3, 0], [1, 0]]


def test_binned_in_narrow_bins_is_native_and_in_wide_ones_drifts_less():
    native, (ids, mask) = tiny(experts=16, top_k=2), tokens(8, 20, padded=False)
    changed = {}
    for width in (1e-6, 0.05):
        model = copy.deepcopy(native)
        install(model, Binned(width=width))
        before, _ = run(model, ids, mask)
        if width == 1e-6:
            assert not sets_differ(before, run(native, ids, mask)[0]).any()
        with torch.no_grad():
            for site in find_routers(model)[:1]:
                noise = torch.randn(site.module.weight.shape, generator=torch.Generator().manual_seed(0))
                site.module.weight.add_(1e-2 * noise)
        changed[width] = sets_differ(run(model, ids, mask)[0], before)[..., 0].float().mean().item()
    assert 0 < changed[0.05] < changed[1e-6]


def test_tempered_gates_by_hand(family):
    model, (ids, mask) = tiny(family), tokens()
    install(model, Tempered(temperature=3.0))
    logits, gates, chosen = gates_of(model, ids, mask)[0]
    expected = (logits.float().gather(-1, chosen) / 3.0).softmax(-1)
    assert torch.allclose(gates.float(), expected, atol=1e-6)
    native = tiny(family)
    native_logits, _, native_chosen = gates_of(native, ids, mask)[0]
    assert torch.equal(chosen, native_chosen)
    assert torch.equal(logits, native_logits)
    hot = Tempered(temperature=1e6).gate(logits, chosen, torch.nn.Identity())
    assert torch.allclose(hot, torch.full_like(hot, 0.5), atol=1e-3)


def test_tempered_at_1_is_a_family_that_normalises_softmax_gates():
    model, (ids, mask) = tiny("qwen3_moe"), tokens()
    before = run(model, ids, mask)[1]
    install(model, Tempered(temperature=1.0))
    assert torch.allclose(run(model, ids, mask)[1], before, atol=1e-4)


def test_balanced_bias_by_hand():
    module = torch.nn.Linear(2, 4)
    router = Balanced(speed=0.1)
    router.attach(module, 4, 2)
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.0], [0.9, 0.1, 0.8, 0.0], [0.9, 0.8, 0.1, 0.0]])
    chosen = router.select(scores, 2, module)
    assert chosen.tolist() == [[0, 1], [0, 2], [0, 1]]
    router.count(chosen, module)
    assert module.balance_load.tolist() == [3, 2, 1, 0]
    router.after_update(module)  # mean 1.5
    assert module.balance_bias.tolist() == pytest.approx([-0.1, -0.1, 0.1, 0.1])
    assert module.balance_load.tolist() == [0, 0, 0, 0]
    near = torch.tensor([[0.9, 0.8, 0.65, 0.0]])
    assert router.select(near, 2, module).tolist() == [[0, 2]]  # .8, .7, .75, .1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_d2_balanced_counts_the_real_tokens_of_training_forwards_once(checkpointing):
    model, (ids, mask) = tiny(), tokens()
    install(model, Balanced())
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    router = find_routers(model)[0].module
    run(model, ids, mask)
    forward(model, ids, mask)
    assert not router.balance_load.any(), "neither sampling nor a cold start is a training forward"
    with record(model) as recorder, counted(model, mask.bool()):
        loss = model(input_ids=ids, attention_mask=mask).logits.sum()
    loss.backward()
    first = recorder.trace.expert_ids_BSLK[:, :, 0][mask.bool()]
    assert router.balance_load.tolist() == torch.bincount(first.flatten().long(), minlength=8).tolist()
    assert router.balance_load.sum() == 2 * mask.sum() < 2 * mask.numel()


def test_balanced_moves_the_load_toward_uniform():
    model, (ids, mask) = tiny("qwen3_moe", layers=1, experts=8, top_k=2), tokens(16, 20, padded=False)
    variant = Balanced(speed=0.01)
    install(model, variant)
    router = find_routers(model)[0].module

    def excess():
        with counted(model, mask.bool()):
            forward(model, ids, mask)
        load = router.balance_load
        variant_excess = (load.max() / load.mean() - 1).item()
        variant.after_update(router)
        return variant_excess

    first = excess()
    for _ in range(60):
        last = excess()
    assert first > 0.5, "a load that is uniform from the start shows nothing"
    assert last < first / 3


def test_learned_prior_starts_as_the_familys_own_choice(family):
    model, (ids, mask) = tiny(family), tokens()
    before, _ = run(model, ids, mask)
    install(model, LearnedPrior())
    layer = 0  # later layers see other gates
    assert not sets_differ(run(model, ids, mask)[0], before)[mask.bool()][:, layer].any()


def test_learned_prior_counts_in_choice_and_gate(family):
    model, (ids, mask) = tiny(family, layers=1), tokens()
    install(model, LearnedPrior())
    prior = find_routers(model)[0].module.prior
    with torch.no_grad():
        prior[3] = 50.0
    logits, gates, chosen = gates_of(model, ids, mask)[0]
    assert (chosen == 3).any(-1).all()
    expected = (logits.float().gather(-1, chosen) + prior[chosen]).softmax(-1)
    assert torch.allclose(gates.float(), expected, atol=1e-6)
    assert (gates.float().max(-1).values > 0.999).all()


def test_learned_prior_learns():
    model, (ids, mask) = tiny(layers=1), tokens()
    install(model, LearnedPrior())
    prior = find_routers(model)[0].module.prior
    assert any(parameter is prior for parameter in model.parameters())
    optimizer = torch.optim.SGD([prior], lr=1.0)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = forward(model, ids, mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert prior.abs().max() > 1e-3


def attached(router, experts=8, seed=0):
    torch.manual_seed(seed)
    module = torch.nn.Linear(4, experts)
    router.attach(module, experts, 2)
    return module


def test_noisy_by_hand_and_at_scale_0_native():
    router = Noisy(scale=2.0)
    module = attached(router, 4)
    module.gumbel.copy_(torch.tensor([0.0, 1.0, -1.0, 0.0]))
    p = torch.tensor([[0.5, 0.1, 0.3, 0.1]])  # log p -0.69 -2.30 -1.20 -2.30; with the noise -0.69 -0.30 -3.20 -2.30
    assert router.select(p, 2, module).tolist() == [[1, 0]]
    assert router.select(p.log() + 7, 2, module).tolist() == [[1, 0]]  # families that rank logits
    assert Noisy(scale=0.0).select(p, 2, module).tolist() == [[0, 2]]


def test_noisy_samples_the_first_choice_from_the_softmax_over_draws():
    router = Noisy(scale=1.0, every=1)
    module = attached(router, 4)
    p = torch.tensor([[0.6, 0.25, 0.1, 0.05]])
    counts = torch.zeros(4)
    for _ in range(2000):
        counts[router.select(p, 1, module)[0, 0]] += 1
        router.after_update(module)
    assert torch.allclose(counts / 2000, p[0], atol=0.04)


def test_expert_dropout_by_hand():
    router = ExpertDropout(share=0.5)
    module = attached(router, 4)
    module.draw.copy_(torch.tensor([0.1, 0.9, 0.8, 0.2]))  # 0 and 3 are dropped
    scores = torch.tensor([[0.4, 0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4]])
    assert router.select(scores, 2, module).tolist() == [[2, 1], [2, 1]]
    assert router.select(scores, 3, module).tolist() == [[2, 1, 0], [2, 1, 3]], "the best of the dropped fill up"
    grouped = torch.tensor([[0.4, float("-inf"), 0.2, 0.3]])
    assert router.select(grouped, 2, module).tolist() == [[2, 0]], "never out of a token's groups"


@pytest.mark.parametrize("kind", [Noisy, ExpertDropout])
def test_a_draw_lasts_and_is_a_function_of_the_weights_and_the_updates(kind):
    router, name = kind(every=3), {Noisy: "gumbel", ExpertDropout: "draw"}[kind]
    one, same, other = attached(router), attached(router), attached(router, seed=1)
    first = getattr(one, name).clone()
    torch.rand(5)
    for update in range(1, 7):
        for module in (one, same, other):
            router.after_update(module)
        kept = torch.equal(getattr(one, name), first)
        assert kept == (update < 3)
        assert torch.equal(getattr(one, name), getattr(same, name))
        assert not torch.equal(getattr(one, name), getattr(other, name)), "layers have draws of their own"


def test_predictive_by_hand():
    """One feature and the constant: with E = 2, centred scores are (z, -z), and so are their changes."""
    router = Predictive(ridge=1e-6)
    module = attached(router, 2)
    old = torch.tensor([[0.9, -0.9], [0.5, -0.5]]).softmax(-1)
    new = torch.tensor([[0.4, -0.4], [-0.1, 0.1]]).softmax(-1)  # changes of z: -0.5 and -0.6
    assert router.select(old, 1, module).tolist() == [[0], [0]]
    router.learn(old, new, module)
    assert router.select(old, 1, module).tolist() == [[0], [0]], "it predicts from after_update on"
    router.after_update(module)
    predicted = (
        torch.tensor([[0.9, -0.9], [0.5, -0.5]]) + torch.tensor([[0.9, -0.9, 1], [0.5, -0.5, 1]]) @ module.predictor
    )
    assert torch.allclose(predicted, torch.tensor([[0.4, -0.4], [-0.1, 0.1]]), atol=1e-3)
    assert router.select(old, 1, module).tolist() == [[0], [1]]
    # Both tokens lie on the line change = 0.25 z - 0.725: a third at z = 0.8 moves by -0.525.
    third = torch.tensor([[0.8, -0.8]])
    moved = third + torch.tensor([[0.8, -0.8, 1.0]]) @ module.predictor
    assert moved[0].tolist() == pytest.approx([0.275, -0.275], abs=1e-3)


def test_predictive_forgets_and_the_ridge_holds_it_back():
    old, new = (torch.tensor(logits).softmax(-1) for logits in ([[1.0, -1.0]], [[0.5, -0.5]]))
    router = Predictive(memory=0.5, ridge=0.5)
    module = attached(router, 2)
    for expected in (1.0, 0.5 + 1, 0.25 + 0.5 + 1):
        router.learn(old, new, module)
        assert module.seen_xx[2, 2] == pytest.approx(expected)
        router.after_update(module)
    # x = (1, -1, 1), change (-.5, .5): (x'x s + .5 s I)^-1 x' s change = x' change / (3 + .5), at every s.
    assert module.predictor[:, 0].tolist() == pytest.approx([-0.5 / 3.5, 0.5 / 3.5, -0.5 / 3.5], abs=1e-4)


def test_predictive_does_not_learn_from_experts_outside_a_tokens_groups():
    router, inf = Predictive(), float("inf")
    module = attached(router, 4)
    router.learn(torch.tensor([[0.3, 0.2, -inf, -inf]]), torch.tensor([[0.2, 0.3, -inf, -inf]]), module)
    router.after_update(module)
    assert module.predictor.isfinite().all()
    assert not module.predictor[2:4].any()
    assert not module.predictor[:, 2:].any()
    assert router.select(torch.tensor([[0.3, 0.2, -inf, -inf]]), 2, module).sort(-1).values.tolist() == [[0, 1]]


def test_predictive_agrees_more_and_more_with_what_the_router_will_choose():
    """A router that moves by a rule and by noise: what it ranks next is foreseen better after every lesson."""
    generator = torch.Generator().manual_seed(0)
    router, E, K = Predictive(), 16, 2
    module = attached(router, E)
    rule, shift = 0.15 * torch.randn(E, E, generator=generator), 0.4 * torch.randn(E, generator=generator)
    agreement, native, moved = [], [], []
    for _ in range(12):
        old = torch.randn(40, E, generator=generator)
        new = old + old @ rule + shift + 0.1 * torch.randn(40, E, generator=generator)
        chosen, own, future = router.select(old.softmax(-1), K, module), old.topk(K).indices, new.topk(K).indices
        agreement.append((chosen[:, :, None] == future[:, None]).any(-1).float().mean().item())
        native.append((own[:, :, None] == future[:, None]).any(-1).float().mean().item())
        moved.append((chosen.sort(-1).values != own.sort(-1).values).any(-1).float().mean().item())
        router.learn(old.softmax(-1), new.softmax(-1), module)
        router.after_update(module)
    assert agreement[0] == native[0] < 0.7
    assert moved[0] == 0
    assert min(moved[1:]) > 0.3, "it chooses other experts than the family"
    first, last = sum(agreement[1:4]) / 3, sum(agreement[-3:]) / 3
    assert agreement[0] < first < last
    assert last > 0.9


def test_sigmoid_bias_gates_by_hand_and_chooses_as_balanced():
    router, module = SigmoidBias(), torch.nn.Identity()
    logits, chosen = torch.tensor([[0.0, 5.0, -1.0, 2.0]]), torch.tensor([[3, 0]])
    # sigmoid(2) = 0.880797, sigmoid(0) = 0.5
    assert router.gate(logits, chosen, module).tolist()[0] == pytest.approx([0.637890, 0.362110], abs=1e-5)
    module = attached(router, 4)
    module.balance_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.5]))
    assert router.select(torch.tensor([[0.5, 0.4, 0.0, 0.2]]), 2, module).tolist() == [[3, 0]]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Binned, {"width": 0.0}),
        (Tempered, {"temperature": -1.0}),
        (Balanced, {"speed": -1.0}),
        (SigmoidBias, {"speed": -2.0}),
        (Predictive, {"memory": 1.5}),
        (Predictive, {"ridge": 0.0}),
        (Noisy, {"scale": -1.0}),
        (Noisy, {"every": 0}),
        (ExpertDropout, {"share": 1.0}),
        (ExpertDropout, {"every": 0}),
    ],
)
def test_impossible_settings_are_refused_by_name(kind, value):
    (name, number), = value.items()  # fmt: skip
    with pytest.raises(ValueError, match=f"{name} is {number}"):
        kind(**value)


# ------------------------------------------------------------------------------------------------------------ discovery
def module_of(text, name="my_variants"):
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    sys.modules[name] = module
    header = "import dataclasses\nfrom moe_rl.routers.base import Router\n"
    exec(compile(header + text, module.__file__, "exec"), module.__dict__)
    return module


ONE = "@dataclasses.dataclass(frozen=True, kw_only=True)\nclass {}(Router):\n    strength: float = 0.5\n"


@pytest.mark.parametrize(
    ("text", "found"), [("", "it defines none"), (ONE.format("One") + ONE.format("Two"), "it defines One, Two")]
)
def test_a_file_without_exactly_one_variant_is_refused_by_name(text, found):
    with pytest.raises(TypeError, match=rf"my_variants\.py must define exactly one Router, {found}"):
        discovery.variant_in(module_of(text), Router)


def test_an_imported_variant_does_not_count_as_defined():
    text = "from moe_rl.routers.binned import Binned\n" + ONE.format("Mine")
    assert discovery.variant_in(module_of(text), Router).__name__ == "Mine"


def test_a_folder_of_variants_is_walked(tmp_path, monkeypatch):
    package = tmp_path / "walked_variants"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("raise RuntimeError('base is not a variant')")
    (package / "mine.py").write_text(
        "import dataclasses\nfrom moe_rl.routers.base import Router\n" + ONE.format("Mine")
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = discovery.variants("walked_variants", Router)
    assert [(stem, kind.__name__) for stem, kind in found.items()] == [("mine", "Mine")]
    (package / "empty.py").write_text("")
    with pytest.raises(TypeError, match=r"empty\.py must define exactly one Router"):
        discovery.variants("walked_variants", Router)


def test_every_variant_is_a_typed_option():
    from hydra.utils import instantiate
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ValidationError

    for kind in ROUTERS.values():
        made = instantiate(OmegaConf.structured(discovery.node(kind)))
        assert made == kind()
    node = OmegaConf.structured(discovery.node(Binned))
    with pytest.raises(ValidationError):
        node.width = "wide"
    with pytest.raises((ConfigAttributeError, ConfigKeyError)):
        node.witdh = 0.1


def test_a_class_from_outside_is_pointed_to_by_target():
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    text = ONE.format("Mine") + (
        "    def select(self, scores_NE, top_k, router):\n        return (-scores_NE).topk(top_k, dim=-1).indices\n"
    )
    module = module_of(text, "my_lab")
    variant = instantiate(OmegaConf.create({"_target_": "my_lab.Mine", "strength": 0.25}))
    assert isinstance(variant, module.Mine)
    assert variant.strength == 0.25
    model, (ids, mask) = tiny(experts=4, top_k=2, layers=1), tokens()
    native, _ = run(model, ids, mask)
    install(model, variant)
    mine, _ = run(model, ids, mask)
    both = torch.cat([native.expert_ids_BSLK, mine.expert_ids_BSLK], -1).sort(-1).values[mask.bool()]
    assert (both == torch.arange(4)).all()  # the worst two are the other two
