"""The experiment: rollouts, advantages, updates, drift; step after step, one line per arrow of the pipeline."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moe_rl import checkpoint
from moe_rl.advantage import equal_group_share, group_advantages
from moe_rl.assembly import EVAL_SEED, build_critic, build_judge, build_meter, build_policy, facts, noise
from moe_rl.corrections import tails
from moe_rl.drift import compare
from moe_rl.experiment import Experiment
from moe_rl.journal import Journal
from moe_rl.models.families import find_routers
from moe_rl.policy_folder import save_policy
from moe_rl.preference_model import PreferenceModel
from moe_rl.records import NotFiniteError, Rollouts, RoutingTrace
from moe_rl.reference import snapshot
from moe_rl.routers.base import changes_routing
from moe_rl.shaping import equal_groups, overlong_penalty, replace_equal_groups
from moe_rl.store import RunWriter
from moe_rl.update import MiniBatch, old_pass, split_rows, take_update

FIRST_EXTRA_ITEM = 5 * 10**8  # prompts of dynamic sampling's further rounds: no step's own, nor the cold start's


def derive_seed(seed: int, purpose: str, step: int) -> int:
    """A seed for one purpose at one step: arms share it, and no generator's state has to be carried along."""
    digest = hashlib.blake2b(f"{seed}|{purpose}|{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def run(
    e: Experiment, writer: RunWriter, cache_dir: str, report: Callable[[dict[str, Any]], None] = lambda row: None
) -> str:
    """Train one arm at one seed and write what happened. Returns the state it ended in: finished or diverged.

    report: called with each row of the table `steps`.
    """
    training = train(e, writer, cache_dir)
    while True:
        try:
            row = next(training)
        except StopIteration as end:
            return str(end.value)
        report(row)


def train(e: Experiment, writer: RunWriter, cache_dir: str) -> Generator[dict[str, Any], None, str]:
    """`run`, step by step: yields each row of the table `steps`, that of step 0 first, and returns the final state."""
    journal = Journal(e.steps, writer)
    try:
        return (yield from take_steps(e, writer, cache_dir, journal))
    except NotFiniteError as error:
        return journal.diverged(str(error))


def take_steps(
    e: Experiment, writer: RunWriter, cache_dir: str, journal: Journal
) -> Generator[dict[str, Any], None, str]:
    """The pipeline. NotFiniteError where the policy can no longer be sampled from."""
    model, tokenizer, warmth = build_policy(e, cache_dir, warm=not writer.resumes)
    optimizer, schedule = e.optim.build(model, e.steps * e.updates)
    drift = build_meter(e, model, tokenizer)
    judge, judged = build_judge(e, cache_dir)
    critic = build_critic(e, model)
    reference = snapshot(model) if e.kl.on else None
    if writer.resumes:
        progress, kept = checkpoint.load(writer.checkpoint, model, optimizer, schedule)
        journal.go_on(progress)
        drift.resume(part_of(kept, "drift"))
        reference = part_of(kept, "reference") or None
        if critic is not None:
            critic.resume(part_of(kept, "critic"))
    else:
        writer.describe(**facts(e, model), cold_start=warmth, **judged, noise_floor=noise(drift))
        yield journal.end_step({"step": 0, **evaluate(e, model, tokenizer, 0)}, None)
    for step in range(journal.progress["step"] + 1, e.steps + 1):
        journal.begin_step()
        rollouts, sampled = sample_step(e, model, tokenizer, judge, step)
        journal.lap("rollout_s")
        if critic is None:
            advantages = group_advantages(rollouts.training_rewards_B, rollouts.group_ids_B, e.advantage)
        else:
            advantages, returns_BT = critic.judge(rollouts, e.micro_batch)
        rows = split_rows(len(rollouts), e.updates, derive_seed(e.seed, "split", step))
        keep_logits = e.optim.router_kl > 0 or e.correction.needs_routers
        old = (e.micro_batch, e.replay, e.old_logprobs, keep_logits, reference, e.router)
        batches = old_pass(model, rollouts, advantages, rows, *old)
        journal.lap("old_pass_s")
        drift.begin_step(step, rollouts)
        journal.lap("drift_s")
        for number, batch in enumerate(batches, start=1):
            update = take_update(
                model,
                optimizer,
                schedule,
                batch,
                e.policy_loss,
                e.replay,
                e.optim.max_grad_norm,
                e.correction,
                e.replay_threshold,
                e.optim.pressure,
                e.kl,
                e.router,
            )
            if critic is not None:
                returns = returns_BT[rows[number - 1]].split([len(part) for part in batch.parts])
                update |= critic.learn(batch.parts, returns, e.optim.max_grad_norm)
            after_update(e, model)
            journal.lap("update_s")
            writer.append("updates", {"step": step, "update": number, **update})
            if not (math.isfinite(update["loss"]) and math.isfinite(update["grad_norm"])):
                return journal.diverged(
                    f"loss {update['loss']}, gradient norm {update['grad_norm']} at update {number}"
                )
            writer.append("drift", *drift.after_update(step, number))
            journal.lap("drift_s")
        drift.write_traces(writer.folder, step)
        row = {"step": step, **journal.count(sampled), **describe(e, rollouts, sampled, batches)}
        if step == e.steps or (e.eval_every and step % e.eval_every == 0):
            row |= evaluate(e, model, tokenizer, step)
        yield journal.end_step(row, drift.slot_change)
        if e.launch.checkpoint_every and step % e.launch.checkpoint_every == 0:
            parts = {"drift": drift.state(), "reference": reference or {}, "critic": critic.state() if critic else {}}
            checkpoint.save(writer.checkpoint, model, optimizer, schedule, journal.progress, joined(parts))
    if e.launch.keep_policy:
        with checkpoint.saving(writer.folder / "policy"):
            save_policy(writer.folder / "policy", model, tokenizer, e.router)
    return journal.finished()


