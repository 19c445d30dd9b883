"""The experiment: rollouts, advantages, updates, drift; step after step, one line per arrow of the pipeline."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Generator
from typing import Any

import torch

from moe_rl.advantage import group_advantages
from moe_rl.assembly import EVAL_SEED, build_state, facts, probe_noise
from moe_rl.checkpoint import saving
from moe_rl.experiment import Experiment
from moe_rl.journal import Journal, rollout_columns
from moe_rl.kv_cache import decodes_as_it_reads
from moe_rl.mini_batches import mini_batches, shortest_first, split_rows
from moe_rl.models.families import find_routers
from moe_rl.old_pass import old_pass
from moe_rl.policy_folder import save_policy
from moe_rl.records import NotFiniteError, Rollouts
from moe_rl.routers.base import changes_routing
from moe_rl.shaping import equal_groups, overlong_penalty, replace_equal_groups
from moe_rl.state import State
from moe_rl.store import RunWriter
from moe_rl.update import take_update

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
    journal = Journal(e.steps, writer)
    try:
        for row in train(e, journal, cache_dir):
            report(row)
    except NotFiniteError as error:
        return journal.diverged(str(error))
    return journal.finished()


def train(e: Experiment, journal: Journal, cache_dir: str) -> Generator[dict[str, Any], None, None]:
    """The pipeline, step by step: yields each row of the table `steps`, that of step 0 first.

    NotFiniteError where the policy can no longer be sampled from or trained.
    """
    writer = journal.writer
    state, told = build_state(e, cache_dir, warm=not writer.resumes)
    model, drift, critic = state.model, state.drift, state.critic
    if writer.resumes:
        journal.go_on(state.load(writer.checkpoint))
    else:
        writer.describe(**facts(e, model), **told, noise_floor=probe_noise(drift))
        yield journal.end_step({"step": 0, **evaluate(e, state, 0)}, None)
    for step in range(journal.progress["step"] + 1, e.steps + 1):
        journal.begin_step()
        rollouts, sampled = sample_step(e, state, step)
        journal.lap("rollout_s")
        if critic is None:
            advantages = group_advantages(rollouts.training_rewards_B, rollouts.group_ids_B, e.arm.advantage)
            returns = None
        else:
            advantages, returns = critic.assess(rollouts, e.micro_batch)
        rows = split_rows(len(rollouts), e.updates, derive_seed(e.seed, "split", step))
        rows = shortest_first(rows, rollouts)
        batches = mini_batches(
            rollouts, advantages, rows, returns_BT=returns, micro_batch=e.micro_batch, train_all=e.train_all
        )
        old_pass(
            model,
            batches,
            e.arm,
            pressure=e.optim.pressure,
            exact=samples_exactly(e, state),
            reference=state.reference,
            router=e.router,
        )
        journal.lap("old_pass_s")
        drift.begin_step(step, rollouts)
        journal.lap("drift_s")
        for number, batch in enumerate(batches, start=1):
            update = take_update(
                model,
                state.optimizer,
                state.schedule,
                batch,
                e.arm,
                max_grad_norm=e.optim.max_grad_norm,
                pressure=e.optim.pressure,
                router=e.router,
            )
            if critic is not None:
                update |= critic.learn(batch, e.optim.max_grad_norm)
            after_update(e, state)
            journal.lap("update_s")
            writer.append("updates", {"step": step, "update": number, **update})
            if not (math.isfinite(update["loss"]) and math.isfinite(update["grad_norm"])):
                raise NotFiniteError(f"loss {update['loss']}, gradient norm {update['grad_norm']} at update {number}")
            writer.append("drift", *drift.after_update(step, number))
            journal.lap("drift_s")
        drift.write_traces(writer.folder, step)
        row = {"step": step, **journal.count(sampled), **rollout_columns(e, rollouts, sampled, batches)}
        if step == e.steps or (e.eval_every and step % e.eval_every == 0):
            row |= evaluate(e, state, step)
        yield journal.end_step(row, drift.slot_change)
        if e.launch.checkpoint_every and step % e.launch.checkpoint_every == 0:
            state.save(writer.checkpoint, journal.progress)
    if e.launch.keep_policy:
        with saving(writer.folder / "policy"):
            save_policy(writer.folder / "policy", model, state.tokenizer, e.router)


def sample_step(e: Experiment, state: State, step: int) -> tuple[Rollouts, list[Rollouts]]:
    """(what is trained on, everything that was sampled for it, the step's own prompts first).

    With dynamic_sampling, further rounds of prompts replace groups whose training rewards are all equal; the groups
    that are left then stay as they are.
    """
    prompts = e.task.examples("train", e.prompts, e.seed, start=(step - 1) * e.prompts)
    rollouts = shape_rewards(e, state, sample(e, state, prompts, step))
    sampled = [rollouts]
    for number in range(e.dynamic_sampling):
        missing = int(equal_groups(rollouts.training_rewards_B, e.completions).sum())
        if not missing:
            break
        start = FIRST_EXTRA_ITEM + ((step - 1) * e.dynamic_sampling + number) * e.prompts
        prompts = e.task.examples("train", missing, e.seed, start=start)
        sampled.append(shape_rewards(e, state, sample(e, state, prompts, step, number + 1)))
        rollouts = replace_equal_groups(rollouts, sampled[-1], e.completions, state.tokenizer.pad_token_id)
    return rollouts, sampled


def sample(e: Experiment, state: State, prompts: list[Any], step: int, number: int = 0) -> Rollouts:
    """Rollouts, with the sampler's routing where the arm replays it or it differs from the trainer's.

    number: of the round of prompts within the step.
    """
    seed = derive_seed(e.seed, f"rollout {number}" if number else "rollout", step)
    wanted = e.arm.replay == "rollout" or (not e.engine.exact and bool(find_routers(state.model)))
    return e.engine.sample(state.model, state.tokenizer, e.task, prompts, e.completions, seed, wanted)


def samples_exactly(e: Experiment, state: State) -> bool:
    """Whether the sampler's log probabilities are the policy's own, up to the rounding of fp32."""
    return e.engine.exact and state.model.dtype == torch.float32 and decodes_as_it_reads(state.model)


def shape_rewards(e: Experiment, state: State, rollouts: Rollouts) -> Rollouts:
    """The rollouts with the rewards that are trained on, where these are not the task's own."""
    learned = state.preference_model
    if learned is None and not e.overlong_buffer:
        return rollouts
    rewards_B = rollouts.rewards_B if learned is None else learned.reward(rollouts)
    if e.overlong_buffer:
        rewards_B = rewards_B + overlong_penalty(rollouts.response_BT, e.engine.max_new_tokens, e.overlong_buffer)
    return dataclasses.replace(rollouts, shaped_rewards_B=rewards_B)


@torch.no_grad()
def evaluate(e: Experiment, state: State, step: int) -> dict[str, float]:
    """Reward on the evaluation prompts, one completion each, sampled from the policy itself: no emulated engine."""
    if not e.eval_prompts:
        return {}
    prompts = e.task.examples("eval", e.eval_prompts, EVAL_SEED)
    engine, seed = e.engine.without_emulation(), derive_seed(e.seed, "eval", step)
    rollouts = engine.sample(state.model, state.tokenizer, e.task, prompts, 1, seed)
    return {"eval_reward": float(rollouts.rewards_B.mean()), "eval_exact": float(rollouts.exact_B.float().mean())}


def after_update(e: Experiment, state: State) -> None:
    """Let a stateful router variant look at the update that was taken."""
    if changes_routing(e.router):
        for site in find_routers(state.model):
            e.router.after_update(site.module)
