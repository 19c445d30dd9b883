"""The contract of a router variant, and its installation on a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_rl.models.families import RouterSite, require_routers
from moe_rl.records import RoutingError
from moe_rl.selection import Selection, around


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """A router variant: how experts are chosen, and, if it says so, how they are weighted. This base changes nothing.

    Fields of a subclass are its hyper-parameters. `select` answers the model's own top-k call, so normalisation, scale
    and autograd stay the model's own code; replay forces its ids at the same place and works with every variant. The
    argument `router` is the router module.
    """

    def attach(self, router: Any, num_experts: int, top_k: int) -> None:
        """Add parameters or buffers that the variant needs to the router module: trained, saved and copied with it."""

    def select(self, scores_NE: Tensor, top_k: int, router: Any) -> Tensor:
        """Expert ids [N, K], int64, distinct in each row. scores_NE: what the model itself would rank."""
        return scores_NE.topk(top_k, dim=-1).indices

    def gate(self, logits_NE: Tensor, expert_ids_NK: Tensor, router: Any) -> Tensor:
        """Mixing weights [N, K] of the given experts, which may be replayed ones. Must carry gradient to the logits.

        Leave it alone, and the model computes its own.
        """
        raise RoutingError(f"{type(self).__name__} leaves the gates to the model")

    def after_update(self, router: Any) -> None:
        """Called after every gradient update, once a router."""


def changes_routing(variant: Router) -> bool:
    """Whether a variant chooses or weighs experts itself."""
    return type(variant).select is not Router.select or type(variant).gate is not Router.gate


def moves_by_itself(variant: Router) -> bool:
    """Whether a variant changes its own state after an update, without a gradient."""
    return type(variant).after_update is not Router.after_update


def install(model: nn.Module, variant: Router) -> Callable[[], None]:
    """Let `variant` choose in every router of `model`, until the returned function takes it and its state away.

    A variant that overrides nothing costs nothing and is fine on a dense model. Raises RoutingError where a variant
    needs routing and the model is dense, or needs logits and the family's routers return none.
    """
    if not changes_routing(variant):
        return lambda: None
    kind = type(variant)
    chooses, weighs = kind.select is not Router.select, kind.gate is not Router.gate
    undo: list[Callable[[], None]] = []
    for site in require_routers(model):
        if weighs and not site.ids_in_output:
            raise RoutingError(f"{kind.__name__} sets the gates, which {type(site.module).__name__} does not expose")
        own = set(site.module.state_dict())
        variant.attach(site.module, site.num_experts, site.top_k)
        undo.extend(_install_on(site, variant, chooses, weighs))
        undo.extend(partial(delattr, site.module, name) for name in set(site.module.state_dict()) - own)

    def uninstall() -> None:
        while undo:
            undo.pop()()

    return uninstall


def _install_on(site: RouterSite, variant: Router, chooses: bool, weighs: bool) -> list[Callable[[], None]]:
    def choose(scores_NE: Tensor, live: Callable[[], Tensor]) -> Tensor:
        return variant.select(scores_NE, site.top_k, site.module)

    def leave(selection: Selection | None, output: Any) -> Any:
        if not weighs:
            return None
        logits, gates, ids, *rest = output
        return (logits, variant.gate(logits, ids, site.module).to(gates.dtype), ids, *rest)

    return around(site, lambda: Selection(site, choose) if chooses else None, leave)
