"""What lies in a results folder: columns, names, states, settings."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from moe_rl.store.files import StoreError

DONE = ("finished", "diverged")
LONGEST_NAME = 200  # file systems stop at 255 bytes
TABLES = ("steps", "updates", "drift")
KEY = ("arm", "knobs", "seed")  # what names a run within its study

LEGEND: dict[str, dict[str, str]] = {
    "steps": {
        "step": "rollout batch, from 1 (0 is the policy after the cold start)",
        "reward": "mean true reward of the completions to the step's first prompts",
        "model_reward": "mean reward by the preference model, which is what was trained on (reward=preference_model)",
        "reward_sd": "standard deviation of that reward over completions",
        "exact": "share of completions that are exactly right",
        "eval_reward": "mean reward on the evaluation prompts, one sampled completion each",
        "eval_exact": "share exactly right on the evaluation prompts",
        "equal_groups": "share of the trained groups whose rewards are all equal: no group-relative advantage",
        "replaced_groups": "share of groups that were replaced, their rewards being equal (dynamic_sampling > 0)",
        "response_length": "mean response length, tokens",
        "truncated": "share of completions cut off by the length limit",
        "entropy": "mean entropy of the next-token distribution, nats",
        "mismatch_k3": "mean of c - 1 - log c, c = old policy / sampler: estimates KL(sampler || old), nats a token",
        "mismatch_f2": "share of tokens with max(c, 1/c) > 2",
        "mismatch_f5": "share of tokens with max(c, 1/c) > 5",
        "mismatch_ess": "effective sample size of the weights c, as a share of the tokens",
        "routing_mismatch": "share of expert slots that differ between sampler and old policy, where both are recorded",
        "queries": "completions sampled so far",
        "tokens": "response tokens sampled so far",
        "rollout_s": "CPU seconds: sampling",
        "old_pass_s": "CPU seconds: old logprobs and routing, the critic's values",
        "update_s": "CPU seconds: gradient updates, the critic's too",
        "drift_s": "CPU seconds: measuring drift",
        "cpu_s": "CPU seconds since the run began",
        "wall_s": "seconds since the run began",
    },
    "updates": {
        "step": "rollout batch, from 1",
        "update": "optimizer step within the batch, 1 to M",
        "loss": "value of the policy loss",
        "grad_norm": "gradient norm before clipping",
        "lr": "learning rate; of the routers where only they are trained, else of all other weights",
        "clip_frac": "share of tokens whose gradient is clipped away",
        "clip_frac_sequences": "share of sequences with at least one clipped token",
        "log_w_sd": "standard deviation of the token log ratio, nats",
        "log_w_q": "quantiles .01 .05 .25 .5 .75 .95 .99 of the token log ratio, nats",
        "log_s_sd": "standard deviation of the sequence log ratio, nats a token",
        "log_s_q": "quantiles .01 .05 .25 .5 .75 .95 .99 of the sequence log ratio, nats a token",
        "k3": "mean of w - 1 - log w over tokens: estimates KL(old || new), nats a token",
        "f2": "share of tokens with max(w, 1/w) > 2",
        "f5": "share of tokens with max(w, 1/w) > 5",
        "value_loss": "half the mean squared error of the critic, before its update (arm.advantage=gae)",
        "explained_variance": "1 - variance of that error / variance of the returns (arm.advantage=gae)",
        "balance_loss": "load-balancing loss without its coefficient, 1 when even (optim.balance_loss > 0)",
        "router_kl": "KL of router softmaxes, old policy || new, nats, without its coefficient (optim.router_kl > 0)",
        "reference_kl": "estimate of KL(new || policy after the cold start), nats a token, no coefficient (arm.kl > 0)",
        "replay_kept": "share of replayed experts that training forwards used (replay=thresholded|sticky)",
        "foreseen": "share of a learning router's choice by old scores that is in the top-k of the present ones",
        "foreseen_by_native": "the same of the top-k of the old scores",
        "ess": "effective sample size of the weights w, as a share of the tokens",
    },
    "drift": {
        "step": "rollout batch, from 1",
        "update": "optimizer step within the batch, 1 to M",
        "tokens": "which tokens: rollout (this step's) or probe (fixed, the same for every arm)",
        "reference": "compared with: old (before this batch), previous (before this update), start (after cold start)",
        "n": "real tokens compared",
        "slot_change": "per layer: share of expert slots that changed",
        "set_change": "per layer: share of tokens whose expert set changed",
        "deviation": "share of (token, layer) pairs with 0, 1, ... K changed experts",
        "any_layer_change": "share of tokens with a changed set in some layer",
        "changed_layers": "share of tokens with 0, 1, ... L changed layers",
        "first_changed": "per layer: share of tokens whose first changed layer it is",
        "by_position": "slot change by tenth of the real tokens of a sequence",
        "kl": "per layer: KL(p_reference || p_new) of the softmax of the router logits, nats",
        "js": "per layer: Jensen-Shannon divergence of these two, nats",
        "router_shift": "exp(-mean over layers and reference experts of |change of log p|), mean over tokens; 1: none",
        "margin": "per layer: mean lead of the last chosen expert over the next, in the scores the reference ranked",
        "margin_flipped": "per layer: that margin, tokens whose expert set changed",
        "margin_kept": "per layer: that margin, tokens whose expert set stayed",
        "router_entropy": "per layer: entropy of the softmax of the router logits after the update, nats",
        "max_violation": "per layer: highest over mean load of an expert, minus 1, after the update",
        "dead_experts": "per layer: experts that no token chose, after the update",
        "flip_rms": "RMS over response tokens of log pi_new(own routing) - log pi_new(old routing), nats",
        "weight_rms": "RMS over response tokens of log pi_new(old routing) - log pi_old, nats",
        "replay_gap": "expected true reward with the new policy's own routing minus with the old one's, off-policy",
        "log_w_rms": "RMS over response tokens of log pi_new(own routing) - log pi_old, nats",
        "log_w_flipped": "mean size of that log ratio, tokens whose predicting position has a changed layer, nats",
        "log_w_unflipped": "mean size of that log ratio, tokens whose predicting position has none, nats",
        "log_w_by_changed_layers": "mean size of that log ratio of tokens with 0, 1, ... L changed layers, nats",
    },
}
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """A study read from disk; it equals itself alone. Tables carry the columns arm, knobs, seed; lists stay lists.

    runs: one row a run: arm, knobs, seed, state, reason, folder and all of run.json.
    steps, updates, drift: see LEGEND; runs that have not finished contribute the lines they have.
    configs: the resolved settings of each row of `runs`. exact: of a packed study, numbers of each run that were taken
    before; thinned: what its tables leave out, '' for nothing.
    """

    folder: Path
    runs: pd.DataFrame
    steps: pd.DataFrame
    updates: pd.DataFrame
    drift: pd.DataFrame
    configs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    exact: pd.DataFrame | None = None
    thinned: str = ""

    def setting(self, name: str) -> pd.Series[Any]:
        """A setting of each run, such as optim.lr, in the order of `runs`; None where a run has no such setting."""
        return pd.Series([flatten(config).get(name) for config in self.configs], index=self.runs.index, dtype=object)

    def exactly(self, numbers: pd.DataFrame) -> pd.DataFrame:
        """A table with a row a run, its columns as they were before this study was packed."""
        if self.exact is None:
            return numbers
        kept = self.exact.set_index(list(KEY)).reindex(pd.MultiIndex.from_frame(numbers[list(KEY)]))
        names = [name for name in numbers if name in kept]
        return numbers.assign(**{name: kept[name].to_numpy() for name in names})


def once_per_study(function: Callable[[Study], pd.DataFrame]) -> Callable[[Study], pd.DataFrame]:
    """Remember the table that a function makes of a study, whose data do not change; callers get copies."""
    known: weakref.WeakKeyDictionary[Study, pd.DataFrame] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def remembered(study: Study) -> pd.DataFrame:
        if study not in known:
            known[study] = function(study)
        return known[study].copy()

    return remembered


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping -> {'a.b': leaf}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `flatten`."""
    config: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, leaf = name.split(".")
        place = config
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return config


