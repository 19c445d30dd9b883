"""A trained policy on disk: transformers' own files, and beside them the router variant that it was trained with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from hydra.utils import instantiate
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from moe_rl.routers.base import Router, attached, changes_routing, install

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VARIANT = "router_variant.safetensors"
CARD = """This policy was trained with the router variant `{variant}`.
`from_pretrained` alone routes it as the model family does, which is another policy. After loading:

    from moe_rl.policy_folder import restore_variant
    restore_variant(model, "<this folder>")
"""


def save_policy(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, variant: Router) -> None:
    """Write model and tokenizer; for a variant that changes routing also its settings and state, and a README."""
    state = attached(model)
    stock = {name: tensor for name, tensor in model.state_dict().items() if name not in state}
    model.save_pretrained(folder, state_dict=stock)
    tokenizer.save_pretrained(folder)
    if changes_routing(variant):
        kind = type(variant)
        settings = {"_target_": f"{kind.__module__}.{kind.__qualname__}", **dataclasses.asdict(variant)}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(tensors, folder / VARIANT, {"router": json.dumps(settings)})
        (folder / "README.md").write_text(CARD.format(variant=variant), encoding="utf-8")


def saved_variant(folder: str | Path) -> Router | None:
    """The variant that a policy's folder was saved with; None where there is none, or for a hub id.

    ValueError for a damaged file, and for a variant that cannot be imported or made here.
    """
    path = Path(folder).expanduser() / VARIANT
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            variant = instantiate(json.loads(file.metadata()["router"]))
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); save the policy again") from error
    except Exception as error:  # Hydra's own kinds: the class is not importable here, or takes other settings
        raise ValueError(f"cannot make the router variant of {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(variant, Router):
        raise ValueError(f"{path} names {type(variant).__name__}, which is no router variant")
    return variant


def restore_variant(model: nn.Module, folder: str | Path) -> None:
    """Install the variant that the policy in `folder` was saved with, in the state it had then, if it had one.

    model: loaded from that folder, without a variant. ValueError as in `saved_variant`, and for a file of another
    model.
    """
    variant = saved_variant(folder)
    if variant is not None:
        install_on(model, variant, folder)


def install_on(model: nn.Module, variant: Router, folder: str | Path) -> None:
    """Install `variant` on a model loaded from `folder`, in the state that it was saved in, if it was.

    ValueError where the folder's policy was trained with another variant, and as in `restore_variant`.
    """
    saved, path = saved_variant(folder), Path(folder).expanduser() / VARIANT
    if saved is not None and saved != variant:
        raise ValueError(f"{path.parent} was trained with {saved}, not {variant}; choose that, or delete {path}")
    install(model, variant)
    if saved is None:
        return
    state = attached(model)
    with safe_open(path, "pt") as file, torch.no_grad():
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if {name: x.shape for name, x in tensors.items()} != {name: x.shape for name, x in state.items()}:
            raise ValueError(f"{path} has {len(tensors)} tensors of another model's routers, this one {len(state)}")
        for name, tensor in state.items():
            tensor.copy_(tensors[name])
