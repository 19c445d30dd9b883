"""What a run writes down about itself while it goes on, and how long its parts take."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from moe_rl.corrections import tails
from moe_rl.drift import compare
from moe_rl.experiment import Experiment
from moe_rl.mini_batches import MicroBatch, OldView
from moe_rl.provenance import provenance
from moe_rl.records import Rollouts
from moe_rl.routing_trace import RoutingTrace
from moe_rl.shaping import equal_groups
from moe_rl.store import RunWriter


class Journal:
    """What a run says of itself: the rows of `steps`, its status, and how long its parts took.

    progress: the last whole step and what was counted until then; a checkpoint holds it.
    """

    def __init__(self, steps: int, writer: RunWriter):
        self.steps, self.writer, self.clock = steps, writer, Clock()
        self.progress: dict[str, Any] = {"step": 0, "queries": 0, "tokens": 0, "shown": {}}
        self.seconds: dict[str, float] = {}

    def go_on(self, progress: dict[str, Any]) -> None:
        """Continue what an earlier process wrote, from its last whole step."""
        self.progress = progress
        self.clock.go_on(progress)
        self.writer.rewind(progress["step"])
        self.writer.describe_resumption(after_step=progress["step"], **provenance())

    def begin_step(self) -> None:
        self.clock.lap()
        self.seconds = {"rollout_s": 0.0, "old_pass_s": 0.0, "drift_s": 0.0, "update_s": 0.0}

    def lap(self, part: str) -> None:
        """Book the CPU seconds since the last lap to a column of `steps`."""
        self.seconds[part] += self.clock.lap()

    def count(self, sampled: Sequence[Rollouts]) -> dict[str, int]:
        """Completions and response tokens so far, with those that were sampled and not trained on."""
        self.progress["queries"] += sum(len(rollouts) for rollouts in sampled)
        self.progress["tokens"] += sum(int(rollouts.response_BT.sum()) for rollouts in sampled)
        return {name: self.progress[name] for name in ("queries", "tokens")}

    def end_step(self, row: dict[str, Any], slot_change: float | None) -> dict[str, Any]:
        """Write a row of `steps`, and where the run stands. Returns both. slot_change: mean per update, if measured."""
        row |= self.seconds | self.clock.state()
        self.writer.append("steps", row)
        shown = {"reward": row.get("reward", row.get("eval_reward")), "slot_change": slot_change}
        self.writer.status("running", step=row["step"], steps=self.steps, **shown)
        self.progress |= {"step": row["step"], "shown": shown} | self.clock.state()
        return row | shown

    def diverged(self, reason: str) -> str:
        """The step after the last whole one has come to numbers that are not finite."""
        step = self.progress["step"] + 1
        self.writer.status("diverged", step=step, steps=self.steps, reason=f"{reason} at step {step}")
        self.writer.checkpoint.unlink(missing_ok=True)
        return "diverged"

    def finished(self) -> str:
        self.writer.status("finished", step=self.steps, steps=self.steps, **self.progress["shown"])
        self.writer.checkpoint.unlink(missing_ok=True)
        return "finished"


class Clock:
    """CPU and wall seconds that a run has taken, in all its processes, and CPU seconds since the last lap."""

    def __init__(self) -> None:
        self.began_cpu, self.began = time.process_time(), time.perf_counter()
        self.last = self.began_cpu

    def go_on(self, state: dict[str, float]) -> None:
        """Count from what an earlier process left off at."""
        self.began_cpu -= state["cpu_s"]
        self.began -= state["wall_s"]

    def state(self) -> dict[str, float]:
        return {"cpu_s": time.process_time() - self.began_cpu, "wall_s": time.perf_counter() - self.began}

    def lap(self) -> float:
        now = time.process_time()
        lap, self.last = now - self.last, now
        return lap


# ------------------------------------------------------------------------------------------- columns of the table steps
def rollout_columns(
    e: Experiment, rollouts: Rollouts, sampled: Sequence[Rollouts], batches: Sequence[Sequence[MicroBatch]]
) -> dict[str, float]:
    """What the table `steps` says about the rollouts: about rewards and lengths, those of the step's own prompts, for
    what is trained on may be chosen by its reward."""
    views = [(part.rollouts, part.old) for batch in batches for part in batch if part.old]
    entropy = sum(float(old.entropy_BT.sum()) for _, old in views)
    own = sampled[0]
    trained, asked = (equal_share(x, e.completions) for x in (rollouts, own))
    columns = {}
    if e.reward == "preference_model":
        columns["model_reward"] = float(own.training_rewards_B.mean())
    if e.dynamic_sampling:
        columns["replaced_groups"] = asked - trained
    return {
        **columns,
        "reward": float(own.rewards_B.mean()),
        "reward_sd": float(own.rewards_B.std()) if len(own) > 1 else math.nan,
        "exact": float(own.exact_B.float().mean()),
        "equal_groups": trained,
        "response_length": float(own.response_BT.sum(1).float().mean()),
        "truncated": float(own.truncated_B.float().mean()),
        "entropy": entropy / int(rollouts.response_BT.sum()),
        **mismatch_columns([(part, old) for part, old in views if not old.sampled]),
    }


def equal_share(rollouts: Rollouts, completions: int) -> float:
    """Share of groups whose training rewards are all equal, and which therefore teach nothing."""
    return float(equal_groups(rollouts.training_rewards_B, completions).double().mean())


def mismatch_columns(pairs: Sequence[tuple[Rollouts, OldView]]) -> dict[str, float]:
    """How far the sampler is from the old policy, in log probabilities, and in routing where both are known."""
    log_c = [(old.logprobs_BT - part.rollout_logprobs_BT)[part.response_BT] for part, old in pairs]
    columns = {f"mismatch_{name}": value for name, value in tails(torch.cat(log_c)).items()}
    both = [(part.routing, old.live_routing) for part, old in pairs if part.routing and old.live_routing]
    if both:
        sampled, own = (RoutingTrace.cat(traces) for traces in zip(*both, strict=True))
        columns["routing_mismatch"] = compare(sampled, own).slot_change
    return columns
