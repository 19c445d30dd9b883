"""What a run is made of: policy, drift meter, preference model and critic, built from its settings."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch

from moe_rl import preference_model
from moe_rl.cold_start import lay_out, warm_up
from moe_rl.critic import Critic
from moe_rl.drift.meter import DriftMeter
from moe_rl.drift.noise_floor import noise_floor
from moe_rl.experiment import ConfigError, Experiment, refuse_without_routers, settings_of
from moe_rl.models.families import find_routers
from moe_rl.policy import make_deterministic
from moe_rl.policy_folder import install_on
from moe_rl.preference_model import PreferenceModel
from moe_rl.provenance import provenance
from moe_rl.reference import snapshot
from moe_rl.routers.base import changes_routing
from moe_rl.state import State
from moe_rl.tasks.base import overlap

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EVAL_SEED = 1_000_003  # evaluation prompts are the same for every seed and arm


def build_state(e: Experiment, cache_dir: str, warm: bool = True) -> tuple[State, dict[str, Any]]:
    """Where a run begins, and what run.json says of how it came there.

    warm=False leaves the cold start out: a checkpoint's weights will replace it.
    """
    model, tokenizer, warmth = build_policy(e, cache_dir, warm)
    optimizer, schedule = e.optim.build(model, e.steps * e.updates)
    drift = build_meter(e, model, tokenizer)
    reward_model, learned = build_preference_model(e, cache_dir)
    critic = build_critic(e, model)
    reference = snapshot(model) if e.arm.kl.on else None
    state = State(model, tokenizer, optimizer, schedule, drift, reward_model, critic, reference)
    return state, {"cold_start": warmth, **learned}


def build_policy(
    e: Experiment, cache_dir: str, warm: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """The policy after its cold start, with the router variant in place; the third is what the cold start was like."""
    torch.set_num_threads(e.launch.threads)
    with settings_of("model"):
        model, tokenizer = e.model.build(e.seed)
    if not find_routers(model):
        refuse_without_routers(e, f"{type(model).__name__} has no MoE layers: ")
    with settings_of("router"):
        install_on(model, e.router, getattr(e.model, "path", ""))
    with settings_of("task"):
        check_lengths(e, model, tokenizer)
    settings = e.cold_start if warm else dataclasses.replace(e.cold_start, steps=0)
    warmth = warm_up(model, tokenizer, e.task, settings, e.seed, cache_dir, forward_facts(e))
    return prepared(e, model), tokenizer, warmth


def require_device(name: str) -> None:
    """ConfigError for a device that this machine does not have; the one that a sweep is launched from need not."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        reason = str(error).splitlines()[0][:120]
        told = f"launch.device is {name!r}, which cannot be used here ({reason}); set launch.device=cpu"
        raise ConfigError(told) from error


def prepared(e: Experiment, model: PreTrainedModel) -> PreTrainedModel:
    """`model` where and how it is trained."""
    model.to(e.launch.device)
    if e.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    make_deterministic(model)
    return model


def facts(e: Experiment, model: PreTrainedModel) -> dict[str, Any]:
    """What run.json says: the label, the sizes that every figure of drift needs, and where it ran."""
    sites = find_routers(model)
    train = e.task.examples("train", e.prompts * e.steps, e.seed)
    return {
        "label": e.arm.label,
        "advantage": e.arm.advantage,
        "replay": e.arm.replay,
        "old_logprobs": e.arm.old_logprobs,
        "correction": e.arm.correction.kind,
        "reward_from": e.reward,
        "kl": e.arm.kl.coefficient,
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


def probe_noise(drift: DriftMeter) -> dict[str, float]:
    """Slot change of the probe when only the way of computing changes: the floor below which drift means nothing."""
    if drift.probe is None:
        return {}
    rows = noise_floor(drift.model, drift.probe.tokens_BS, drift.probe.attention_BS)
    return {row["check"]: sum(row["slot_change"]) / len(row["slot_change"]) for row in rows}


def build_preference_model(e: Experiment, cache_dir: str) -> tuple[PreferenceModel | None, dict[str, Any]]:
    """The learned reward, if that is what is trained on, and what run.json says of it."""
    if e.reward != "preference_model":
        return None, {}
    model, tokenizer = e.model.build(e.seed)
    with settings_of("preference_model"):
        made, told = preference_model.build(model, tokenizer, e.task, e.preference_model, e.seed, cache_dir)
    return made.to(e.launch.device), {"preference_model": told}


def build_critic(e: Experiment, policy: PreTrainedModel) -> Critic | None:
    """The critic, where advantages come from one: a copy of the policy as it is now, without its router variant."""
    if not e.arm.has_critic:
        return None
    model, _ = e.model.build(e.seed)
    model.load_state_dict(policy.state_dict(), strict=False)  # a router variant has weights of its own
    return Critic(prepared(e, model), e.critic).to(e.launch.device)
