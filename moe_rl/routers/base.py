"""The contract of a router variant, and its installation on a model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.models.families import RouterSite, find_routers, require_routers
from moe_rl.routing_trace import RoutingError
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

    def learn(self, old_scores_NE: Tensor, scores_NE: Tensor, router: Any) -> None:
        """What the router ranked for some tokens under the old policy, and ranks now; before `after_update`.

        Called for every micro-batch of a step's second and later updates, once a router, without gradient.
        """

    def count(self, expert_ids_NK: Tensor, router: Any) -> None:
        """What was chosen for the real tokens of a training forward, prompts included; before `after_update`."""

    def after_update(self, router: Any) -> None:
        """Called after every gradient update, once a router."""


NATIVE = Router()


def log_scores(scores_NE: Tensor) -> Tensor:
    """Log scores, up to a constant a token, fp32: families rank probabilities (0 to 1) or logits.

    Told apart token by token, for a token's choice must not depend on its batch.
    """
    scores = scores_NE.detach().float()
    outside = ((scores < 0) & ~scores.isneginf()) | (scores > 1)  # -inf: outside the token's expert groups
    return torch.where(outside.any(-1, keepdim=True), scores, scores.clamp(min=0).log())


def first_draw(router: Any, num_experts: int) -> Tensor:
    """Uniform random numbers in (0, 1), one an expert, and a stream of more of them in the router's own state.

    Each router has its own stream, a function of its weights at this moment: no global generator, nothing to resume.
    """
    weight = next(router.parameters()).detach()
    seed = int(weight.float().contiguous().view(torch.int32).sum()) & 0x7FFFFFFF
    router.register_buffer("draws", torch.tensor([seed, 0], device=weight.device))
    return _uniform(router, num_experts)


def next_draw(router: Any, num_experts: int, every: int) -> Tensor | None:
    """To be called after an update: fresh numbers after every `every`-th, None after the others.

    Numbers that stay between updates are the only randomness that lets sampling, old pass and training forward route
    alike at equal weights, without which the first update's ratios would not be 1.
    """
    router.draws[1] += 1
    return _uniform(router, num_experts) if int(router.draws[1]) % every == 0 else None


def _uniform(router: Any, num_experts: int) -> Tensor:
    seed, updates = (int(number) for number in router.draws)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + updates)
    return torch.rand(num_experts, generator=generator).clamp(1e-6, 1 - 1e-6).to(router.draws.device)


def changes_routing(variant: Router) -> bool:
    """Whether a variant chooses or weighs experts itself."""
    return type(variant).select is not Router.select or type(variant).gate is not Router.gate


def moves_by_itself(variant: Router) -> bool:
    """Whether a variant changes its own state after an update, without a gradient."""
    return type(variant).after_update is not Router.after_update


def learns(variant: Router) -> bool:
    """Whether a variant wants to see how scores change."""
    return type(variant).learn is not Router.learn


@contextlib.contextmanager
def counted(model: nn.Module, real_BS: Tensor) -> Iterator[None]:
    """Forwards in the block are training forwards of these tokens: variants count their choices, see `Router.count`.

    Backward belongs behind the block: activation checkpointing runs the routers again there.
    """
    sites = find_routers(model)
    try:
        for site in sites:
            vars(site.module)["real_N"] = real_BS.reshape(-1)
        yield
    finally:
        for site in sites:
            vars(site.module).pop("real_N", None)


def install(model: nn.Module, variant: Router) -> Callable[[], None]:
    """Let `variant` choose in every router of `model`, until the returned function takes it and its state away.

    A variant that overrides nothing costs nothing and is fine on a dense model. It acts on this very model: a deepcopy
    routes as the family does, until the variant is installed on it and `load_state_dict` gives it the state. On disk
    moe_rl.policy_folder keeps both. Raises RoutingError where a variant needs routing and the model is dense, or needs
    logits and the family's routers return none.
    """
    if not changes_routing(variant):
        return lambda: None
    kind = type(variant)
    chooses, weighs = kind.select is not Router.select, kind.gate is not Router.gate
    undo: list[Callable[[], None]] = []
    for site in require_routers(model):
        if weighs and not site.ids_in_output:
            raise RoutingError(f"{kind.__name__} sets the gates, which {type(site.module).__name__} does not expose")
        own = _tensors(site.module)
        variant.attach(site.module, site.num_experts, site.top_k)
        undo.extend(_install_on(site, variant, chooses, weighs))
        names = [name for name, tensor in _tensors(site.module).items() if own.get(name) is not tensor]
        vars(site.module)["attached"] = names
        undo.extend(partial(delattr, site.module, name) for name in names)
        undo.append(partial(vars(site.module).pop, "attached", None))

    def uninstall() -> None:
        while undo:
            undo.pop()()

    return uninstall


def attached(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that the installed variant added, by their names in the model's state dict."""
    state = model.state_dict()
    names = [f"{site.name}.{name}" for site in find_routers(model) for name in vars(site.module).get("attached", ())]
    return {name: state[name] for name in names}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _install_on(site: RouterSite, variant: Router, chooses: bool, weighs: bool) -> list[Callable[[], None]]:
    def choose(scores_NE: Tensor, live: Callable[[], Tensor]) -> Tensor:
        ranked: list[Tensor] | None = vars(site.module).get("ranked")  # see moe_rl.foresight.ranked_scores
        if ranked is not None:
            ranked.append(scores_NE.detach())
        ids_NK = variant.select(scores_NE, site.top_k, site.module)
        real_N: Tensor | None = vars(site.module).get("real_N")
        if real_N is not None:
            variant.count(ids_NK[real_N], site.module)
        return ids_NK

    def leave(selection: Selection | None, output: Any) -> Any:
        if not weighs:
            return None
        logits, gates, ids, *rest = output
        return (logits, variant.gate(logits, ids, site.module).to(gates.dtype), ids, *rest)

    return around(site, lambda: Selection(site, choose) if chooses else None, leave)
