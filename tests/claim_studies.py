"""Studies on disk whose numbers are chosen: what each claim's rule is tried on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_rl import store
from moe_rl.store.format import unflatten

STEPS = 5
WOBBLE = (-0.008, 0.011, 0.002, -0.004, 0.006)  # of seeds, about their mean
SHARED = {
    "updates": 4, "optim.lr": 1e-3, "optim.trains": "all", "model.family": "qwen3_moe", "model.layers": 8,
    "model.dtype": "float32", "arm.policy_loss.clip_low": 0.2, "arm.policy_loss.clip_high": 0.27,
}  # fmt: skip


def write_arm(
    results: Path,
    study: str,
    arm: str,
    final: float,
    *,
    knobs: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = range(5),
    spread: float = 1.0,
    **numbers: Any,
) -> None:
    """One run a seed, whose final reward is `final` give or take WOBBLE times `spread`. numbers: see `write_run`."""
    knobs = dict(knobs or {})
    for seed in seeds:
        folder = store.run_folder(results, study, arm, knobs, seed)
        settings = unflatten({**SHARED, "arm.name": arm, "seed": seed, **(config or {}), **knobs})
        with store.open_run(folder, settings) as writer:
            write_run(writer, final + spread * WOBBLE[seed % 5], factor=1 + 4 * WOBBLE[(seed + 2) % 5], **numbers)


def write_run(
    writer: store.RunWriter,
    final: float,
    factor: float,
    *,
    start: float = 0.4,
    best: float | None = None,
    diverged: bool = False,
    slot_change: float = 0.1,
    clip_frac: float = 0.1,
    length: float = 10.0,
    log_s_sd: float = 0.01,
    flip: float = 0.02,
    weight: float = 0.02,
    cpu_s: float = 1.0,
    layers: int = 8,
) -> None:
    """factor: by which the seed's measures other than rewards are off. cpu_s: of training, a step."""
    sizes = {"num_layers": layers, "top_k": 2 * (layers > 0), "num_experts": 32 * (layers > 0), "updates_per_step": 2}
    writer.describe(**sizes, cpu_s=cpu_s * STEPS, machine="a machine", git_commit="abc", versions={"torch": "2.13"})
    writer.append("steps", {"step": 0, "eval_reward": start})
    for step in range(1, STEPS + 1):
        reward = start + (final - start) * step / STEPS
        reward = best if best is not None and step == 2 else reward
        row = {"step": step, "reward": reward, "response_length": length, "queries": 64 * step, "tokens": 640 * step}
        row |= {"rollout_s": cpu_s / 2, "old_pass_s": 0.0, "update_s": cpu_s / 2, "eval_reward": reward}
        writer.append("steps", row)
        for update in (1, 2):
            spread = {"clip_frac": clip_frac * factor, "log_s_sd": log_s_sd * factor * (update - 1)}
            writer.append("updates", {"step": step, "update": update, **spread, "log_w_sd": 0.03 * (update - 1)})
            for reference in ("previous", "old") if layers else ():
                row = {"step": step, "update": update, "tokens": "rollout", "reference": reference, "n": 100}
                row |= {"slot_change": [slot_change * factor] * layers, "set_change": [slot_change] * layers}
                row |= {"any_layer_change": 0.5, "flip_rms": flip * factor, "weight_rms": weight}
                writer.append("drift", row)
    writer.status("diverged" if diverged else "finished", step=STEPS, **({"reason": "loss nan"} if diverged else {}))
