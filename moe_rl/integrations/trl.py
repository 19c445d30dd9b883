"""moe_rl inside TRL's GRPOTrainer: routing drift in its log, and GRPO + Routing Replay. Needs the extra `trl`.

    trainer = RoutingReplayGRPOTrainer(model=model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=data)
    trainer.add_callback(RoutingDriftCallback(trainer))
    trainer.train()

Written for the methods of TRL 1.16: another minor version is refused, since what is overridden here is not public.
Tried in one process, without PEFT, vLLM or sharding of the model.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from moe_rl.drift import compare
from moe_rl.models.families import require_routers
from moe_rl.recording import record
from moe_rl.replaying import replay
from moe_rl.routing_trace import RoutingError, RoutingTrace

try:
    import trl
    from trl import GRPOTrainer
except ImportError as error:
    raise ImportError(f"moe_rl.integrations.trl needs TRL 1.16 ({error}); pip install 'moe_rl[trl]'") from error
if trl.__version__.split(".")[:2] != ["1", "16"]:
    raise ImportError(
        f"moe_rl.integrations.trl is written for TRL 1.16, this is {trl.__version__}; pip install 'moe_rl[trl]'"
    )

# Columns of a generation batch: TRL shuffles and splits every tensor of it along the first dimension.
EXPERT_IDS, VALID, TOKENS = "routing_expert_ids", "routing_valid", "routing_token_ids"


class RoutingReplayGRPOTrainer(GRPOTrainer):
    """GRPO whose training forwards use the experts that the old policy chose: `ids_new(t) := ids_old(t)`.

    The pass that computes the old log-probabilities records its routing, which travels in the batch; every training
    forward, and its recomputation in backward under activation checkpointing, replays it. Gates stay live.
    Where TRL makes no such pass (one optimizer step a generation batch: old and new policy are one), the model routes
    live, which is what replay would force. Evaluation and the reference model route live too.

    Raises RoutingError for models without routers that can be replayed, and for a batch whose routing is missing or
    belongs to other tokens.

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, section 5.3.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._scoring: list[tuple[Tensor, RoutingTrace]] | None = None
        self._until_after_backward: contextlib.ExitStack | None = None
        self._recorded: RoutingTrace | None = None
        super().__init__(*args, **kwargs)
        require_routers(self.accelerator.unwrap_model(self.model))

    @property
    def replays(self) -> bool:
        """Whether TRL computes old log-probabilities, that is, whether a policy can differ from the old one."""
        updates = self.args.steps_per_generation * self.num_iterations
        from_engine = self.use_vllm and self.vllm_importance_sampling_correction
        return from_engine or self.args.gradient_accumulation_steps % updates != 0

    # ------------------------------------------------------------------------------------------------ the old policy
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if not (self.model.training and self.replays):
            return super()._generate_and_score_completions(inputs)
        self._scoring = []
        try:
            batch = super()._generate_and_score_completions(inputs)
            old = batch.get("old_per_token_logps")
            traces = [trace for logprobs, trace in self._scoring if logprobs is old]
        finally:
            self._scoring = None
        if len(traces) != 1:
            raise RoutingError(
                f"routing was recorded {len(traces)} times in the pass of the old log-probabilities, not once"
            )
        self._recorded = traces[0]
        return batch | {
            EXPERT_IDS: traces[0].expert_ids_BSLK,
            VALID: traces[0].valid_BS,
            TOKENS: torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        }

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._scoring is None or model is not self.model:  # a training forward, or the reference model
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        with record(self.accelerator.unwrap_model(model), source="old", update=self.state.global_step) as recorder:
            scored = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self._scoring.append((scored[0], recorder.trace))
        return scored

    # ------------------------------------------------------------------------------------------------ the new policy
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a micro-batch; replay ends after backward, which may recompute the routers."""
        with contextlib.ExitStack() as self._until_after_backward:
            try:
                return super().training_step(*args, **kwargs)
            finally:
                self._until_after_backward = None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a micro-batch, with the experts of the old policy in training mode."""
        if self.model.training and self.replays:
            if self._until_after_backward is None:
                raise RoutingError("compute_loss was called outside training_step, so replay cannot cover its backward")
            trace = self._routing(inputs)
            self._until_after_backward.enter_context(replay(self.accelerator.unwrap_model(model), trace))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _routing(self, inputs: dict[str, Any]) -> RoutingTrace:
        """The old policy's routing of a micro-batch; RoutingError where it is missing or of other tokens."""
        missing = [name for name in (EXPERT_IDS, VALID, TOKENS) if inputs.get(name) is None]
        if missing or self._recorded is None:
            raise RoutingError(
                f"the batch has lost its routing ({', '.join(missing)}), so replay would not happen; "
                "carry these columns along with the others"
            )
        if not torch.equal(inputs[TOKENS], torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)):
            raise RoutingError(
                "the routing in the batch belongs to other tokens; shuffle and split its columns with the others"
            )
        recorded = self._recorded
        return RoutingTrace(inputs[EXPERT_IDS], inputs[VALID], recorded.layer_names, recorded.num_experts, "old")


