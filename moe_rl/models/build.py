"""A model and its tokenizer: tiny from a config, or real from a checkpoint; stock transformers classes both."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_rl.models import experts
from moe_rl.models.configs import FAMILIES, common_fields
from moe_rl.models.tokenizer import character_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SIZES = ("layers", "hidden_size", "heads", "experts", "top_k", "expert_size", "expert_groups", "max_positions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiny:
    """A small model of a stock family with random weights, and the character tokenizer.

    A token passes `top_k` of `experts` feed-forward blocks of width `expert_size` in each of `layers` layers; the dense
    family has one block of width top_k * expert_size instead: as many active weights, no router. `expert_groups` is
    deepseek_v3's: experts are chosen from the better half of so many groups. Sizes in features, lengths in tokens.
    """

    family: str = "qwen3_moe"  # deepseek_v3, dense, gpt_oss, mixtral, olmoe or qwen3_moe
    layers: int = 8
    hidden_size: int = 64
    heads: int = 4
    experts: int = 32
    top_k: int = 4
    expert_size: int = 32
    expert_groups: int = 1
    max_positions: int = 256
    initializer_range: float = 0.02
    experts_implementation: str = "grouped_bag"  # grouped_bag, grouped_mm, eager or megablocks (see models/experts.py)
    dtype: str = "float32"  # float32 or bfloat16

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family is {self.family!r}; choose one of {', '.join(sorted(FAMILIES))}")
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; set it to 1 or more")
        if self.initializer_range <= 0:
            raise ValueError(
                f"initializer_range is {self.initializer_range}; routers need random weights, use 0.02 or so"
            )
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, more than the {self.experts} experts; lower top_k or add experts")
        if self.top_k == 1 and self.family not in ("olmoe", "dense"):
            raise ValueError(f"top_k is 1, and {self.family} scales a single gate to 1: its router cannot learn; use 2")
        multiple = self.heads * (4 if self.family == "deepseek_v3" else 2)  # rotary features come in pairs
        if self.hidden_size % multiple:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide into {self.heads} heads of {self.family}; "
                f"make it a multiple of {multiple}"
            )
        self._check_groups()
        _check_dtype(self.dtype)
        _check_experts_implementation(self.experts_implementation, self.dtype)
        grain = 16 // DTYPES[self.dtype].itemsize  # torch's grouped product wants rows of whole 16 bytes
        if self.experts_implementation in ("grouped_mm", "grouped_bag") and self.family != "dense":
            for name in ("hidden_size", "expert_size"):
                if getattr(self, name) % grain:
                    raise ValueError(
                        f"{name} is {getattr(self, name)}, {self.experts_implementation} in {self.dtype} needs a "
                        f"multiple of {grain}; change it, or set experts_implementation to eager"
                    )

    def _check_groups(self) -> None:
        groups = self.expert_groups
        if groups == 1:
            return
        if self.family != "deepseek_v3":
            raise ValueError(f"expert_groups is {groups}, but {self.family} has no groups; set it to 1")
        size, kept = self.experts // groups, groups // 2
        if self.experts % groups or size < 2 or self.top_k > size * kept:
            raise ValueError(
                f"{self.experts} experts in {groups} groups, of which {kept} are kept, cannot give top_k {self.top_k}; "
                "make experts a multiple of expert_groups, with 2 or more a group and top_k of them kept"
            )

    def build(self, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model (in eval mode, on the CPU) and its tokenizer; weights are a function of the settings and `seed`.

        The caller's random state is left as it was. bfloat16 weights are the rounded float32 ones.
        """
        from transformers import AutoModelForCausalLM

        tokenizer = character_tokenizer()
        tokenizer.model_max_length = self.max_positions
        config = FAMILIES[self.family](self, common_fields(self, tokenizer))
        with _seeded(seed):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _cast(model, DTYPES[self.dtype])
        _set_experts_implementation(model, self.experts_implementation)
        _sample_as_trained(model, tokenizer)
        return model.eval(), tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A trained model and its tokenizer from a local folder or a hub id; safetensors only, no code from outside.

    `max_positions` is the longest sequence in tokens; 0 means as many as the model was made for.
    """

    path: str = ""
    revision: str = "main"
    dtype: str = "bfloat16"  # float32 or bfloat16
    experts_implementation: str = "grouped_mm"  # grouped_bag, grouped_mm, eager or megablocks (see models/experts.py)
    max_positions: int = 0

    def __post_init__(self) -> None:
        if self.max_positions < 0:
            raise ValueError(f"max_positions is {self.max_positions}; set it to 1 or more, or 0 for the model's own")
        _check_dtype(self.dtype)
        _check_experts_implementation(self.experts_implementation, self.dtype)

    def build(self, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model (in eval mode, on the CPU) and its tokenizer, padding on the left.

        `seed` changes nothing: all weights come from the checkpoint. Raises ValueError for a checkpoint that is
        missing, incomplete, without safetensors, or unreachable.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = _source(self.path)
        known = {"revision": self.revision, "trust_remote_code": False}
        try:
            with _seeded(seed):
                model, loading = AutoModelForCausalLM.from_pretrained(
                    source, use_safetensors=True, dtype=DTYPES[self.dtype], output_loading_info=True, **known
                )
            tokenizer = AutoTokenizer.from_pretrained(source, **known)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"cannot load {source!r}: {reason}; set model.path to a folder or hub id that this machine can reach"
            ) from error
        if loading["missing_keys"] or loading["mismatched_keys"]:
            lacking = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
            raise ValueError(f"{source!r} lacks {len(lacking)} weights of {type(model).__name__}, first {lacking[0]}")
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and self.max_positions > positions:
            raise ValueError(f"max_positions is {self.max_positions}, {source!r} was made for {positions}; lower it")
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {source!r} has no end token; add eos_token to its tokenizer_config.json"
            )
        rows = model.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > rows:
            raise ValueError(
                f"the tokenizer of {source!r} has {len(tokenizer)} tokens, the model {rows}; take both from one place"
            )
        tokenizer.model_max_length = self.max_positions or positions or tokenizer.model_max_length
        tokenizer.padding_side = "left"
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        _set_experts_implementation(model, self.experts_implementation)
        _sample_as_trained(model, tokenizer)
        return model.eval(), tokenizer


# ------------------------------------------------------------------------------------------------------- shared pieces
@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Global torch draws inside the block come from `seed`; the caller's random state is put back after it."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")


def _check_experts_implementation(name: str, dtype: str) -> None:
    if name == "batched_mm":
        raise ValueError("experts_implementation batched_mm copies weights for every token; use grouped_bag or eager")
    if name == experts.NAME:
        try:
            experts.require_megablocks()
        except ImportError as error:
            raise ValueError(str(error)) from error
        if DTYPES[dtype] not in experts.DTYPES:
            raise ValueError(f"experts_implementation megablocks computes bfloat16 only, dtype is {dtype}; change one")


def _set_experts_implementation(model: PreTrainedModel, name: str) -> None:
    """Choose how experts are computed; ValueError for a name that nobody registered.

    A class that offers no choice (dense models, a few MoE families) computes them its own way.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    import moe_rl.models.grouped_bag  # noqa: F401 (registers itself)

    if name == experts.NAME:
        experts.use_megablocks(model)
    if name != "eager" and name not in ALL_EXPERTS_FUNCTIONS:
        raise ValueError(
            f"experts_implementation is {name!r}; choose grouped_bag, grouped_mm or eager, or megablocks on CUDA"
        )
    if model._can_set_experts_implementation():
        model.set_experts_implementation(name)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round weights to `dtype`, except those that the family keeps in float32, as from_pretrained would."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if not any(re.search(rf"(^|\.){re.escape(part)}($|\.)", name) for part in kept):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _source(path: str) -> str:
    """A usable `from_pretrained` source; ValueError for a local folder that is missing or has no safetensors."""
    if not path:
        raise ValueError("the checkpoint has no path; set model.path=<folder or hub id>")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.startswith(("/", ".", "~")) or path.count("/") != 1 or folder.exists():
            raise ValueError(f"{path!r} is no folder; set model.path=<folder with config.json and *.safetensors>")
        return path
    if not any(folder.glob("*.safetensors")):
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:4]) or "nothing"
        raise ValueError(f"{path!r} has no *.safetensors (it has {found}); save it with safe serialization first")
    return str(folder)


def _sample_as_trained(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make plain `generate` draw from the model's own distribution: no top-k, no top-p, temperature 1.

    Checkpoints bring sampling settings of their own, and the library's default keeps the 50 likeliest tokens: sampled
    and trained log-probabilities would disagree.
    """
    from transformers import GenerationConfig

    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id if ends is None else ends,
        pad_token_id=tokenizer.pad_token_id,
    )
