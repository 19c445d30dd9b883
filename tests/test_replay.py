"""Replay: exact where nothing changed, forced where it did, gradients right, state never left behind."""

import copy

import pytest
import torch
from models import FAMILIES, random_trace_like, sets_differ, tiny, tokens
from test_record import forward
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from moe_rl import RoutingTrace, record, replay
from moe_rl.models.families import find_routers
from moe_rl.routers.base import install
from moe_rl.routers.binned import Binned
from moe_rl.routing_trace import RoutingError


def traced(model, ids, mask):
    with record(model) as recorder:
        logits = forward(model, ids, mask).logits
    return recorder.trace, logits.detach()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def router_norms(model):
    return [site.module.weight.grad.norm().item() for site in find_routers(model)]


@pytest.mark.parametrize("experts", ["grouped_bag", "grouped_mm", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_a_models_own_routing_is_the_identity_bit_for_bit(family, dtype, experts):
    model, (ids, mask) = tiny(family, dtype=dtype, experts_implementation=experts), tokens()
    trace, logits = traced(model, ids, mask)
    with replay(model, trace):
        again = forward(model, ids, mask).logits
    assert torch.equal(again, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_self_replay_are_the_natural_ones_bit_for_bit(family):
    model, (ids, mask) = tiny(family), tokens()
    trace, _ = traced(model, ids, mask)
    forward(model, ids, mask).logits.logsumexp(-1).sum().backward()
    natural = gradients(model)
    model.zero_grad()
    with replay(model, trace):
        forward(model, ids, mask).logits.logsumexp(-1).sum().backward()
    replayed = gradients(model)
    assert natural.keys() == replayed.keys()
    assert all(torch.equal(natural[name], replayed[name]) for name in natural)


@pytest.mark.parametrize("family", FAMILIES)
def test_foreign_experts_are_executed_and_every_router_still_learns(family):
    model, (ids, mask) = tiny(family, experts=16, top_k=4, layers=2), tokens()
    trace, logits = traced(model, ids, mask)
    foreign = random_trace_like(trace)
    received = []
    experts = [m.experts for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]
    hooks = [e.register_forward_pre_hook(lambda m, args: received.append(args[1].clone())) for e in experts]
    with replay(model, foreign), record(model) as recorder:
        out = forward(model, ids, mask).logits
        out.logsumexp(-1).sum().backward()
    for hook in hooks:
        hook.remove()
    real = mask.bool()
    for layer, seen in enumerate(received):
        assert torch.equal(seen.view(*ids.shape, -1)[real], foreign.expert_ids_BSLK[:, :, layer][real].long())
    assert not sets_differ(recorder.trace, foreign)[real].any()  # record inside replay sees what was executed
    assert not torch.allclose(out, logits)
    assert all(norm > 1e-3 for norm in router_norms(model)), router_norms(model)


def test_gates_are_recomputed_from_live_logits_over_the_replayed_experts():
    model, (ids, mask) = tiny(layers=1), tokens()
    trace, _ = traced(model, ids, mask)
    router = find_routers(model)[0].module
    seen = []
    hook = router.register_forward_hook(lambda m, args, out: seen.append([x.detach().clone() for x in out]))
    with torch.no_grad():
        router.weight.add_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0)))
    with replay(model, trace):
        forward(model, ids, mask)
    forward(model, ids, mask)
    hook.remove()
    (logits, gates, used), (_, _, live) = seen
    assert torch.equal(
        used.view(*trace.expert_ids_BSLK.shape[:2], -1)[mask.bool()], trace.expert_ids_BSLK[:, :, 0][mask.bool()].long()
    )
    assert not torch.equal(used.sort(-1).values, live.sort(-1).values)
    expected = logits.softmax(-1).gather(-1, used)
    assert torch.allclose(gates, expected / expected.sum(-1, keepdim=True), atol=1e-6)


def test_a_group_limit_does_not_zero_forced_experts():
    model, (ids, mask) = tiny("deepseek_v3", experts=8, top_k=2, expert_groups=4), tokens()
    trace, logits = traced(model, ids, mask)
    with replay(model, trace):
        assert torch.equal(forward(model, ids, mask).logits, logits)
    foreign = random_trace_like(trace)
    with replay(model, foreign):
        out = forward(model, ids, mask).logits
        out.logsumexp(-1).sum().backward()
    assert out.isfinite().all()
    assert all(norm > 1e-4 for norm in router_norms(model))


