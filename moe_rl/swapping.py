"""A model that computes with other weights for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor


@contextlib.contextmanager
def swapped(tensors: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Every tensor, of a model's parameters or buffers, has the data that `change(name, tensor)` returns inside the
    block, and its own behind it: the very same tensors, so that optimizers and hooks do not notice."""
    own = {name: tensor.data for name, tensor in tensors.items()}
    try:
        for name, tensor in tensors.items():
            tensor.data = change(name, tensor)
        yield
    finally:
        for name, tensor in tensors.items():
            tensor.data = own[name]
