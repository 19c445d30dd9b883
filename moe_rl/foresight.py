"""Router variants that learn from how a router's scores change: what they are shown, and how well they foresaw it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from moe_rl.models.families import require_routers
from moe_rl.routers.base import Router


@contextlib.contextmanager
def ranked_scores(model: nn.Module) -> Iterator[list[Tensor]]:
    """What the installed variant was asked to choose by, [N, E] of every run of a router, in order; no gradient.

    Backward belongs behind the block: activation checkpointing runs the routers again there.
    """
    seen: list[Tensor] = []
    sites = require_routers(model)
    try:
        for site in sites:
            site.module.ranked = seen  # type: ignore[assignment]  # see moe_rl.routers.base.install
        yield seen
    finally:
        for site in sites:
            vars(site.module).pop("ranked", None)


@torch.no_grad()
def teach(
    model: nn.Module, variant: Router, old: Sequence[Tensor], new: Sequence[Tensor], real_BS: Tensor
) -> dict[str, float]:
    """Let the variant learn, at every router, from the scores of the same tokens under the old policy and now.

    Returns what it foresaw, before it learned from these tokens: the share of expert slots, over real tokens and
    routers, of its choice under the old scores that are in the top-k of the present ones (`foreseen`), and the same of
    the top-k of the old scores (`foreseen_by_native`).
    """
    sites, real_N = require_routers(model), real_BS.reshape(-1)
    if not len(old) == len(new) == len(sites):
        raise ValueError(
            f"{len(sites)} routers ranked {len(old)} and {len(new)} times; a router that learns runs once a forward"
        )
    shares = []
    for site, old_NE, new_NE in zip(sites, old, new, strict=True):
        old_NE, new_NE = old_NE[real_N], new_NE[real_N]
        now_NK = new_NE.topk(site.top_k, dim=-1).indices
        choices = variant.select(old_NE, site.top_k, site.module), old_NE.topk(site.top_k, dim=-1).indices
        shares.append([(ids[:, :, None] == now_NK[:, None, :]).any(-1).float().mean() for ids in choices])
        variant.learn(old_NE, new_NE, site.module)
    foreseen, by_native = torch.tensor(shares).mean(0).tolist()
    return {"foreseen": foreseen, "foreseen_by_native": by_native}
