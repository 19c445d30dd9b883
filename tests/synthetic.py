"""A study on disk with plausible numbers: three arms, three seeds, and on demand the ways in which runs end badly."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl import store
from moe_rl.routing_trace import RoutingTrace
from moe_rl.store.format import unflatten
from moe_rl.traces import TraceWriter

ARMS = ("grpo", "grpo_routing_replay", "gspo")
Runs = Sequence[tuple[str, int]]


class CrashError(RuntimeError):
    """What a failed run raises."""


def make_study(
    results: Path,
    study: str = "synthetic",
    *,
    arms: Sequence[str] = ARMS,
    seeds: Sequence[int] = (0, 1, 2),
    knobs: Sequence[Mapping[str, Any]] = ({},),
    steps: int = 6,
    updates: int = 4,
    layers: int = 12,
    top_k: int = 2,
    experts: int = 32,
    dense: bool = False,
    traces: bool = False,
    missing: Runs = (),
    diverged: Runs = (),
    failed: Runs = (),
) -> Path:
    """Write arms x seeds x knobs through `store.open_run`; (arm, seed) pairs end as told. Returns the folder."""
    for settings in knobs:
        for arm in arms:
            for seed in seeds:
                if (arm, seed) in missing:
                    continue
                folder = store.run_folder(results, study, arm, settings, seed)
                config = unflatten({"arm": arm, "seed": seed, "updates": updates, "optim.lr": 2e-4, **settings})
                run = _Run(arm, seed, dict(settings), steps, updates, 0 if dense else layers, top_k, experts)
                end = 1 + int(steps * 0.45)
                with contextlib.suppress(CrashError), store.open_run(folder, config) as writer:
                    if writer is None:
                        continue
                    run.describe(writer)
                    last = end if (arm, seed) in diverged or (arm, seed) in failed else steps
                    if traces and not dense:
                        run.traces(folder, last)
                    run.write(writer, last, nan_at=last if (arm, seed) in diverged else None)
                    if (arm, seed) in failed:
                        raise CrashError("out of memory")
                    if (arm, seed) in diverged:
                        writer.status("diverged", step=last, reason=f"loss is nan at step {last} update 2")
                    else:
                        writer.status("finished", step=last)
    return results / study


class _Run:
    def __init__(
        self,
        arm: str,
        seed: int,
        knobs: dict[str, Any],
        steps: int,
        updates: int,
        layers: int,
        top_k: int,
        experts: int,
    ) -> None:
        number = sorted((*ARMS, arm)).index(arm)
        self.rng = np.random.default_rng([seed, number, len(str(knobs))])
        self.arm, self.steps, self.updates = arm, steps, updates
        self.layers, self.top_k, self.experts = layers, top_k, experts
        self.rate = float(knobs.get("optim.lr", 2e-4)) / 2e-4
        self.ceiling = {"grpo": 0.72, "grpo_routing_replay": 0.77}.get(arm, 0.80) + self.rng.normal(0, 0.025)

    def describe(self, writer: store.RunWriter) -> None:
        writer.describe(
            num_layers=self.layers,
            top_k=self.top_k * (self.layers > 0),
            num_experts=self.experts * (self.layers > 0),
            updates_per_step=self.updates,
            parameters=1_200_000,
            versions={"torch": "2.13"},
            machine="test",
            git_commit="0" * 40,
            cpu_s=61.0 + self.rng.normal(),
            label="synthetic",
            noise_floor={"batch_size": 0.0, "decode": 0.0012} if self.layers else {},
        )

    def write(self, writer: store.RunWriter, last: int, nan_at: int | None) -> None:
        for step in range(1, last + 1):
            broken = step == nan_at
            self.step(writer, step, broken)
            for update in range(1, self.updates + 1):
                self.update(writer, step, update, broken and update > 1)
                if self.layers and not (broken and update > 1):
                    for tokens in ("rollout", "probe"):
                        for reference in ("old", "previous", "start"):
                            self.drift(writer, step, update, tokens, reference)

    def traces(self, folder: Path, step: int) -> None:
        """100 tokens in four sequences; experts 0 and 1 are active together more often than others."""
        scores = self.rng.normal(size=(4, 25, self.layers, self.experts))
        scores[..., :2] += self.rng.normal(size=(4, 25, self.layers, 1)) * 2
        ids = torch.from_numpy(scores).topk(self.top_k, -1).indices
        names = tuple(f"layers.{layer}.gate" for layer in range(self.layers))
        known = torch.ones(4, 25, dtype=torch.bool)
        with TraceWriter(folder / "traces" / f"step_{step:05d}.parquet", names, self.experts, self.top_k) as writer:
            for update in (0, self.updates):
                source = "new" if update else "old"
                writer.add(RoutingTrace.from_ids(ids, known, names, self.experts, source, update), known, step=step)

    def step(self, writer: store.RunWriter, step: int, broken: bool) -> None:
        nan, rng = float("nan"), self.rng
        progress = 1 - np.exp(-3 * self.rate * step / self.steps)
        reward = 0.25 + (self.ceiling - 0.25) * progress + rng.normal(0, 0.018)
        row = {
            "step": step,
            "reward": nan if broken else reward,
            "reward_sd": 0.3,
            "exact": max(0.0, reward - 0.3),
            "equal_groups": 0.1,
            "response_length": nan if broken else 11 - progress + rng.normal(0, 0.08),
            "truncated": 0.01,
            "entropy": nan if broken else 0.9 - 0.6 * progress + rng.normal(0, 0.015),
            "queries": 256 * step,
            "tokens": 2800 * step,
            "rollout_s": 0.3,
            "old_pass_s": 0.1,
            "update_s": 0.4,
            "drift_s": 0.2,
            "cpu_s": 1.0 * step,
            "wall_s": 1.0 * step,
        }
        if step % max(1, self.steps // 10) == 0:
            row["eval_reward"] = nan if broken else reward + 0.02 + rng.normal(0, 0.008)
            row["eval_exact"] = row["exact"]
        writer.append("steps", row)

    def update(self, writer: store.RunWriter, step: int, update: int, broken: bool) -> None:
        nan, rng = float("nan"), self.rng
        spread = {"grpo": 0.06, "grpo_routing_replay": 0.045}.get(self.arm, 0.05) * (update - 1) * self.rate
        spread *= np.exp(rng.normal(0, 0.1))
        base = {"grpo": 1.6e-3, "grpo_routing_replay": 6e-4}.get(self.arm, 0.12)
        quantiles = np.array([-2.6, -1.7, -0.66, 0.01, 0.65, 1.6, 2.4])
        row = {
            "step": step,
            "update": update,
            "loss": -0.01,
            "grad_norm": np.exp(rng.normal(-0.7, 0.15)) * self.rate,
            "lr": 2e-4 * self.rate,
            "clip_frac": base * (update - 1) * np.exp(rng.normal(0, 0.3)),
            "clip_frac_sequences": min(1.0, 10 * base * (update - 1)),
            "log_w_sd": spread,
            "log_w_q": [float(q) for q in spread * quantiles],
            "log_s_sd": spread / 3.3,
            "log_s_q": [float(q) for q in spread / 3.3 * quantiles],
            "k3": 0.5 * spread**2,
            "f2": 0.02 * spread,
            "f5": 0.001 * spread,
            "ess": 1 / (1 + spread**2),
        }
        if broken:
            row = {
                key: value if key in ("step", "update") else [nan] * 7 if key.endswith("_q") else nan
                for key, value in row.items()
            }
        writer.append("updates", row)

    def drift(self, writer: store.RunWriter, step: int, update: int, tokens: str, reference: str) -> None:
        many = {"previous": 1.0, "old": update**0.7, "start": (update + self.updates * (step - 1)) ** 0.6}[reference]
        level = {"grpo": 0.055, "grpo_routing_replay": 0.045}.get(self.arm, 0.04)
        depth = np.linspace(0.6, 1.5, self.layers)
        share = level * many * self.rate**0.6 * (0.6 + 0.6 * np.exp(-2 * step / self.steps)) * depth
        share = np.clip(share * np.exp(self.rng.normal(0, 0.06, self.layers)), 0, 1 - self.top_k / self.experts)
        k, sets = self.top_k, 1 - (1 - share) ** self.top_k
        deviation = [float(np.mean(comb(k, d) * share**d * (1 - share) ** (k - d))) for d in range(k + 1)]
        changed = np.ones(1)
        for p in sets:  # how many layers change, if they change independently
            changed = np.append(changed * (1 - p), 0) + np.insert(changed * p, 0, 0)
        before = np.concatenate([[1], np.cumprod(1 - sets)[:-1]])
        writer.append(
            "drift",
            {
                "step": step,
                "update": update,
                "tokens": tokens,
                "reference": reference,
                "n": 700,
                "slot_change": share.tolist(),
                "set_change": sets.tolist(),
                "deviation": deviation,
                "any_layer_change": float(1 - changed[0]),
                "changed_layers": changed.tolist(),
                "first_changed": (before * sets).tolist(),
                "by_position": np.linspace(0.8, 1.2, 10).tolist(),
                **(self.soft(share) if step % 2 else {}),
                **(self.flips(share, update) if step % 2 and (tokens, reference) == ("rollout", "old") else {}),
            },
        )

    def soft(self, share: np.ndarray) -> dict[str, Any]:
        """Measured at every second step; in the first layer no token flips, so it has no margin of flipped tokens."""
        margin = np.full(self.layers, 0.03) * np.exp(self.rng.normal(0, 0.1, self.layers))
        return {
            "kl": (0.3 * share**2).tolist(),
            "js": (0.07 * share**2).tolist(),
            "router_shift": float(np.exp(-share.mean())),
            "margin": margin.tolist(),
            "margin_flipped": [float("nan"), *(margin[1:] * share[1:]).tolist()],
            "margin_kept": (1.05 * margin).tolist(),
            "router_entropy": (np.log(self.experts) - 0.3 - share).tolist(),
            "max_violation": (1.2 + 8 * share).tolist(),
            "dead_experts": self.rng.integers(0, 3, self.layers).tolist(),
        }

    def flips(self, share: np.ndarray, update: int) -> dict[str, Any]:
        flip, weight = 0.05 * self.rate**0.5 * update**0.5, 0.04 * self.rate * update
        flip, weight = (term * float(np.exp(self.rng.normal(0, 0.15))) for term in (flip, weight))
        by_layers = [weight * (0.7 + 0.2 * n) for n in range(self.layers)] + [float("nan")]
        return {
            "flip_rms": flip,
            "weight_rms": weight,
            "replay_gap": 0.02 * flip,
            "log_w_rms": (flip**2 + weight**2) ** 0.5,
            "log_w_flipped": 0.9 * weight + 0.5 * flip,
            "log_w_unflipped": 0.6 * weight,
            "log_w_by_changed_layers": by_layers,
        }
