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
# # The instrument in your own training
#
# `record` and `replay` work on any supported transformers MoE model, in any training loop. This is such a loop, all of
# it: a stock model, sampling, a policy gradient in several updates, with the routing recorded, replayed, compared and
# written to disk. It runs in seconds on a CPU. Shapes: B sequences, S columns, L MoE layers, K experts per token.

# %%
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl import record, replay
from moe_rl.drift import compare
from moe_rl.drift.routing_metrics import dead_experts, known, load, max_violation
from moe_rl.traces import TraceWriter, read_traces, to_pandas

torch.set_num_threads(1)
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4, num_experts=16,
    num_experts_per_tok=4, num_attention_heads=4, num_key_value_heads=4, head_dim=8, initializer_range=0.2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = Qwen3MoeForCausalLM(config).eval()
PROMPT, NEW = 4, 12

# %% [markdown]
# ## Sample, and record while sampling
#
# `top_k=0` matters: by default `generate` keeps the 50 likeliest tokens, and is then another policy than the one
# that is trained. The last sampled token was never fed back to the model, so its routing is unknown: it is marked
# invalid, not filled in.

# %%
prompts = torch.randint(3, 32, (16, PROMPT)).repeat_interleave(4, 0)
with record(model, source="rollout") as recorder:
    tokens = model.generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=NEW,
        eos_token_id=None,
    )  # fmt: skip
sampled = recorder.trace
mask = torch.ones_like(tokens)
print("expert ids", tuple(sampled.expert_ids_BSLK.shape), sampled.expert_ids_BSLK.dtype)
print("columns whose routing is known:", int(sampled.valid_BS[0].sum()), "of", tokens.shape[1])


# %% [markdown]
# ## The old policy
#
# Its log-probabilities are needed anyway; the same pass gives its routing.


# %%
def logprobs_of_new_tokens():
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


with torch.no_grad(), record(model, source="old") as recorder:
    old_logprobs = logprobs_of_new_tokens()
old = recorder.trace

mismatch = compare(sampled.aligned_to(mask), old)
print(f"sampler against trainer, same weights: {mismatch.slot_change:.2%} of activated experts differ")

# %% [markdown]
# ## Updates that replay the old policy's experts
#
# The reward: as many tokens below 16 as possible; the advantage is relative to the other completions of the prompt.
# With activation checkpointing on, the backward must be inside the block too, since it runs the routers again; leaving
# the block earlier raises. Only the choice of experts is replayed: gates come from the live router, which keeps its
# gradient. Measuring happens outside the block, where the model routes as it likes.

# %%
reward = (tokens[:, PROMPT:] < 16).float().mean(1)
groups = reward.view(-1, 4)
advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
before, ratio_ranges = old, []
for update in range(1, 4):
    with replay(model, old):
        ratio = (logprobs_of_new_tokens() - old_logprobs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.min(ratio * advantage[:, None], clipped * advantage[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    with torch.no_grad(), record(model, source="new", update=update) as recorder:
        logprobs_of_new_tokens()
    new = recorder.trace
    last, total = compare(before, new), compare(old, new)
    before = new
    ratio_ranges.append((ratio.min().item(), ratio.max().item()))
    print(
        f"update {update}: ratios {ratio.min():.3f} to {ratio.max():.3f}, slot change {last.slot_change:.2%} by this "
        f"update and {total.slot_change:.2%} since sampling, {total.any_layer_change:.0%} of tokens changed somewhere"
    )

# %% [markdown]
# The first update's ratios are exactly 1: replaying a model's own routing changes no bit of its output.
#
# ## From a trace to numbers
#
# On disk a trace is a checked parquet file, one row a sequence and pass.

# %%
path = Path(tempfile.mkdtemp()) / "traces.parquet"
with TraceWriter(path, old.layer_names, old.num_experts, old.top_k, type(model).__name__) as writer:
    for trace in (old, new):
        writer.add(trace, mask, step=0, tokens_BS=tokens)
print(f"{path.stat().st_size / (2 * tokens.numel()):.1f} bytes a token and pass, of {4 * 4} before compression")
table = to_pandas(read_traces(path, step=0, source="new"))
print(table.head(3))

# %%
for name, trace in (("old", old), ("new", new)):
    loads = load(known(trace), trace.num_experts)
    print(name, "load violation by layer", [round(x, 2) for x in max_violation(loads).tolist()],
          "idle experts", dead_experts(loads).tolist())  # fmt: skip
for layer, slots, sets in zip(old.layer_names, total.slot_change_L, total.set_change_L, strict=True):
    print(f"{layer}: {slots:.2%} of slots, {sets:.2%} of sets changed since sampling")
