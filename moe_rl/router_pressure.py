"""What can be asked of the routers besides reward: an even load, and staying near the old policy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.models.families import require_routers
from moe_rl.routing_trace import RoutingError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterPressure:
    """Two losses on the router logits of training forwards, added to the policy loss with these coefficients.

        p_ne = softmax(router logits)      f_e = share of the tokens' K choices that fell on expert e, sum_e f_e = 1
        balance_loss = mean_l E sum_e f_e mean_n p_ne              1 when even, up to E / K when K experts get all
        router_kl    = mean_l mean_n sum_e p_old log(p_old / p_ne)                        nats; 0 on the first update

    Over real tokens only, prompts included. f_e counts the experts that were executed, the replayed ones under replay,
    and has no gradient. The catch: f_e is a statistic of a micro-batch, so with balance_loss micro-batches change
    results; parts are weighted by their tokens. transformers' own function gives K times this value.
    Sources: balance_loss: Switch Transformers, arXiv 2101.03961 eq. 4-6, over K choices as in OLMoE, arXiv 2409.02060
    section 2. router_kl: the forward KL from the old policy's routers, as a loss.
    """

    balance_loss: float = 0.0
    router_kl: float = 0.0

    @property
    def on(self) -> bool:
        return self.balance_loss > 0 or self.router_kl > 0

    def __call__(
        self, seen: list[tuple[Tensor, Tensor]], real_BS: Tensor, old_logits_BSLE: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """(loss of a micro-batch, the two values without coefficients, those that are on). seen: see `router_outputs`.

        old_logits_BSLE: of the same tokens, needed for router_kl.
        """
        real_N = real_BS.reshape(-1)
        wrong = {len(logits) for logits, _ in seen} - {len(real_N)}
        if wrong or not seen:
            raise RoutingError(f"{len(seen)} routers saw {wrong or 'no'} tokens where the batch has {len(real_N)}")
        logits = [logits_NE[real_N].float() for logits_NE, _ in seen]
        values: dict[str, Tensor] = {}
        if self.balance_loss:
            chosen = [ids_NK.reshape(len(real_N), -1)[real_N] for _, ids_NK in seen]
            pairs = zip(logits, chosen, strict=True)
            values["balance_loss"] = torch.stack([balance(logits_NE, ids_NK) for logits_NE, ids_NK in pairs]).mean()
        if self.router_kl:
            if old_logits_BSLE is None or old_logits_BSLE.shape[2] != len(seen):
                raise RoutingError("optim.router_kl needs the router logits of the old pass; call old_pass with them")
            old_LNE = old_logits_BSLE[real_BS].float().transpose(0, 1)
            pairs = zip(old_LNE, logits, strict=True)
            values["router_kl"] = torch.stack([kl(old_NE, new_NE) for old_NE, new_NE in pairs]).mean()
        loss = torch.stack([getattr(self, name) * value for name, value in values.items()]).sum()
        return loss, {name: float(value.detach()) for name, value in values.items()}


NO_PRESSURE = RouterPressure()


def balance(logits_NE: Tensor, ids_NK: Tensor) -> Tensor:
    """E sum_e f_e mean_n p_ne of one layer, a scalar; 1 for an even load."""
    E = logits_NE.shape[1]
    f_E = torch.bincount(ids_NK.flatten(), minlength=E) / ids_NK.numel()
    return E * (f_E * logits_NE.softmax(-1).mean(0)).sum()


def kl(old_NE: Tensor, new_NE: Tensor) -> Tensor:
    """mean_n KL(softmax(old) || softmax(new)) of one layer's router logits, a scalar, nats."""
    old, new = old_NE.log_softmax(-1), new_NE.log_softmax(-1)
    return (old.exp() * (old - new)).sum(-1).mean()


@contextlib.contextmanager
def router_outputs(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """(logits_NE with gradient, ids_NK) of every run of a router in the block, in order. Backward belongs behind it:
    activation checkpointing runs the routers again there.

    RoutingError for a dense model and for families whose routers return no logits.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    undo = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if module in routers:
            seen.append((output[0].reshape(-1, output[0].shape[-1]), output[2]))

    sites = require_routers(model)
    routers = {site.module for site in sites}
    for site in sites:
        if not site.ids_in_output:
            raise RoutingError(f"{type(site.module).__name__} returns no router logits; set its coefficients to 0")
    try:
        undo = [site.module.register_forward_hook(keep).remove for site in sites]
        yield seen
    finally:
        for remove in undo:
            remove()
