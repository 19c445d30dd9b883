"""Recorded routing: complete, aligned to positions, and what the experts really received."""

import copy
import threading

import pytest
import torch
from models import FAMILIES, sets_differ, tiny, tokens
from torch import nn
from transformers import DynamicCache

from moe_rl import record, replay
from moe_rl.models.families import find_routers
from moe_rl.policy import routing_of
from moe_rl.routing_trace import RoutingError, RoutingTrace, id_dtype


def forward(model, ids, mask, **kwargs):
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_ids_are_what_the_experts_receive(family):
    model = tiny(family)
    ids, mask = tokens()
    received = []
    blocks = [m for m in model.modules() if hasattr(m, "experts") and isinstance(m.experts, nn.Module)]
    hooks = [
        b.experts.register_forward_pre_hook(
            lambda m, args, kwargs: received.append((args[1] if len(args) > 1 else kwargs["top_k_index"]).clone()),
            with_kwargs=True,
        )
        for b in blocks
    ]
    with record(model) as recorder:
        forward(model, ids, mask)
    for hook in hooks:
        hook.remove()
    trace = recorder.trace
    assert trace.num_layers == len(received) == 3
    for layer, seen in enumerate(received):
        assert torch.equal(trace.expert_ids_BSLK[:, :, layer].long(), seen.view(*ids.shape, -1))
    assert torch.equal(trace.valid_BS, mask.bool())
    assert trace.expert_ids_BSLK.unique().numel() > 4, "a test in which all tokens use the same experts shows nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_records_all_but_the_last_sampled_token_at_its_position(family):
    model, (ids, mask) = tiny(family), tokens(2, 5, padded=False)
    rows = []
    site = find_routers(model)[0]
    hook = site.module.register_forward_hook(lambda m, a, out: rows.append(out[2].shape[0]))
    with record(model) as recorder:
        full = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=True)
    hook.remove()
    assert rows == [10, 2, 2, 2, 2, 2]  # 20 rows: B (P + N - 1)
    trace = recorder.trace.aligned_to(torch.ones_like(full))
    assert trace.valid_BS.sum(1).tolist() == [10, 10]
    assert not trace.valid_BS[:, 10].any()
    with record(model) as recorder:
        forward(model, full, torch.ones_like(full))
    whole = recorder.trace
    assert whole.valid_BS.sum() == 22
    assert not sets_differ(trace, whole)[trace.valid_BS].any()  # decode against full sequence: 0 changed sets in fp32


def test_scoring_a_prompt_records_every_row():
    model, (ids, mask) = tiny(), tokens(2, 5, padded=False)
    with record(model) as recorder:
        forward(model, ids, mask)
    assert recorder.trace.valid_BS.sum(1).tolist() == [5, 5]


def test_left_padded_prompts_and_the_last_token_are_invalid():
    model = tiny()
    ids, mask = tokens(1, 4, padded=False)
    mask = mask.clone()
    mask[0, :2] = 0
    with record(model) as recorder:
        full = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=True)
    trace = recorder.trace.aligned_to(torch.ones_like(full))
    assert trace.valid_BS.tolist() == [[False, False, True, True, True, True, False]]


def test_padding_leaves_the_routing_of_a_sequence_as_it_was():
    model = tiny()
    three, four = torch.tensor([[7, 8, 9]]), torch.tensor([[10, 11, 12, 13]])
    alone = []
    for sequence in (three, four):
        with record(model) as recorder:
            forward(model, sequence, torch.ones_like(sequence))
        alone.append(recorder.trace.expert_ids_BSLK[0])
    packed = torch.zeros(2, 8, dtype=torch.long)
    mask = torch.zeros(2, 8, dtype=torch.long)
    packed[0, 5:], mask[0, 5:] = three, 1  # one padded on the left, one on the right
    packed[1, :4], mask[1, :4] = four, 1
    with record(model) as recorder:
        forward(model, packed, mask)
    for row, expected in enumerate(alone):
        got = recorder.trace
        assert torch.equal(got.expert_ids_BSLK[row][got.valid_BS[row]].sort(-1).values, expected.sort(-1).values)