def test_unknown_rows_route_live_and_known_ones_are_forced():
    model, (ids, mask) = tiny(layers=1), tokens(padded=False)
    trace, _ = traced(model, ids, mask)
    foreign = random_trace_like(trace)
    known = torch.zeros_like(mask).bool()
    known[:, ::2] = True
    with replay(model, foreign.aligned_to(known)), record(model) as recorder:
        forward(model, ids, mask)
    used = recorder.trace
    assert not sets_differ(used, foreign)[known].any()
    assert not sets_differ(used, trace)[~known].any()


def test_a_single_expert_row_of_zero_is_replayed_when_valid_and_live_when_not():
    model, (ids, mask) = tiny("olmoe", top_k=1, layers=1), tokens(padded=False)
    trace, _ = traced(model, ids, mask)
    zeros = torch.zeros_like(trace.expert_ids_BSLK)
    for valid in (True, False):
        forced = RoutingTrace(zeros, torch.full_like(trace.valid_BS, valid), trace.layer_names, trace.num_experts)
        with replay(model, forced), record(model) as recorder:
            forward(model, ids, mask)
        assert torch.equal(recorder.trace.expert_ids_BSLK, zeros if valid else trace.expert_ids_BSLK)


def test_zero_filled_rows_and_impossible_ids_are_refused():
    model, (ids, mask) = tiny(), tokens()
    trace, _ = traced(model, ids, mask)
    names, valid = trace.layer_names, trace.valid_BS
    with (
        pytest.raises(RoutingError, match="same expert twice"),
        replay(model, RoutingTrace(torch.zeros_like(trace.expert_ids_BSLK), valid, names, 8)),
    ):
        pass
    with (
        pytest.raises(RoutingError, match=r"outside 0\.\.7"),
        replay(model, RoutingTrace(trace.expert_ids_BSLK + 8, valid, names, 8)),
    ):
        pass


def test_traces_of_other_models_and_other_batches_are_refused():
    model, (ids, mask) = tiny(), tokens()
    trace, _ = traced(model, ids, mask)
    other, _ = traced(tiny(layers=2), ids, mask)
    with pytest.raises(RoutingError, match="the trace has 2 layers"), replay(model, other):
        pass
    with (
        pytest.raises(RoutingError, match=r"2 sequences up to column 9 does not fit a trace of 4"),
        replay(model, trace),
    ):
        forward(model, ids[:2], mask[:2])
    short, _ = traced(model, ids[:, :5], mask[:, :5])
    with pytest.raises(RoutingError, match="up to column 9 does not fit"), replay(model, short):
        forward(model, ids, mask)


def test_replay_that_never_happens_raises():
    model, (ids, mask) = tiny(), tokens()
    trace, _ = traced(model, ids, mask)
    with pytest.raises(RoutingError, match="no forward of the model ran"), replay(model, trace):
        pass
    with pytest.raises(RoutingError, match="before switch_to"), replay(model):
        forward(model, ids, mask)


def test_a_router_that_is_not_served_raises_and_is_named():
    model, (ids, mask) = tiny(), tokens()
    trace, _ = traced(model, ids, mask)
    model.model.layers[2].mlp.forward = lambda hidden: hidden
    with pytest.raises(RoutingError, match=r"layers\.2\.mlp\.gate"), replay(model, trace):
        forward(model, ids, mask)


def test_a_router_that_does_not_use_top_k_raises_and_is_named():
    model, (ids, mask) = tiny(layers=1), tokens()
    trace, _ = traced(model, ids, mask)
    router = find_routers(model)[0].module

    def sorting(hidden):
        logits = nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        return logits, *(x[:, :2] for x in logits.softmax(-1).sort(-1, descending=True))

    router.forward = sorting
    with pytest.raises(RoutingError, match=r"layers\.0\.mlp\.gate .*chose experts 0 times"), replay(model, trace):
        forward(model, ids, mask)


# ------------------------------------------------------------------------------------------- checkpointing and backward
@pytest.mark.parametrize("reentrant", [True, False])
def test_replay_serves_the_forward_and_its_recomputation(reentrant):
    model, (ids, mask) = tiny(), tokens()
    foreign = random_trace_like(traced(model, ids, mask)[0])
    with replay(model, foreign):
        forward(model, ids, mask).logits.logsumexp(-1).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    with replay(model, foreign):
        forward(model, ids, mask, use_cache=False).logits.logsumexp(-1).sum().backward()
    assert all(torch.equal(expected[name], grad) for name, grad in gradients(model).items())
    assert all("checkpoint_with_plan" not in repr(vars(m).get("_gradient_checkpointing_func")) for m in model.modules())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("experts", ["grouped_bag", "grouped_mm", "eager"])
