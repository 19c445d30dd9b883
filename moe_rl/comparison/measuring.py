"""The routing of one checkpoint on given sequences, and its noise floor; the model is gone afterwards."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_rl.comparison.settings import Comparison, ComparisonError
from moe_rl.drift.noise_floor import noise_floor
from moe_rl.drift.routing_metrics import router_entropy
from moe_rl.models.build import Checkpoint
from moe_rl.models.families import find_routers
from moe_rl.policy import routing_of
from moe_rl.policy_folder import restore_variant
from moe_rl.traces import TraceHeader, TraceWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(name: str, checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The tokenizer alone: what is missing or does not fit shows before any weights are read."""
    from transformers import AutoTokenizer

    path = Path(checkpoint.path).expanduser()
    if not path.is_dir() and (checkpoint.path.startswith(("/", ".", "~")) or checkpoint.path.count("/") != 1):
        raise ComparisonError(f"{name}: there is no folder {checkpoint.path!r}; give a checkpoint's folder or a hub id")
    source = str(path) if path.is_dir() else checkpoint.path
    try:
        return AutoTokenizer.from_pretrained(source, revision=checkpoint.revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ComparisonError(f"{name}: cannot load the tokenizer of {checkpoint.path!r}: {reason}") from error


def measure(
    name: str, settings: Comparison, sequences: list[list[int]], path: Path, reference: TraceHeader | None
) -> tuple[list[dict[str, Any]], Tensor | None]:
    """Write the routing of `old` or `new` on all sequences to `path`.

    Returns rows of `noise_floor`, empty where there is a reference (what the other checkpoint's file says), and the
    routers' entropy [L], nats, where asked for. A policy that a run kept routes by the variant it was trained with.
    ComparisonError for a dense model, one of another architecture, and texts that are too long for it.
    """
    try:
        checkpoint = settings.checkpoint(name)
        model, _ = checkpoint.build(seed=0)
        restore_variant(model, checkpoint.path)
    except ValueError as error:
        raise ComparisonError(f"{name}: {str(error).replace('model.path', name)}") from error
    try:
        header = describe(name, model)
        if reference is not None:
            require_same_architecture(reference, header)
        longest, limit = max(map(len, sequences)), getattr(model.config.get_text_config(), "max_position_embeddings", 0)
        if limit and longest > limit:
            raise ComparisonError(f"{name} was made for {limit} tokens, a text has {longest}; set max_tokens={limit}")
        model.to(settings.device)
        entropy_L = torch.zeros(len(header.layer_names), dtype=torch.float64)
        with (
            TraceWriter(path, header.layer_names, header.num_experts, header.top_k, header.model_class) as writer,
            torch.no_grad(),
        ):
            for first in range(0, len(sequences), settings.batch_size):
                tokens_BS, attention_BS = left_padded(sequences[first : first + settings.batch_size], settings.device)
                trace = routing_of(model, tokens_BS, attention_BS, name, router_logits=settings.router_logits)
                numbers = range(first, first + len(tokens_BS))
                writer.add(trace, attention_BS, step=0, sequences=numbers, tokens_BS=tokens_BS)
                if settings.router_logits:
                    logits_NLE = trace.extras["router_logits"][trace.valid_BS]
                    entropy_L += router_entropy(logits_NLE).cpu() * len(logits_NLE)
        some = left_padded(sequences[: settings.noise_sequences], settings.device)
        noise = noise_floor(model, *some) if reference is None else []
        return noise, entropy_L / sum(map(len, sequences)) if settings.router_logits else None
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def describe(name: str, model: PreTrainedModel) -> TraceHeader:
    """The model's routers, as a trace file names them. ComparisonError for a dense model."""
    sites = find_routers(model)
    if not sites:
        raise ComparisonError(f"{name}: {type(model).__name__} is dense, it routes nothing; compare MoE checkpoints")
    experts = max(site.num_experts for site in sites)
    return TraceHeader(tuple(site.name for site in sites), experts, sites[0].top_k, "", type(model).__name__)


def require_same_architecture(old: TraceHeader, new: TraceHeader) -> None:
    """ComparisonError unless both have the same class, layers, K and E: their experts would not be the same things."""
    told = [
        f"{h.model_class}: {len(h.layer_names)} MoE layers from {h.layer_names[0]}, K = {h.top_k}, E = {h.num_experts}"
        for h in (old, new)
    ]
    if told[0] != told[1] or old.layer_names != new.layer_names:
        raise ComparisonError(f"old is {told[0]}, new is {told[1]}; compare checkpoints of one architecture")


def left_padded(sequences: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """(tokens_BS, attention_BS); padding is token 0, which is never looked at."""
    width = max(map(len, sequences))
    tokens_BS = torch.tensor([[0] * (width - len(s)) + s for s in sequences], device=device)
    attention_BS = torch.tensor([[False] * (width - len(s)) + [True] * len(s) for s in sequences], device=device)
    return tokens_BS, attention_BS