class RoutingDriftCallback(TrainerCallback):
    """Measures how each optimizer step changes the routing of the present rollouts, and adds it to the trainer's log.

    `sequences` of each generation batch, spread over it, are forwarded again after every optimizer step, in evaluation
    mode and with replay off, and compared with the policy before the step (`previous`) and with the one that sampled
    them (`sampled`). Logged as `drift/<reference>/slot_change`, `.../set_change`, `.../any_layer_change`, in [0, 1],
    means over layers (and processes); `rows` keeps every step by layer, as in the table `drift`. Costs one forward of
    so many sequences a step and one a generation batch; changes nothing in the training.

    Raises RoutingError for models without routers and for batches with images.
    """

    def __init__(self, trainer: GRPOTrainer, sequences: int = 16):
        if sequences < 1:
            raise ValueError(f"sequences is {sequences}; set it to 1 or more")
        self.trainer, self.sequences = trainer, sequences
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        require_routers(self.model)
        self.rows: list[dict[str, Any]] = []
        self.references: dict[str, RoutingTrace] = {}
        self._generation: Any = None
        self._tokens_BS, self._attention_BS = torch.empty(0), torch.empty(0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the routing of a new generation batch, before the first step on it: still the policy that sampled."""
        generation = self.trainer._buffered_inputs
        if generation is self._generation:
            return
        self._generation = generation
        if any("pixel_values" in batch for batch in generation):
            raise RoutingError("the generation batch has images; routing is measured on text only")
        self._tokens_BS = self._rows_of(generation, "prompt_ids", "completion_ids")
        self._attention_BS = self._rows_of(generation, "prompt_mask", "completion_mask")
        sampled = self._routing("old", state.global_step)
        self.references = {"previous": sampled, "sampled": sampled}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare, and add to what the trainer logs next."""
        new = self._routing("new", state.global_step)
        for reference, old in self.references.items():
            drift = compare(old, new)
            self.rows.append({"step": state.global_step, "reference": reference} | drift.row())
            means = torch.tensor(
                [drift.slot_change, float(drift.set_change_L.mean()), drift.any_layer_change],
                device=self.trainer.accelerator.device,
            )
            means = self.trainer.accelerator.reduce(means, reduction="mean")
            for name, value in zip(("slot_change", "set_change", "any_layer_change"), means.tolist(), strict=True):
                self.trainer._metrics["train"][f"drift/{reference}/{name}"].append(value)
        self.references["previous"] = new

    def _rows_of(self, generation: list[dict[str, Any]], prompt: str, completion: str) -> Tensor:
        everything_BS = torch.cat([torch.cat([batch[prompt], batch[completion]], 1) for batch in generation])
        count = min(self.sequences, len(everything_BS))
        return everything_BS[torch.linspace(0, len(everything_BS) - 1, count).long()]

    @torch.no_grad()
    def _routing(self, source: str, update: int) -> RoutingTrace:
        """The present routing of the noted sequences, from a forward like TRL's own (it passes no positions)."""
        training = self.model.training
        self.model.eval()
        try:
            with self.trainer.accelerator.autocast(), record(self.model, source=source, update=update) as recorder:
                self.model(
                    input_ids=self._tokens_BS, attention_mask=self._attention_BS, logits_to_keep=1, use_cache=False
                )
        finally:
            self.model.train(training)
        return recorder.trace
