# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. Add a router variant and see its drift
#
# A variant is a frozen dataclass with `select`, asked in place of the model's own top-k. Here is one from an empty
# page, measured against the model's own router: same start, same gradient steps, same tokens. As a file in
# `moe_rl/routers/` it would be an option of every sweep; outside the package `router._target_=my_lab.Grid` does.

# %%
import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from moe_rl.drift import compare
from moe_rl.models.build import Tiny
from moe_rl.policy import routing_of
from moe_rl.routers.base import Router, install
from moe_rl.routers.native import Native


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid(Router):
    """Log scores are rounded to a grid before they are ranked, so that near ties cannot flip; ties go to lower ids."""

    width: float = 0.2

    def select(self, scores_NE: Tensor, top_k: int, router: Any) -> Tensor:
        coarse_NE = (scores_NE.detach().log() / self.width).round()
        return coarse_NE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


# %% [markdown]
# ## The same steps with each variant
#
# The routers' weights get a spread that a trained model's have; at random weights all scores are nearly equal.

# %%
torch.set_num_threads(1)
start, _ = Tiny(layers=4, experts=16, top_k=2, initializer_range=0.1).build(seed=0)
tokens = torch.randint(5, 20, (16, 24), generator=torch.Generator().manual_seed(0))
mask = torch.ones_like(tokens, dtype=torch.bool)


def drift_of(variant: Router, lr: float) -> float:
    """Slot change by one update, mean over four."""
    model = copy.deepcopy(start).eval()
    install(model, variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    changes = []
    for _ in range(4):
        old = routing_of(model, tokens, mask)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        changes.append(compare(old, routing_of(model, tokens, mask)).slot_change)
    return sum(changes) / len(changes)


drifts = {}
for lr in (1e-5, 1e-4, 1e-3):
    for name, variant in {"native": Native(), "grid 0.2": Grid(), "grid 1": Grid(width=1.0)}.items():
        drifts[name, lr] = drift_of(variant, lr)
        print(f"lr {lr:.0e}  {name:9}  slot change by one update {drifts[name, lr]:.2%}")

# %% [markdown]
# Whether rounding lowers drift is an empirical matter: a score that crosses the edge of a bin may change places with
# several others at once. `python experiments/train.py -m router=native,binned seed=0,1,2,3,4` asks it in training.
