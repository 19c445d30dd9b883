"""The cache that is written in place: what transformers' own cache gives, with less copying and less to read."""

import pytest
import torch
from models import FAMILIES, tiny, tokens

from moe_rl.engines import hf
from moe_rl.engines.hf import Hf
from moe_rl.kv_cache import InPlaceLayer, in_place_cache, read_prompts
from moe_rl.models.tokenizer import character_tokenizer
from moe_rl.tasks.base import Example
from moe_rl.tasks.reverse import Reverse

PLAIN = [family for family in (*FAMILIES, "dense") if family != "gpt_oss"]  # that one has sliding windows
EXAMPLES = [Example("", prompt, "") for prompt in ("a", "abcdefgh=", "bc=")]  # left padding, of one real token too


def sample(model, record_routing=False, completions=3):
    return Hf(max_new_tokens=5).sample(
        model, character_tokenizer(), Reverse(), EXAMPLES, completions, 0, record_routing
    )


def without_own_cache(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(hf, "in_place_cache", lambda *_: None)
        return sample(*args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_is_bit_for_bit_that_with_transformers_cache(family, monkeypatch):
    model = tiny(family)
    own, other = sample(model, True), without_own_cache(monkeypatch, model, True)
    for name in ("tokens_BS", "rollout_logprobs_BT"):
        assert torch.equal(getattr(own, name), getattr(other, name))
    assert torch.equal(own.routing.expert_ids_BSLK, other.routing.expert_ids_BSLK)


@pytest.mark.parametrize("family", PLAIN)
def test_prompts_that_are_read_once_change_nothing_but_the_rounding(family, monkeypatch):
    model = tiny(family)
    own, other = sample(model), without_own_cache(monkeypatch, model)
    assert torch.equal(own.tokens_BS, other.tokens_BS)
    torch.testing.assert_close(own.rollout_logprobs_BT, other.rollout_logprobs_BT, atol=1e-5, rtol=0)
    assert own.rollout_logprobs_BT.min() < -1


def test_each_prompt_is_read_once_and_each_completion_its_own_tokens():
    model, seen = tiny(), []
    model.register_forward_pre_hook(
        lambda m, a, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    width = len("abcdefgh=")
    for routing, completions, shapes in (
        (False, 3, [(3, width - 1)] + [(9, 1)] * 5),
        (True, 3, [(9, width)] + [(9, 1)] * 4),
        (False, 1, [(3, width)] + [(3, 1)] * 4),
    ):
        seen.clear()
        sample(model, routing, completions)
        assert seen == shapes


def test_rows_of_a_repeated_cache_do_not_share_memory():
    model = tiny()
    cache = in_place_cache(model, 12)
    ids, mask = tokens(2, 9)
    with torch.no_grad():
        read_prompts(model, ids, mask, 3, cache)
    layer = cache.layers[0]
    assert type(layer) is InPlaceLayer
    assert cache.get_seq_length() == 8
    assert layer.keys.shape[0] == 6
    assert torch.equal(layer.keys[0], layer.keys[2])
    layer.keys[0] += 1
    assert not torch.equal(layer.keys[0], layer.keys[2])


def test_a_model_with_another_kind_of_cache_keeps_it():
    assert in_place_cache(tiny("gpt_oss"), 10) is None