def test_chunked_prefill_joins_to_the_unchunked_rows():
    model, (ids, mask) = tiny(), tokens(2, 7, padded=False)
    with record(model) as recorder:
        forward(model, ids, mask)
    whole = recorder.trace
    cache = DynamicCache(config=model.config)
    with record(model) as recorder, torch.no_grad():
        for first in (0, 3, 6):
            last = min(first + 3, 7)
            model(input_ids=ids[:, first:last], attention_mask=mask[:, :last], cache=cache)
    assert [call.width for call, *_ in recorder.passes[0].calls] == [3, 3, 1]
    assert torch.equal(recorder.trace.expert_ids_BSLK, whole.expert_ids_BSLK)


def test_a_prefilled_cache_makes_an_invalid_prefix_never_a_shift():
    model, (ids, mask) = tiny(), tokens(2, 7, padded=False)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :6], attention_mask=mask[:, :6], cache=cache)
        with record(model) as recorder:
            model(input_ids=ids[:, 6:], attention_mask=mask, cache=cache)
    assert recorder.trace.valid_BS.tolist() == [[False] * 6 + [True]] * 2
    with record(model) as recorder:
        forward(model, ids, mask)
    with torch.no_grad(), record(model) as again:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :6], attention_mask=mask[:, :6], cache=cache)
        model(input_ids=ids[:, 6:], attention_mask=mask, cache=cache)
    assert torch.equal(again.trace.expert_ids_BSLK[:, 6], recorder.trace.expert_ids_BSLK[:, 6])


def test_a_cropped_cache_voids_the_columns_behind():
    model, (ids, mask) = tiny(), tokens(2, 7, padded=False)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), record(model) as recorder:
        model(input_ids=ids, attention_mask=mask, cache=cache)
        cache.crop(-3)
        model(input_ids=ids[:, 4:5], attention_mask=mask[:, :5], cache=cache)
    assert recorder.trace.valid_BS.shape == (2, 5)


def test_several_completions_keep_their_rows_and_beams_are_refused():
    model, (ids, mask) = tiny(), tokens(2, 5, padded=False)
    with record(model) as recorder:
        full = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=True,
            num_return_sequences=3,
        )
    trace = recorder.trace
    assert trace.valid_BS.shape == (6, 10)
    with record(model) as recorder:
        forward(model, full, torch.ones_like(full))
    whole = recorder.trace.expert_ids_BSLK[:, :10].sort(-1).values
    assert torch.equal(trace.expert_ids_BSLK.sort(-1).values, whole)
    with pytest.raises(RoutingError, match="beam search"), record(model):
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, num_beams=2, do_sample=False)
    model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, num_beams=2, do_sample=False)  # restored


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_under_activation_checkpointing_is_not_recorded_twice(reentrant):
    model, (ids, mask) = tiny(), tokens()
    with record(model) as recorder:
        forward(model, ids, mask)
    plain = recorder.trace
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    order = []
    hooks = [
        s.module.register_forward_hook(lambda m, a, o, i=i: order.append(i)) for i, s in enumerate(find_routers(model))
    ]
    with record(model) as recorder:
        forward(model, ids, mask, use_cache=False).logits.sum().backward()
    for hook in hooks:
        hook.remove()
    assert order == [0, 1, 2, 2, 1, 0]
    assert len(recorder.traces) == 1
    assert torch.equal(recorder.trace.expert_ids_BSLK, plain.expert_ids_BSLK)


def test_micro_batches_join_and_different_widths_do_not():
    model, (ids, mask) = tiny(), tokens()
    with record(model) as recorder:
        forward(model, ids, mask)
    whole = recorder.trace
    with record(model) as recorder:
        forward(model, ids[:2], mask[:2])
        forward(model, ids[2:], mask[2:])
    assert torch.equal(recorder.trace.expert_ids_BSLK, whole.expert_ids_BSLK)
    with record(model) as recorder:
        forward(model, ids, mask)
        forward(model, ids[:, :5], mask[:, :5])
    assert len(recorder.traces) == 2
    with pytest.raises(RoutingError, match="different widths"):
        _ = recorder.trace


