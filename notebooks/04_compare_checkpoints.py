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
# # 4. Compare two checkpoints
#
# How far does the routing of two checkpoints lie apart, on the same text? Two saved policies are compared here as
# `experiments/compare_checkpoints.py` does it: one model in memory at a time, each with its noise floor. Give `old` and
# `new` your own folders or hub ids.

# %%
import tempfile
from pathlib import Path

import pandas as pd
import torch

from moe_rl.comparison import Comparison, compare_checkpoints
from moe_rl.models.build import Tiny

torch.set_num_threads(1)
folder = Path(tempfile.mkdtemp())
model, tokenizer = Tiny(layers=2, experts=16, top_k=2, initializer_range=0.1).build(seed=0)
for name in ("old", "new"):
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    with torch.no_grad():  # what training would have done
        for parameter in model.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))

# %%
settings = Comparison(
    old=str(folder / "old"), new=str(folder / "new"), text="sort_digits", out=str(folder / "comparison"),
    dtype="float32", sequences=32, noise_sequences=4,
)  # fmt: skip
layers = compare_checkpoints(settings)
print(layers[["layer", "slot_change", "noise_slot_change", "set_change", "unrelated"]].to_string(index=False))

# %% [markdown]
# `slot_change` is the share of activated experts that differ, `noise_slot_change` the same for one checkpoint computed
# in another way (batch size, padding, decoding with a cache, another kernel), `unrelated` what two routers that have
# nothing in common would show. Figures and a tidy table of everything lie in the folder:

# %%
print(sorted(path.name for path in (folder / "comparison").iterdir()))
numbers = pd.read_parquet(folder / "comparison" / "numbers.parquet")
print(numbers["metric"].unique() if "metric" in numbers else numbers.columns.tolist())
