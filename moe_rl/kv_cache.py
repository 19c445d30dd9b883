"""A key-value cache that is written in place.

transformers' own grows by concatenation: each new token copies everything that came before it, of every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class InPlaceLayer(DynamicLayer):
    """One layer's keys and values of up to `columns` tokens: views of tensors that are made once."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns = columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.whole = [
                new.new_empty(*new.shape[:2], self.columns, new.shape[3]) for new in (key_states, value_states)
            ]
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        for whole, new in zip(self.whole, given, strict=True):
            whole[:, :, start:stop] = new
        self.keys, self.values = (whole[:, :, :stop] for whole in self.whole)
        return self.keys, self.values


def in_place_cache(model: PreTrainedModel, columns: int) -> DynamicCache | None:
    """An empty cache for sequences of up to `columns` tokens; None for a model that wants another kind of cache."""
    if not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [InPlaceLayer(columns) for _ in cache.layers]
    return cache
