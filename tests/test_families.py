"""Every MoE family of transformers is in the table; here the core ones, every adapter and every refusal run again."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conformance import Case, row, run
from families import FAMILIES, declared_by_transformers
from models import random_trace_like, tiny, tokens

import moe_rl.models
from moe_rl import record, replay
from moe_rl.engines.hf import Hf
from moe_rl.loop import samples_exactly
from moe_rl.models.families import find_routers
from moe_rl.models.tokenizer import character_tokenizer
from moe_rl.policy import response_logprobs
from moe_rl.routing_trace import RoutingError
from moe_rl.tasks.base import Example
from moe_rl.tasks.reverse import Reverse

TABLE = (Path(moe_rl.models.__file__).parent / "FAMILIES.md").read_text("utf-8")
QUICK = [family for family in FAMILIES if family.quick]


def case(name):
    return Case(next(family for family in FAMILIES if family.name == name))


def test_the_table_lists_exactly_the_families_of_transformers():
    rows = [line.split(" | ")[0].removeprefix("| ") for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert rows == [family.label for family in FAMILIES], "run experiments/family_table.py"
    assert sorted({family.name for family in FAMILIES}) == declared_by_transformers()


@pytest.mark.parametrize("family", QUICK, ids=[family.label for family in QUICK])
def test_a_family_does_what_its_row_says(family):
    assert row(family) in TABLE.splitlines()


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "mixtral", "deepseek_v32", "deepseek_v4"])
def test_a_sampler_speaks_for_the_old_policy_only_where_decoding_is_a_whole_forward(name):
    """Attention that picks or compresses what is cached has another distribution than in a whole forward."""
    model = next(family for family in FAMILIES if family.name == name).build()
    examples = [Example("", prompt, "") for prompt in ("a", "abcdefgh=", "bc=")]
    rollouts = Hf(max_new_tokens=8).sample(model, character_tokenizer(), Reverse(), examples, 3, 0)
    with torch.no_grad():
        logprobs_BT, _ = response_logprobs(model, rollouts)
    same = torch.allclose(logprobs_BT, rollouts.rollout_logprobs_BT, atol=1e-4)
    assert same == (name not in ("deepseek_v32", "deepseek_v4"))
    assert samples_exactly(SimpleNamespace(engine=Hf()), SimpleNamespace(model=model)) == same


def test_a_looped_model_has_an_entry_for_each_run_and_keeps_them_apart():
    looped = case("inkling2_loop")
    gates = [f"model.layers.{layer}.mlp.gate" for layer in (0, 1, 2, 1, 2)]
    assert looped.trace.layer_names == (*gates[:3], gates[3] + "@2", gates[4] + "@2")
    model, model_of_fewer_loops = looped.model, looped.model
    model_of_fewer_loops.config.loop_num_passes = 1
    with (
        pytest.raises(RoutingError, match=r"routing for .*layers\.1\.mlp\.gate@2"),
        replay(model_of_fewer_loops, looped.trace),
    ):
        run(model_of_fewer_loops, looped.ids, looped.mask)
    with record(model_of_fewer_loops) as recorder:
        run(model_of_fewer_loops, looped.ids, looped.mask)
    with pytest.raises(RoutingError, match="@2 ran, but the trace has no routing"), replay(model, recorder.trace):
        run(model, looped.ids, looped.mask)


def test_routing_of_images_has_no_position_and_is_refused():
    text = case("ernie4_5_vl_moe")
    kinds = torch.zeros_like(text.ids)
    kinds[:, 3:5] = 1  # image tokens go to another router
    with (
        pytest.raises(RoutingError, match=r"text_moe\.gate .*routed 28 tokens in a forward of 4 x 9"),
        record(text.model) as r,
    ):
        r.model(input_ids=text.ids, moe_mm_token_type_ids=kinds)
    with pytest.raises(RoutingError, match="pass text only"), replay(text.model, text.trace) as r:
        r.model(input_ids=text.ids, moe_mm_token_type_ids=kinds)


@pytest.mark.parametrize(("field", "message"), [("top_k", "1 of 8 and 2 of 8"), ("num_experts", "2 of 1 and 2 of 8")])
def test_layers_that_choose_differently_are_refused(field, message):
    model = tiny()
    setattr(model.model.layers[1].mlp.gate, field, 1)
    with pytest.raises(RoutingError, match=f"Qwen3MoeForCausalLM chooses {message} experts in different layers"):
        find_routers(model)


def test_a_cache_that_the_model_made_itself_continues_the_pass():
    model, (ids, mask) = tiny(), tokens(2, 7, padded=False)
    with record(model) as recorder, torch.no_grad():
        output = model(input_ids=ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
        model(input_ids=ids[:, 6:], attention_mask=mask, cache=output.cache)
    trace = recorder.trace
    assert trace.valid_BS.all()
    assert trace.valid_BS.shape == (2, 7)
    foreign = random_trace_like(trace)
    with replay(model, foreign), record(model) as executed, torch.no_grad():
        output = model(input_ids=ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
        model(input_ids=ids[:, 6:], attention_mask=mask, cache=output.cache)
    assert torch.equal(executed.trace.expert_ids_BSLK, foreign.expert_ids_BSLK)