def joined(kept: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of several parts under one roof, as `part.name`."""
    return {f"{part}.{name}": tensor for part, tensors in kept.items() for name, tensor in tensors.items()}


def part_of(kept: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    """The reverse, for one of the parts."""
    return {name.removeprefix(f"{part}."): x for name, x in kept.items() if name.startswith(f"{part}.")}


def sample_step(
    e: Experiment,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    judge: PreferenceModel | None,
    step: int,
) -> tuple[Rollouts, list[Rollouts]]:
    """(what is trained on, everything that was sampled for it, the step's own prompts first).

    With dynamic_sampling, further rounds of prompts replace groups whose training rewards are all equal; the groups
    that are left then stay as they are.
    """
    prompts = e.task.examples("train", e.prompts, e.seed, start=(step - 1) * e.prompts)
    rollouts = shape(e, judge, sample(e, model, tokenizer, prompts, step))
    sampled = [rollouts]
    for number in range(e.dynamic_sampling):
        missing = int(equal_groups(rollouts.training_rewards_B, e.completions).sum())
        if not missing:
            break
        start = FIRST_EXTRA_ITEM + ((step - 1) * e.dynamic_sampling + number) * e.prompts
        prompts = e.task.examples("train", missing, e.seed, start=start)
        sampled.append(shape(e, judge, sample(e, model, tokenizer, prompts, step, number + 1)))
        rollouts = replace_equal_groups(rollouts, sampled[-1], e.completions, tokenizer.pad_token_id)
    return rollouts, sampled


def shape(e: Experiment, judge: PreferenceModel | None, rollouts: Rollouts) -> Rollouts:
    """The rollouts with the rewards that are trained on, where these are not the task's own."""
    if judge is None and not e.overlong_buffer:
        return rollouts
    rewards_B = rollouts.rewards_B if judge is None else judge.reward(rollouts)
    if e.overlong_buffer:
        rewards_B = rewards_B + overlong_penalty(rollouts.response_BT, e.engine.max_new_tokens, e.overlong_buffer)
    return dataclasses.replace(rollouts, shaped_rewards_B=rewards_B)


def sample(
    e: Experiment,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Any],
    step: int,
    number: int = 0,
) -> Rollouts:
    """Rollouts, with the sampler's routing where the arm replays it or it differs from the trainer's.

    number: of the round of prompts within the step.
    """
    seed = derive_seed(e.seed, f"rollout {number}" if number else "rollout", step)
    wanted = e.replay == "rollout" or (not e.engine.exact and bool(find_routers(model)))
    return e.engine.sample(model, tokenizer, e.task, prompts, e.completions, seed, wanted)


@torch.no_grad()
def evaluate(e: Experiment, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, step: int) -> dict[str, float]:
    """Reward on the evaluation prompts, one completion each, sampled from the policy itself: no emulated engine."""
    if not e.eval_prompts:
        return {}
    prompts = e.task.examples("eval", e.eval_prompts, EVAL_SEED)
    engine = e.engine.without_emulation()
    rollouts = engine.sample(model, tokenizer, e.task, prompts, 1, derive_seed(e.seed, "eval", step))
    return {"eval_reward": float(rollouts.rewards_B.mean()), "eval_exact": float(rollouts.exact_B.float().mean())}


def after_update(e: Experiment, model: nn.Module) -> None:
    """Let a stateful router variant look at the update that was taken."""
    if changes_routing(e.router):
        for site in find_routers(model):
            e.router.after_update(site.module)


def describe(e: Experiment, rollouts: Rollouts, sampled: list[Rollouts], batches: list[MiniBatch]) -> dict[str, float]:
    """What the table `steps` says about the rollouts: about rewards and lengths, those of the step's own prompts, for
    what is trained on may be chosen by its reward."""
    entropy = sum(float(entropies.sum()) for batch in batches for entropies in batch.entropies)
    own = sampled[0]
    columns = {}
    if e.reward == "preference_model":
        columns["model_reward"] = float(own.training_rewards_B.mean())
    if e.dynamic_sampling:
        stale = equal_groups(own.training_rewards_B, e.completions).float().mean()
        columns["replaced_groups"] = float(stale) - equal_group_share(rollouts.training_rewards_B, rollouts.group_ids_B)
    return {
        **columns,
        "reward": float(own.rewards_B.mean()),
        "reward_sd": float(own.rewards_B.std()),
        "exact": float(own.exact_B.float().mean()),
        "equal_groups": equal_group_share(rollouts.training_rewards_B, rollouts.group_ids_B),
        "response_length": float(own.response_BT.sum(1).float().mean()),
        "truncated": float(own.truncated_B.float().mean()),
        "entropy": entropy / int(rollouts.response_BT.sum()),
        **mismatch(batches),
    }


def mismatch(batches: list[MiniBatch]) -> dict[str, float]:
    """How far the sampler is from the old policy, in log probabilities, and in routing where both are known."""
    parts = [part for batch in batches for part in batch.parts]
    recomputed = [logprobs_BT for batch in batches for logprobs_BT in batch.recomputed]
    log_c = [(lp - part.rollout_logprobs_BT)[part.response_BT] for part, lp in zip(parts, recomputed, strict=True)]
    columns = {f"mismatch_{name}": value for name, value in tails(torch.cat(log_c)).items()}
    live = [trace for batch in batches for trace in batch.live_routing]
    both = [(part.routing, trace) for part, trace in zip(parts, live, strict=True) if part.routing and trace]
    if both:
        sampled, own = (RoutingTrace.cat(traces) for traces in zip(*both, strict=True))
        columns["routing_mismatch"] = compare(sampled, own).slot_change
    return columns