def test_copies_and_second_models_are_independent():
    first, (ids, mask) = tiny(), tokens()
    del first
    model = tiny(seed=1)
    with record(model) as recorder:
        twin = copy.deepcopy(model)  # a frozen reference model, copied while hooks are in place
        forward(model, ids, mask)
        forward(twin, ids, mask)
    assert len(recorder.traces) == 1
    assert recorder.trace.layer_names == tuple(site.name for site in find_routers(model))
    with replay(model, recorder.trace):
        forward(twin, ids[:1], mask[:1])  # would not fit the trace
        forward(model, ids, mask)
    assert twin is not model
    assert not any(model._forward_pre_hooks.values())


def test_a_bypassed_router_raises_and_is_named():
    model, (ids, mask) = tiny(), tokens()
    block = model.model.layers[1].mlp
    block.forward = lambda hidden: hidden  # a fused kernel that never calls the router
    with pytest.raises(RoutingError, match=r"1 of 3 routers fired 0 times .*layers\.1\.mlp\.gate"), record(model):
        forward(model, ids, mask)


def test_the_model_that_is_called_must_be_the_one_given():
    model, (ids, mask) = tiny(), tokens()
    with pytest.raises(RoutingError, match="outside a forward"), record(model):
        model.model(input_ids=ids, attention_mask=mask)


def test_an_exception_inside_the_block_leaves_no_hooks():
    model, (ids, mask) = tiny(), tokens()
    before = forward(model, ids, mask).logits

    def interrupt():
        with record(model):
            forward(model, ids, mask)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupt()
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert torch.equal(forward(model, ids, mask).logits, before)


def test_nothing_recorded_raises():
    with record(tiny()) as recorder:
        pass
    with pytest.raises(RoutingError, match="nothing was recorded"):
        _ = recorder.trace


def test_a_dense_model_is_refused_with_what_to_do():
    with pytest.raises(RoutingError, match=r"no MoE layers.*replay=none"), record(tiny("dense")):
        pass


def test_an_unsupported_family_is_refused_by_name():
    from transformers import PhimoeConfig, PhimoeForCausalLM

    model = PhimoeForCausalLM(
        PhimoeConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=4,
        )
    )
    with pytest.raises(RoutingError, match="PhimoeTopKRouter cannot be recorded"), record(model):
        pass


def test_ids_above_255_survive_and_wrong_ones_are_refused():
    names, valid = ("a",), torch.ones(1, 1, dtype=torch.bool)
    ids = torch.tensor([300, 255, 511, 0]).view(1, 1, 1, 4)
    assert RoutingTrace.from_ids(ids, valid, names, 512).expert_ids_BSLK.flatten().tolist() == [300, 255, 511, 0]
    assert id_dtype(256) == torch.uint8
    assert id_dtype(257) == torch.int16
    with pytest.raises(RoutingError, match=r"outside 0\.\.255"):
        RoutingTrace.from_ids(ids, valid, names, 256)
    with pytest.raises(RoutingError, match="same expert twice"):
        RoutingTrace.from_ids(torch.zeros(1, 1, 1, 4, dtype=torch.long), valid, names, 8)
    nothing_known = RoutingTrace.from_ids(ids, ~valid, names, 8)  # what is not known cannot be wrong
    nothing_known.check()


