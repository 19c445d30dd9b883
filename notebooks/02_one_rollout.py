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
# # 2. Look into one rollout's routing
#
# A small MoE samples one answer; every router's choice is recorded with its gates and margins. Then one gradient step
# is taken, and the same tokens are routed again: which experts left, where, and were those near ties? Shapes: B
# sequences, S columns, L MoE layers, K experts a token.

# %%
import tempfile

import torch

from moe_rl import record
from moe_rl.cold_start import ColdStart, warm_up
from moe_rl.drift import compare
from moe_rl.engines.hf import Hf
from moe_rl.models.build import Tiny
from moe_rl.policy import positions, response_logprobs
from moe_rl.tasks.sort_digits import SortDigits

torch.set_num_threads(1)
torch.manual_seed(0)
task = SortDigits(length=5)
model, tokenizer = Tiny(layers=4, experts=16, top_k=2).build(seed=0)
with tempfile.TemporaryDirectory() as cache:
    warm_up(model, tokenizer, task, ColdStart(steps=30), seed=0, cache_dir=cache)
model.eval()

# %% [markdown]
# ## Sample one prompt four times

# %%
examples = task.examples("train", 1, seed=0)
rollouts = Hf(max_new_tokens=7).sample(model, tokenizer, task, examples, completions=4, seed=0)
for text, reward in zip(tokenizer.batch_decode(rollouts.tokens_BS), rollouts.rewards_B.tolist(), strict=True):
    print(f"{text!r} reward {reward:.2f}")

# %% [markdown]
# ## The experts of each token
#
# A margin is the score of the last chosen expert minus that of the first one left out: near 0 is a near tie.


# %%
def routed():
    with record(model, gates=True, margins=True) as recorder, torch.no_grad():
        model(
            input_ids=rollouts.tokens_BS,
            attention_mask=rollouts.attention_BS.long(),
            position_ids=positions(rollouts.attention_BS),
        )
    return recorder.trace


before = routed()
for column in range(before.valid_BS.shape[1]):
    token = tokenizer.decode(rollouts.tokens_BS[0, column])
    layers = [str(sorted(ids)) for ids in before.expert_ids_BSLK[0, column].tolist()]
    print(f"{token!r:8} {'  '.join(layers)}  smallest margin {float(before.extras['margins'][0, column].min()):.4f}")

# %% [markdown]
# ## After one gradient step

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
logprobs_BT, _ = response_logprobs(model, rollouts)
(-(rollouts.rewards_B - rollouts.rewards_B.mean())[:, None] * logprobs_BT).sum().backward()
optimizer.step()
after = routed()
drift = compare(before, after)
print(f"slot change {drift.slot_change:.1%}, tokens with a change in some layer {drift.any_layer_change:.1%}")
changed = (before.expert_ids_BSLK.sort(-1).values != after.expert_ids_BSLK.sort(-1).values).any(-1) & before.valid_BS[
    ..., None
]
margins = before.extras["margins"].squeeze(-1)
stayed = ~changed & before.valid_BS[..., None]
print(f"mean margin before the step: {margins[stayed].mean():.4f} where the set stayed", end="")
print(f", {margins[changed].mean():.4f} where it changed" if changed.any() else "; no set changed")
