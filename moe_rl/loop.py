"""The experiment: rollouts, advantages, updates, drift; step after step, one line per arrow of the pipeline."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moe_rl import checkpoint, preference_model
from moe_rl.advantage import equal_group_share, group_advantages
from moe_rl.cold_start import lay_out, warm_up
from moe_rl.config import ConfigError, Experiment, settings_of
from moe_rl.corrections import tails
from moe_rl.drift import compare
from moe_rl.drift_meter import DriftMeter
from moe_rl.journal import Journal
from moe_rl.models.families import find_routers
from moe_rl.noise_floor import noise_floor
from moe_rl.preference_model import PreferenceModel
from moe_rl.provenance import provenance
from moe_rl.records import Rollouts, RoutingTrace
from moe_rl.reference import snapshot
from moe_rl.routers.base import changes_routing, install
from moe_rl.shaping import equal_groups, overlong_penalty, replace_equal_groups
from moe_rl.store import RunWriter
from moe_rl.tasks.base import overlap
from moe_rl.update import MiniBatch, make_deterministic, old_pass, split_rows, take_update

FIRST_EXTRA_ITEM = 5 * 10**8  # prompts of dynamic sampling's further rounds: no step's own, nor the cold start's
REFERENCE = "reference."
EVAL_SEED = 1_000_003  # evaluation prompts are the same for every seed and arm


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
    model, tokenizer, warmth = build_policy(e, cache_dir, warm=not writer.resumes)
    optimizer, schedule = e.optim.build(model, e.steps * e.updates)
    drift = build_meter(e, model, tokenizer)
    judge, judged = build_judge(e, cache_dir)
    reference = snapshot(model) if e.kl.on else None
    if writer.resumes:
        progress, kept = checkpoint.load(writer.checkpoint, model, optimizer, schedule)
        journal.go_on(progress)
        start, reference = split_kept(kept)
        drift.resume(start)
    else:
        writer.describe(**facts(e, model), cold_start=warmth, **judged, noise_floor=noise(drift))
        yield journal.end_step({"step": 0, **evaluate(e, model, tokenizer, 0)}, None)
    for step in range(journal.progress["step"] + 1, e.steps + 1):
        journal.begin_step()
        rollouts, sampled = sample_step(e, model, tokenizer, judge, step)
        advantages_B = group_advantages(rollouts.training_rewards_B, rollouts.group_ids_B, e.advantage)
        journal.lap("rollout_s")
        rows = split_rows(len(rollouts), e.updates, derive_seed(e.seed, "split", step))
        keep_logits = e.optim.router_kl > 0 or e.correction.needs_routers
        batches = old_pass(
            model, rollouts, advantages_B, rows, e.micro_batch, e.replay, e.old_logprobs, keep_logits, reference
        )
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
            )
            after_update(e, model)
            journal.lap("update_s")
            writer.append("updates", {"step": step, "update": number, **update})
            if not (math.isfinite(update["loss"]) and math.isfinite(update["grad_norm"])):
                return journal.diverged(step, number, update)
            writer.append("drift", *drift.after_update(step, number))
            journal.lap("drift_s")
        drift.write_traces(writer.folder, step)
        row = {"step": step, **journal.count(sampled), **describe(e, rollouts, sampled, batches)}
        if step == e.steps or (e.eval_every and step % e.eval_every == 0):
            row |= evaluate(e, model, tokenizer, step)
        yield journal.end_step(row, drift.slot_change)
        if e.launch.checkpoint_every and step % e.launch.checkpoint_every == 0:
            checkpoint.save(
                writer.checkpoint, model, optimizer, schedule, journal.progress, kept_state(drift, reference)
            )
    if e.launch.keep_policy:
        model.save_pretrained(writer.folder / "policy")
        tokenizer.save_pretrained(writer.folder / "policy")
    return journal.finished()


def kept_state(drift: DriftMeter, reference: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps beside the policy: the drift meter's start and the reference policy, if there is one."""
    return drift.state() | {f"{REFERENCE}{name}": tensor for name, tensor in (reference or {}).items()}


