"""The optimizer: AdamW, its schedule, and which weights it trains."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from moe_rl.models.families import expert_parameters, router_parameters
from moe_rl.router_pressure import RouterPressure

TRAINS = {
    "all": "every weight",
    "no_router": "every weight but the routers' (frozen router)",
    "router": "the routers' weights alone",
    "experts": "the weights of the routed experts alone",
}
SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW and what surrounds it.

    lr: peak learning rate. warmup_updates: update u, from 0, is taken at (u + 1) / warmup_updates of it, so that the
    first one moves the weights; transformers' schedules begin at 0. schedule: constant, linear or cosine decay to 0
    after that, as transformers has them.
    max_grad_norm: gradients of the trained weights are scaled down to this norm; 0 leaves them.
    trains: one of TRAINS. The cold start trains everything whatever it says. Shared experts are no routed experts.
    router_lr: the routers' learning rate, as a multiple of lr.
    balance_loss, router_kl: coefficients of what is asked of the routers besides, see moe_rl.router_pressure.
    """

    lr: float = 2e-4
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_updates: int = 0
    trains: str = "all"
    router_lr: float = 1.0
    balance_loss: float = 0.0
    router_kl: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "router_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; set it above 0")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"optim.schedule is {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
        for name in ("weight_decay", "eps", "max_grad_norm", "warmup_updates", "balance_loss", "router_kl"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; set it to 0 or more")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; it lies in [0, 1)")
        if self.trains not in TRAINS:
            raise ValueError(f"optim.trains is {self.trains!r}; choose one of {', '.join(TRAINS)}")
        if self.router_lr != 1 and self.trains in ("no_router", "experts"):
            raise ValueError(
                f"optim.router_lr is {self.router_lr} and optim.trains={self.trains} trains no router; set it to 1"
            )

    @property
    def needs_routers(self) -> bool:
        """Whether the settings mean something for an MoE model only."""
        return self.trains != "all" or self.router_lr != 1 or self.pressure.on

    @property
    def pressure(self) -> RouterPressure:
        return RouterPressure(balance_loss=self.balance_loss, router_kl=self.router_kl)

    def build(self, model: nn.Module, total_updates: int) -> tuple[torch.optim.Optimizer, Any]:
        """(optimizer, schedule) for the weights that are trained; the others no longer require a gradient.

        Call it after the cold start. RoutingError where weights must be told apart and the model has no routers, or
        experts that cannot be found.
        """
        optimizer = torch.optim.AdamW(
            self._groups(model), self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay, fused=True
        )
        return optimizer, LambdaLR(optimizer, functools.partial(self.share_of_lr, total_updates))

    def share_of_lr(self, total_updates: int, update: int) -> float:
        """The learning rate of an update, from 0, as a share of the peak."""
        if update < self.warmup_updates:
            return (update + 1) / self.warmup_updates
        if self.schedule == "constant":
            return 1.0
        decay = max(1, total_updates - self.warmup_updates)
        if self.schedule == "linear":
            return max(0.0, (total_updates - update) / decay)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - self.warmup_updates) / decay)))

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        if self.trains == "all" and self.router_lr == 1:
            return [{"params": list(model.parameters())}]
        routers = set(router_parameters(model))
        chosen = set(expert_parameters(model)) if self.trains == "experts" else routers
        for parameter in model.parameters():
            if self.trains != "all" and (parameter in chosen) == (self.trains == "no_router"):
                parameter.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [parameter for parameter in trained if parameter not in routers], "lr": self.lr},
            {"params": [parameter for parameter in trained if parameter in routers], "lr": self.lr * self.router_lr},
        ]
        return [group for group in groups if group["params"]]
