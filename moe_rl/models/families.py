"""Where a transformers model routes: its router modules, found through the model's own declaration.

A model class declares which module emits router logits; every instance of it below the model that is actually
forwarded is a router. Routers choose with `torch.topk` over the experts, so one seam
(`moe_rl.selection`) serves nearly all families; those that it cannot serve are refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn

from moe_rl.routing_trace import RoutingError

# Router class -> why recording or replay would be wrong.
REFUSED = {
    "PhimoeTopKRouter": "it picks experts with two masked maxima and samples them in training, not with one top-k",
    "DogeCDMoE": "its experts are product keys whose routing mixes tokens, so a token's choice is not its own",
    "SwitchTransformersTop1Router": "it is an encoder-decoder router with capacity limits and one-hot masks",
    "NllbMoeTop2Router": "it is an encoder-decoder router with capacity limits and one-hot masks",
}
# Router class whose output does not hold (logits, gates, ids): the ids are taken from its top-k call instead.
IDS_ONLY_IN_SELECTION = {"JetMoeTopKGating", "Llama4Router", "DbrxRouter", "ZayaRouter"}
# Declared class -> path from it to the module whose forward makes the choice (".." is its parent block).
CHOSEN_BY = {"DbrxRouter": "..", "Ernie4_5_VLMoeMoeBlock": "text_moe.gate"}
# Router class that ranks scores of shape [B, T, E], not [N, E].
RANKS_SEQUENCES = {"ZayaRouter"}

_NUM_EXPERTS = ("num_router_classes", "n_routed_experts_total", "n_routed_experts", "num_experts", "num_local_experts")
_TOP_K = ("top_k", "top_k_experts", "num_experts_per_tok", "moe_k")


@dataclasses.dataclass(frozen=True)
class RouterSite:
    """One router: its path, the module whose forward makes the choice, E and K.

    ids_in_output: its output is (logits, gates, ids, ...). scores_dim: dimensions of the scores that it ranks.
    """

    name: str
    module: nn.Module
    num_experts: int
    top_k: int
    ids_in_output: bool
    scores_dim: int = 2

    def entry(self, turn: int) -> str:
        """The name of its `turn`-th run in one forward, from 0: looped models run the same layer several times."""
        return self.name if turn == 0 else f"{self.name}@{turn + 1}"


def find_routers(model: nn.Module) -> list[RouterSite]:
    """The routers below `model`, in module order; [] for a dense model. RoutingError for a refused family."""
    modules = dict(model.named_modules())
    classes = _router_classes(modules.values())
    if not classes:
        return []
    sites = []
    for name, module in modules.items():
        if not isinstance(module, classes):
            continue
        kind = type(module).__name__
        if kind in REFUSED:
            raise RoutingError(
                f"{type(model).__name__}: routing of {kind} cannot be recorded or replayed: {REFUSED[kind]}"
            )
        if kind in CHOSEN_BY:
            path = CHOSEN_BY[kind]
            name = name.rpartition(".")[0] if path == ".." else f"{name}.{path}"
            module = modules[name]
        num_experts = _find_int(module, _NUM_EXPERTS) or _find_int(getattr(module, "experts", None), _NUM_EXPERTS)
        top_k = _find_int(module, _TOP_K)
        if num_experts is None or top_k is None:
            raise RoutingError(
                f"{name} ({kind}) does not say how many experts it has and chooses; "
                "this family needs an entry in moe_rl/models/families.py"
            )
        dim = 3 if kind in RANKS_SEQUENCES else 2
        sites.append(RouterSite(name, module, num_experts, top_k, kind not in IDS_ONLY_IN_SELECTION, dim))
    sizes = sorted({(site.top_k, site.num_experts) for site in sites})
    if len(sizes) > 1:
        raise RoutingError(
            f"{type(model).__name__} chooses {' and '.join(f'{k} of {e}' for k, e in sizes)} experts in different "
            "layers, which a trace cannot hold; give all MoE layers the same numbers"
        )
    return sites


def require_routers(model: nn.Module) -> list[RouterSite]:
    """`find_routers`, or RoutingError for a dense model."""
    sites = find_routers(model)
    if not sites:
        raise RoutingError(
            f"{type(model).__name__} has no MoE layers, so there is no routing to record or replay; "
            "train it with arm.replay=none"
        )
    return sites


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the routers, those that a router variant attached included. RoutingError for a dense model."""
    found = []
    for site in require_routers(model):
        inside = getattr(site.module, "experts", None)  # where the block itself chooses
        experts = set(inside.parameters()) if isinstance(inside, nn.Module) else set()
        found += [parameter for parameter in site.module.parameters() if parameter not in experts]
    return found


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The routed experts of each router's block, shared experts apart. RoutingError where a block has none."""
    found = []
    for site in require_routers(model):
        block = model.get_submodule(site.name.rpartition(".")[0])
        experts = getattr(site.module, "experts", getattr(block, "experts", None))
        if not isinstance(experts, nn.Module) or not any(True for _ in experts.parameters()):
            raise RoutingError(
                f"the experts of {site.name} ({type(model).__name__}) cannot be found: neither it nor its block has "
                "a module named experts"
            )
        found.append(experts)
    return found


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the routed experts; see `expert_modules`."""
    return [parameter for module in expert_modules(model) for parameter in module.parameters()]


def _router_classes(modules: Iterable[nn.Module]) -> tuple[type, ...]:
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, OutputRecorder

    classes: list[type] = []
    for module in modules:
        if isinstance(module, PreTrainedModel):
            declared = _CAN_RECORD_REGISTRY.get(module).get("router_logits")
            for entry in declared if isinstance(declared, list) else [declared]:
                target = entry.target_class if isinstance(entry, OutputRecorder) else entry
                if isinstance(target, type) and target not in classes:
                    classes.append(target)
    return tuple(classes)


def _find_int(module: Any, names: tuple[str, ...]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None