def split_kept(kept: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
    """The reverse: (the drift meter's start, the reference policy or None)."""
    reference = {name.removeprefix(REFERENCE): x for name, x in kept.items() if name.startswith(REFERENCE)}
    return {name: x for name, x in kept.items() if not name.startswith(REFERENCE)}, reference or None


def build_policy(
    e: Experiment, cache_dir: str, warm: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """The policy after its cold start, with the router variant in place; the third is what the cold start was like.

    warm=False leaves the cold start out: a checkpoint's weights will replace it.
    """
    torch.set_num_threads(e.launch.threads)
    with settings_of("model"):
        model, tokenizer = e.model.build(e.seed)
    if not find_routers(model) and needs_routers(e):
        raise ConfigError(
            f"{type(model).__name__} has no MoE layers; set arm.replay=none, router=native, optim.trains=all, "
            "optim.router_lr=1, optim.balance_loss=0, optim.router_kl=0, arm.correction=none and engine.router_noise=0"
        )
    install(model, e.router)
    with settings_of("task"):
        check_lengths(e, model, tokenizer)
    settings = e.cold_start if warm else dataclasses.replace(e.cold_start, steps=0)
    warmth = warm_up(model, tokenizer, e.task, settings, e.seed, cache_dir, forward_facts(e))
    model.to(e.launch.device)
    if e.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    make_deterministic(model)
    return model, tokenizer, warmth


def needs_routers(e: Experiment) -> bool:
    """Whether some setting makes no sense on a dense model."""
    settings = e.optim.needs_routers or e.correction.needs_routers or e.engine.router_noise > 0
    return e.replay != "none" or changes_routing(e.router) or settings


def facts(e: Experiment, model: PreTrainedModel) -> dict[str, Any]:
    """What run.json says: the label, the sizes that every figure of drift needs, and where it ran."""
    sites = find_routers(model)
    train = e.task.examples("train", e.prompts * e.steps, e.seed)
    return {
        "label": e.label,
        "advantage": e.advantage,
        "replay": e.replay,
        "old_logprobs": e.old_logprobs,
        "correction": e.correction.kind,
        "reward_from": e.reward,
        "kl": e.kl.coefficient,
        "num_layers": len(sites),
        "num_experts": max((site.num_experts for site in sites), default=0),
        "top_k": sites[0].top_k if sites else 0,
        "updates_per_step": e.updates,
        "steps": e.steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_class": type(model).__name__,
        "eval_overlap": overlap(train, e.task.examples("eval", e.eval_prompts, EVAL_SEED)),
        **provenance(),
    }


def forward_facts(e: Experiment) -> dict[str, str]:
    """What decides the warm-up and cannot be seen on the model: the router variant, its settings and its code."""
    if not changes_routing(e.router):
        return {}
    return {"router": repr(e.router), "router_source": inspect.getsource(sys.modules[type(e.router).__module__])}


def check_lengths(e: Experiment, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """ConfigError, before anything is trained, for answers that cannot be given or prompts that cannot be read."""
    examples = e.task.examples("train", 256, e.seed) + e.task.examples("eval", min(256, e.eval_prompts), EVAL_SEED)
    longest = max(len(tokenizer(x.answer, add_special_tokens=False)["input_ids"]) for x in examples) + 1
    if longest > e.engine.max_new_tokens:
        raise ConfigError(
            f"answers have up to {longest} tokens with the end-of-sequence token, responses at most "
            f"{e.engine.max_new_tokens}; set engine.max_new_tokens={longest} or more"
        )
    width = max(len(tokenizer(x.prompt, add_special_tokens=False)["input_ids"]) for x in examples)
    limit = model.config.get_text_config().max_position_embeddings
    if width + e.engine.max_new_tokens > limit:
        raise ConfigError(
            f"a prompt of {width} tokens and {e.engine.max_new_tokens} new ones exceed the model's {limit} positions; "
            "shorten the prompts, or lower engine.max_new_tokens"
        )


def build_meter(e: Experiment, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> DriftMeter:
    """The drift meter; of a dense model it measures nothing. Its probe: evaluation prompts with their right answers."""
    examples = e.task.examples("eval", max(1, e.drift.probe), EVAL_SEED)
    tokens, attention, _ = lay_out(tokenizer, examples, [example.answer for example in examples])
    settings = e.drift if find_routers(model) else dataclasses.replace(e.drift, every=0)
    return DriftMeter(model, settings, (tokens.to(model.device), attention.to(model.device)))


def noise(drift: DriftMeter) -> dict[str, float]:
    """Slot change of the probe when only the way of computing changes: the floor below which drift means nothing."""
    if drift.probe is None:
        return {}
    rows = noise_floor(drift.model, drift.probe.tokens_BS, drift.probe.attention_BS)
    return {row["check"]: sum(row["slot_change"]) / len(row["slot_change"]) for row in rows}


def build_judge(e: Experiment, cache_dir: str) -> tuple[PreferenceModel | None, dict[str, Any]]:
    """The learned reward, if that is what is trained on, and what run.json says of it."""
    if e.reward != "preference_model":
        return None, {}
    model, tokenizer = e.model.build(e.seed)
    with settings_of("preference_model"):
        judge, told = preference_model.build(model, tokenizer, e.task, e.preference_model, e.seed, cache_dir)
    return judge.to(e.launch.device), {"preference_model": told}


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