def shared_and_varied(configs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings with dotted names: those that all configs share, and of each config all others."""
    flat = [flatten(config) for config in configs]
    shared = {
        name: value for name, value in (flat[0] if flat else {}).items()
        if all(name in other and other[name] == value for other in flat)
    }  # fmt: skip
    return shared, [{name: value for name, value in one.items() if name not in shared} for one in flat]


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted keys at which two configs disagree, each with both values."""
    a, b = flatten(one), flatten(other)
    absent = "absent"
    return [
        f"{k} ({a.get(k, absent)} / {b.get(k, absent)})"
        for k in sorted(a.keys() | b.keys())
        if a.get(k, absent) != b.get(k, absent)
    ]


def settings_name(knobs: Mapping[str, Any]) -> str:
    """'optim.lr=0.1,updates=4', sorted by key, or 'default'; values are percent-encoded where they hold slashes and the
    like."""
    return ",".join(f"{key}={quote(str(value), safe='+-._ ')}" for key, value in sorted(knobs.items())) or "default"


def run_folder(results_dir: str | Path, study: str, arm: str, knobs: Mapping[str, Any], seed: int) -> Path:
    """Where a run lives. `knobs` are the settings that a launch varied, besides arm and seed.

    A name that gets too long for a file system ends in a digest instead.
    """
    middle = settings_name(knobs)
    if len(middle) > LONGEST_NAME:
        middle = f"{middle[: LONGEST_NAME - 17]}~{hashlib.blake2b(middle.encode(), digest_size=8).hexdigest()}"
    for part in (study, arm):
        if "/" in part or part in ("", ".", ".."):
            raise StoreError(f"{part!r} cannot name a results folder; choose a name without slashes")
    return Path(results_dir) / study / arm / middle / f"seed_{seed}"