def test_two_micro_batches_before_one_backward_each_keep_their_own_experts(reentrant, experts):
    model, (ids, mask) = tiny(experts_implementation=experts), tokens()
    foreign = random_trace_like(traced(model, ids, mask)[0])
    halves = (slice(0, 2), slice(2, 4))

    def both(model, **kwargs):
        with replay(model) as block:
            losses = []
            for rows in halves:
                block.switch_to(foreign[rows])
                losses.append(forward(model, ids[rows], mask[rows], **kwargs).logits.logsumexp(-1).sum())
            sum(losses).backward()
        return gradients(model)

    expected = both(model)
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    got = both(model, use_cache=False)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_leaving_the_block_with_a_backward_to_come_raises(reentrant):
    model, (ids, mask) = tiny(), tokens()
    trace, _ = traced(model, ids, mask)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    kept = []

    def leave_too_early():
        with replay(model, trace):
            kept.append(forward(model, ids, mask, use_cache=False).logits.sum())

    with pytest.raises(RoutingError, match="backward with activation checkpointing is still to come"):
        leave_too_early()
    with pytest.raises(RoutingError, match="after the replay block had ended"):
        kept[0].backward()


def test_a_forward_whose_result_is_dropped_may_leave_the_block():
    model, (ids, mask) = tiny(), tokens()
    trace, _ = traced(model, ids, mask)
    model.activation_checkpointing_enable()
    model.train()
    with replay(model, trace):
        forward(model, ids, mask, use_cache=False)
    with torch.no_grad(), replay(model, trace):
        kept = forward(model, ids, mask)
    assert kept.logits.isfinite().all()


def test_each_block_sees_only_its_own_targets():
    model, (ids, mask) = tiny(), tokens()
    trace, _ = traced(model, ids, mask)
    one, two = random_trace_like(trace, 1), random_trace_like(trace, 2)
    with torch.no_grad(), replay(model, one):
        forward(model, ids, mask)
    with replay(model, two), record(model) as recorder:
        forward(model, ids, mask).logits.sum().backward()
    assert not sets_differ(recorder.trace, two)[mask.bool()].any()


def test_an_exception_inside_the_block_restores_the_model():
    model, (ids, mask) = tiny(), tokens()
    trace, logits = traced(model, ids, mask)
    foreign = random_trace_like(trace)
    broken = model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda m, a: 1 / 0)
    with pytest.raises(ZeroDivisionError), replay(model, foreign):
        forward(model, ids, mask)
    broken.remove()
    assert torch.equal(forward(model, ids, mask).logits, logits)
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("variant", [False, True])
def test_an_interrupt_inside_a_router_leaves_nothing_in_force(variant, monkeypatch):
    """A KeyboardInterrupt runs no forward hooks; a choice still in force would answer the top-k of any model."""
    model, (ids, mask) = tiny(), tokens()
    foreign = random_trace_like(traced(model, ids, mask)[0])
    other = tiny(seed=1)
    natural = forward(other, ids, mask).logits
    if variant:
        install(model, Binned())
    before = forward(model, ids, mask).logits
    router = find_routers(model)[1].module

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(router, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt), replay(model, foreign):
            forward(model, ids, mask)
    assert torch.equal(forward(model, ids, mask).logits, before)
    assert torch.equal(forward(other, ids, mask).logits, natural)
    assert not _get_current_function_mode_stack()


def test_replaying_a_model_twice_at_once_is_refused():
    model, (ids, mask) = tiny(), tokens()
    trace, _ = traced(model, ids, mask)
    with replay(model, trace):
        forward(model, ids, mask)
        with pytest.raises(RoutingError, match="already being replayed"), replay(model, trace):
            pass


