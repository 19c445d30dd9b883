"""Small stock models for tests."""

from functools import cache

import torch

from moe_rl.models.build import Tiny

torch.set_num_threads(1)
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")


def tiny(family: str = "qwen3_moe", seed: int = 0, **settings):
    """A fresh model with random weights, spread enough for tokens to choose different experts."""
    small = {"layers": 3, "hidden_size": 32, "heads": 4, "experts": 8, "top_k": 2, "expert_size": 16}
    model, _ = Tiny(family=family, **(small | {"initializer_range": 0.2} | settings)).build(seed)
    return model


@cache
def tokens(batch: int = 4, width: int = 9, padded: bool = True):
    """(input_ids, attention_mask): random tokens, left-padded by 0, 1, 2, ... columns."""
    generator = torch.Generator().manual_seed(batch * 100 + width)
    ids = torch.randint(5, 40, (batch, width), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(batch):
            mask[row, : min(row, width - 2)] = 0
    return ids, mask


def random_trace_like(trace, seed=1):
    """Other distinct experts for every token and layer."""
    from moe_rl import RoutingTrace

    generator = torch.Generator().manual_seed(seed)
    shape = (*trace.expert_ids_BSLK.shape[:3], trace.num_experts)
    ids = torch.rand(shape, generator=generator).topk(trace.top_k, -1).indices
    return RoutingTrace.from_ids(ids, trace.valid_BS, trace.layer_names, trace.num_experts)


def sets_differ(one, other):
    """[B, S, L]: whether the expert sets differ, order apart."""
    return (one.expert_ids_BSLK.sort(-1).values != other.expert_ids_BSLK.sort(-1).values).any(-1)
