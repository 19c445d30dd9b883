"""A sampler that computes less exactly than the trainer: the same model in lower precision, or with noisy routers.

Serving engines differ from trainers in number formats and kernels. Here that gap is made on purpose, on the very model
that is trained, for the length of a with-block: a copy would lose its router variant.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe_rl.models.families import expert_modules, find_routers, require_routers, router_parameters
from moe_rl.routing_trace import RoutingError
from moe_rl.selection import Selection, around
from moe_rl.swapping import swapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"same": None, "bfloat16": torch.bfloat16}
E4M3_MAX = 448.0


@contextlib.contextmanager
def emulated(
    model: PreTrainedModel, *, dtype: str = "same", fp8: bool = False, router_noise: float = 0.0, seed: int = 0
) -> Iterator[None]:
    """Change how `model` computes inside the block; afterwards, also after an error, its weights are the same tensors.

    dtype: one of DTYPES; weights are cast, and with them the arithmetic. What the family keeps in fp32 under bfloat16
    (transformers' _keep_in_fp32_modules_strict) stays, and so do buffers. fp8: see `round_to_fp8`; the arithmetic stays
    that of the dtype. router_noise: standard deviation of the Gaussian noise that is added to the scores that a router
    ranks, of `seed` alone: the choice changes, the gates of the chosen do not, and a router variant sees noisy scores.
    Most families rank probabilities, near 1/E each, and a tenth of that is already a lot; GPT-OSS ranks logits.

    RoutingError for noise on a dense model and for experts whose layout is unknown.
    """
    weights = dict(model.named_parameters())
    with contextlib.ExitStack() as stack:
        if fp8:
            dims = fp8_dims(model)
            stack.enter_context(
                swapped(weights, lambda _, own: round_to_fp8(own, dims[own]) if own in dims else own.data)
            )
        target = DTYPES[dtype]
        if target is not None:
            kept = re.compile("|".join(p.replace("*", ".*") for p in model._keep_in_fp32_modules_strict or ()) or "$^")

            def cast(name: str, weight: Tensor) -> Tensor:
                return weight.data if kept.search(name) or not weight.is_floating_point() else weight.data.to(target)

            stack.enter_context(swapped(weights, cast))
        if router_noise:
            stack.enter_context(noisy_routers(model, router_noise, seed))
        yield


def fp8_dims(model: PreTrainedModel) -> dict[Tensor, int]:
    """The weights that an fp8 engine rounds, each with its input dimension, over which a scale is shared.

    Those of linear layers and the matrices of routed experts. Left alone are routers, norms, biases, embeddings and the
    output head, as engines leave them. RoutingError where the experts' matrices or their layout are unknown.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    alone = {weight for module in ends if module is not None for weight in module.parameters()}
    dims: dict[Tensor, int] = {}
    if find_routers(model):
        alone |= set(router_parameters(model))
        for experts in expert_modules(model):
            matrices = [weight for weight in experts.parameters() if weight.dim() == 3]
            transposed = getattr(experts, "is_transposed", None)
            if matrices and transposed is None:
                raise RoutingError(
                    f"{type(experts).__name__} does not say which dimension of its matrices is the input; "
                    "set engine.fp8_emulated=false"
                )
            if not matrices and not any(isinstance(module, nn.Linear) for module in experts.modules()):
                raise RoutingError(f"{type(experts).__name__} has no matrices to round; set engine.fp8_emulated=false")
            dims |= dict.fromkeys(matrices, 1 if transposed else 2)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    dims |= dict.fromkeys((weight for module in linear for weight in module.parameters() if weight.dim() == 2), 1)
    return {weight: dim for weight, dim in dims.items() if weight not in alone}


def round_to_fp8(weight: Tensor, dim: int) -> Tensor:
    """The nearest weights of the form scale x e4m3, one scale an output channel, which maps its largest to 448.

    dim: the input dimension, over which a channel runs. Same shape and dtype; a channel of zeros stays one.
    """
    data = weight.detach().float()
    scale = data.abs().amax(dim, keepdim=True).clamp(min=1e-30) / E4M3_MAX
    return ((data / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


@contextlib.contextmanager
def noisy_routers(model: nn.Module, deviation: float, seed: int) -> Iterator[None]:
    """Add Gaussian noise to the scores that every router of `model` ranks, drawn from a generator of its own."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    undo: list[Callable[[], None]] = []

    def add_noise(site_dim: int, top_k: int) -> Callable[[Tensor, Callable[[], Tensor]], Tensor]:
        def choose(scores_NE: Tensor, live: Callable[[], Tensor]) -> Tensor:
            noise_NE = torch.randn(scores_NE.shape, generator=generator, device=scores_NE.device)
            noisy_NE = scores_NE.detach() + deviation * noise_NE
            # Asked in the router's own shape, so that a variant that is installed answers.
            asked = noisy_NE.view(*(1,) * (site_dim - 2), *noisy_NE.shape)
            return torch.topk(asked, top_k, dim=-1).indices.reshape(-1, top_k)

        return choose

    try:
        for site in require_routers(model):
            choose = add_noise(site.scores_dim, site.top_k)
            undo.extend(around(site, functools.partial(Selection, site, choose), lambda *_: None))
        yield
    finally:
        while undo:
            undo.pop()()