def test_a_reference_model_is_replayed_only_if_asked():
    policy, (ids, mask) = tiny(), tokens()
    reference = copy.deepcopy(policy)
    foreign = random_trace_like(traced(policy, ids, mask)[0])

    def kl(replay_policy, replay_reference):
        logits = []
        for model, replayed in ((policy, replay_policy), (reference, replay_reference)):
            with torch.no_grad():
                if replayed:
                    with replay(model, foreign):
                        logits.append(forward(model, ids, mask).logits.log_softmax(-1))
                else:
                    logits.append(forward(model, ids, mask).logits.log_softmax(-1))
        return (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean().item()

    assert kl(False, False) == 0.0
    assert kl(True, True) == 0.0
    assert kl(True, False) > 1e-4


def test_a_trace_whose_columns_are_shifted_by_padding_is_refused():
    """Routing written from column 0 over left-padded rows would be replayed by the neighbours of its tokens."""
    model, (ids, mask) = tiny(), tokens(padded=False)
    trace, _ = traced(model, ids, mask)
    pad = torch.nn.functional.pad
    padded_ids, padded_mask = pad(ids, (3, 0)), pad(mask, (3, 0))
    with pytest.raises(RoutingError, match=r"left padding of 4 sequences"):
        trace.aligned_to(padded_mask)
    everywhere = trace.aligned_to(torch.ones_like(padded_mask))
    with pytest.raises(RoutingError, match=r"left padding of 4 sequences"), replay(model, everywhere):
        forward(model, padded_ids, padded_mask)
    shorter = pad(mask[:, :-2], (0, 2))  # known behind the end of a row: what generate leaves of rows that ended early
    with replay(model, trace):
        forward(model, ids, shorter)
    assert torch.equal(trace.aligned_to(shorter).valid_BS, shorter.bool())


def test_a_trace_with_more_left_padding_than_a_narrower_forward_is_refused():
    """Its first columns would be replayed by tokens that stand columns further left than they were recorded."""
    model, (ids, mask) = tiny(), tokens(padded=False)
    pad = torch.nn.functional.pad
    wide, _ = traced(model, pad(ids, (3, 0)), pad(mask, (3, 0)))
    for given in (mask, None):
        differs = pytest.raises(RoutingError, match=r"left padding of 4 sequences .* of 12 columns and a mask of 9")
        with differs, replay(model, wide):
            model(input_ids=ids, attention_mask=given)
    less = pad(ids, (1, 0)), pad(mask, (1, 0))
    with pytest.raises(RoutingError, match=r"a trace of 12 columns and a mask of 10"), replay(model, wide):
        forward(model, *less)
    one_row = pad(mask, (3, 0))
    one_row[0, 2] = 1  # a single sequence that is one token longer
    with pytest.raises(RoutingError, match=r"left padding of 1 sequences \(first: 0\)"), replay(model, wide):
        model(input_ids=pad(ids, (3, 0))[:, :11], attention_mask=one_row[:, :11])
    with torch.no_grad(), replay(model, wide) as replaying:
        forward(model, pad(ids, (3, 0))[:, :7], pad(mask, (3, 0))[:, :7])  # a first piece of the same columns
        assert replaying.served == 1
    with pytest.raises(RoutingError, match="12 columns does not fit a mask of 4 x 9"):
        wide.aligned_to(mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_works_inside_generate(family):
    model, (ids, mask) = tiny(family), tokens(3, 5)
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with record(model) as recorder:
        full = model.generate(**options)
    with replay(model, recorder.trace), record(model) as again:
        assert torch.equal(model.generate(**options), full)
    assert torch.equal(again.trace.expert_ids_BSLK, recorder.trace.expert_ids_BSLK)


def test_replaying_the_engines_routing_closes_part_of_the_bf16_gap():
    model = tiny(layers=4, hidden_size=64, experts=16, top_k=2, dtype="bfloat16")
    ids, mask = tokens(16, 12)
    with record(model) as recorder, torch.no_grad():
        full = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    engine = torch.stack(full.logits, 1).float().log_softmax(-1)
    whole = torch.cat([mask, torch.ones(16, 24, dtype=torch.long)], 1)

    def gap():
        with torch.no_grad():
            logits = forward(model, full.sequences, whole).logits[:, -25:-1].float().log_softmax(-1)
        chosen = full.sequences[:, -24:, None]
        return (logits.gather(-1, chosen) - engine.gather(-1, chosen)).abs().mean().item()

    live = gap()
    with record(model) as natural, torch.no_grad():
        forward(model, full.sequences, whole)
    trace = recorder.trace.aligned_to(whole)
    changed = sets_differ(trace, natural.trace)[trace.valid_BS].float().mean().item()
    with replay(model, trace):
        replayed = gap()
    assert changed > 0, "without a routing mismatch there is nothing to close"
    assert replayed < live, (replayed, live, changed)


def test_router_jitter_acts_between_training_passes_only():
    model = tiny("mixtral")
    ids, mask = tokens()
    for block in model.modules():
        if hasattr(block, "jitter_noise"):
            block.jitter_noise = 0.3
    first, _ = traced(model.eval(), ids, mask)
    second, _ = traced(model, ids, mask)
    assert not sets_differ(first, second).any()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, _ = traced(model.train(), ids, mask)
        second, _ = traced(model, ids, mask)
    assert sets_differ(first, second).any()
