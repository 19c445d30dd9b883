"""A key-value cache that is written in place.

transformers' own grows by concatenation: each new token copies everything that came before it, of every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moe_rl.policy import positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class InPlaceLayer(DynamicLayer):
    """One layer's keys and values of up to `columns` tokens: views of tensors that are made once."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns = columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.whole = [part.new_empty(*part.shape[:2], self.columns, part.shape[3]) for part in new]
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        for whole, part in zip(self.whole, new, strict=True):
            whole[:, :, start:stop] = part
        return self._show(stop)

    def _show(self, stop: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (whole[:, :, :stop] for whole in self.whole)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.whole = [whole.repeat_interleave(repeats, 0) for whole in self.whole]
        self._show(self.get_seq_length())


def in_place_cache(model: PreTrainedModel, columns: int) -> DynamicCache | None:
    """An empty cache for sequences of up to `columns` tokens; None for a model that wants another kind of cache."""
    if not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [InPlaceLayer(columns) for _ in cache.layers]
    return cache


def decodes_as_it_reads(model: PreTrainedModel) -> bool:
    """Whether token by token, with a cache, the model computes what it does in one forward, up to rounding.

    Known of layers that keep keys and values. Not so where attention picks a few of the cached tokens (DeepSeek-V3.2)
    or compresses them (DeepSeek-V4): there the two differ by whole nats.
    """
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    return model._supports_default_dynamic_cache() and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def read_prompts(
    model: PreTrainedModel, tokens_PS: Tensor, attention_PS: Tensor, completions: int, cache: DynamicCache
) -> None:
    """Fill an empty cache with all but the last token of P prompts, each read once for all its completions."""
    some_PS = attention_PS[:, :-1]
    model(
        input_ids=tokens_PS[:, :-1],
        attention_mask=some_PS,
        position_ids=positions(some_PS),
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    cache.batch_repeat_interleave(completions)