def test_routing_follows_its_sequences_when_rollouts_are_shuffled():
    from moe_rl.records import Rollouts

    ids = torch.arange(3).view(3, 1, 1, 1).expand(3, 2, 1, 1)
    trace = RoutingTrace.from_ids(ids, torch.ones(3, 2, dtype=torch.bool), ("a",), 4)
    real = torch.ones(3, 1, dtype=torch.bool)
    rollouts = Rollouts(
        ids[:, :, 0, 0],
        real.expand(3, 2),
        real,
        torch.arange(3),
        real.float(),
        torch.arange(3.0),
        real[:, 0],
        real[:, 0],
        trace,
    )
    shuffled = rollouts[torch.tensor([2, 0, 1])]
    assert shuffled.group_ids_B.tolist() == shuffled.routing.expert_ids_BSLK[:, 0, 0, 0].tolist() == [2, 0, 1]
    assert [part.routing.expert_ids_BSLK[0, 0, 0, 0].item() for part in (shuffled[:1], shuffled[1:2])] == [2, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_gates_and_margins_ride_along_when_asked(family):
    model, (ids, mask) = tiny(family), tokens()
    with record(model) as recorder:
        forward(model, ids, mask)
    plain = recorder.trace
    assert plain.extras == {}
    received = []
    experts = [m.experts for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]
    hooks = [e.register_forward_pre_hook(lambda m, args: received.append(args[2].clone())) for e in experts]
    with record(model, router_logits=True, gates=True, margins=True) as recorder:
        forward(model, ids, mask)
    for hook in hooks:
        hook.remove()
    trace = recorder.trace
    assert torch.equal(trace.expert_ids_BSLK, plain.expert_ids_BSLK)
    for layer, gates in enumerate(received):
        assert torch.equal(trace.extras["gates"][:, :, layer], gates.view(*ids.shape, -1))
    chosen = trace.extras["router_logits"].topk(2).indices.sort(-1).values
    assert torch.equal(chosen, trace.expert_ids_BSLK.long().sort(-1).values)
    scores = trace.extras["router_logits"].float()
    scores = {"gpt_oss": scores, "deepseek_v3": scores.sigmoid()}.get(family, scores.softmax(-1))
    best = scores.sort(-1, descending=True).values
    assert torch.allclose(trace.extras["margins"][..., 0], best[..., 1] - best[..., 2], atol=1e-6)
    part = trace[1:3].aligned_to(torch.cat([mask[1:3], torch.ones(2, 2)], 1))
    assert part.extras["margins"].shape == (2, 11, 3, 1)


def test_gates_are_those_of_a_variant_and_what_a_family_does_not_return_is_refused():
    from moe_rl.routers.base import install
    from moe_rl.routers.tempered import Tempered

    model, (ids, mask) = tiny(), tokens()
    uninstall = install(model, Tempered(temperature=3.0))
    with record(model, router_logits=True, gates=True, margins=True) as recorder:
        forward(model, ids, mask)
    trace = recorder.trace
    expected = (trace.extras["router_logits"].gather(-1, trace.expert_ids_BSLK.long()) / 3).softmax(-1)
    assert torch.allclose(trace.extras["gates"], expected, atol=1e-6)
    uninstall()


def test_a_block_belongs_to_the_thread_that_opened_it():
    """Forwards of several threads in one block would mix their routers' choices."""
    model, (ids, mask) = tiny(), tokens()
    alone = routing_of(model, ids, mask)
    barrier, outcomes = threading.Barrier(4), []

    def elsewhere():
        barrier.wait()
        for _ in range(5):
            try:
                forward(model, ids[:2], mask[:2])
            except RoutingError as error:
                outcomes.append(str(error))

    with torch.no_grad(), record(model) as recorder:
        threads = [threading.Thread(target=elsewhere) for _ in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait()
        for _ in range(5):
            forward(model, ids, mask)
        for thread in threads:
            thread.join()
    assert len(outcomes) == 15
    assert all("another thread than the record or replay block" in outcome for outcome in outcomes)
    assert len(recorder.traces) == 5
    for trace in recorder.traces:
        assert torch.equal(trace.expert_ids_BSLK, alone.expert_ids_BSLK)
    found = []

    def of_its_own():
        with torch.no_grad(), record(model) as recorder:
            forward(model, ids, mask)
        found.append(recorder.trace)

    thread = threading.Thread(target=of_its_own)
    thread.start()
    thread.join()
    assert torch.equal(found[0].expert_ids_BSLK, alone.expert_ids_BSLK)


def test_token_ids_are_not_taken_for_a_mask():
    model, (ids, mask) = tiny(), tokens()
    trace = routing_of(model, ids, mask)
    for wrong in (ids, ids.float(), -mask, 2 * mask):
        with pytest.raises(ValueError, match=r"0 and 1, this torch\.\w+ tensor goes from .*not token ids"):
            trace.aligned_to(wrong)
    for right in (mask, mask.bool(), mask.float()):
        assert torch.equal(trace.aligned_to(right).valid_BS, mask.bool())


def test_a_trace_prints_sizes_and_no_tensors():
    model, (ids, mask) = tiny(), tokens()
    with record(model, gates=True, source="old", update=3) as recorder:
        forward(model, ids, mask)
    known = int(mask.sum())
    assert repr(recorder.trace) == (
        f"RoutingTrace(4 sequences x 9 columns, {known} known, 3 layers, 2 of 8 experts, source='old', update=3, "
        "gates [4, 9, 3, 2])"
    )
