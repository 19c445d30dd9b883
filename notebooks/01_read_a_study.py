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
# # 1. Read a study
#
# A study on disk is four tables. This tour reads a committed one, in which only the learning rate varies, and asks what
# the token ratios of GRPO grow by: experts that changed, or weights that changed. Nothing is trained here.

# %%
from pathlib import Path

import numpy as np

from moe_rl import claims, stats
from moe_rl.store import LEGEND, read_study
from moe_rl.summary import summary_table

RESULTS = next(p for p in (Path("experiments/results"), Path("../experiments/results")) if p.exists())
study = read_study(RESULTS / "drift_vs_lr")
print(study.runs[["arm", "knobs", "seed", "state"]].head())
for column in ("flip_rms", "weight_rms", "slot_change"):
    print(f"{column}: {LEGEND['drift'][column]}")

# %% [markdown]
# ## One row per learning rate
#
# `summary_table` averages over finished runs only, and says how many those are. Intervals are 95 % t intervals over
# seeds; from five seeds on, arms may be said to differ.

# %%
table = summary_table(study)
print(table[["knobs", "seeds", "finished", "final_reward", "slot_change", "noise_floor"]].to_string(index=False))

# %% [markdown]
# ## Flips against weights
#
# log w = flip term + weight term, on the same tokens: what the new experts do to the likelihood, and what the new
# weights do through the old experts. The rows with `reference == "old"` compare with the policy that sampled.

# %%
drift = study.drift[(study.drift["tokens"] == "rollout") & (study.drift["reference"] == "old")].copy()
drift["lr"] = [float(knobs.partition("=")[2]) for knobs in drift["knobs"]]
per_run = drift.groupby(["lr", "seed"])[["flip_rms", "weight_rms"]].agg(lambda x: float(np.sqrt(np.mean(x**2))))
share = (per_run["flip_rms"] / per_run["weight_rms"]).groupby("lr")
for lr, ratios in share:
    print(f"lr {lr:.0e}: flip / weight = {stats.mean_interval(ratios.to_numpy())}")

rates = per_run.index.get_level_values("lr").to_numpy(dtype=float)
slopes = {name: stats.log_log_slope(rates, per_run[name].to_numpy()).slope for name in ("flip_rms", "weight_rms")}
for name, slope in slopes.items():
    print(f"{name} grows like lr^{slope}")

# %% [markdown]
# ## The figure, and the verdict
#
# The same data through the library: a figure by its name, and the claim that reads this study, judged by its stated
# rule.

# %%
from moe_rl import figures

figure = figures.draw("flips_over_lr", study)
claim, finding = claims.judge("h1_flips_at_small_rates", {"drift_vs_lr": study})
print(claim.title)
print(claim.rule)
print(f"-> {finding.verdict}: {finding.because}")
figure
