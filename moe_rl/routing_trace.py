"""RoutingTrace: which experts each token used, and the checks that keep routing and tokens together.

Shapes: see moe_rl.records.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class RoutingError(RuntimeError):
    """Routing that is missing, ambiguous or impossible. The message names the layers or values and what to do."""


def id_dtype(num_experts: int) -> torch.dtype:
    """Narrowest dtype that holds the ids 0..E-1 and can be computed with: uint8 up to 256 experts, else int16."""
    if not 1 <= num_experts <= 32767:
        raise RoutingError(f"{num_experts} experts: expert ids are stored in at most 15 bits")
    return torch.uint8 if num_experts <= 256 else torch.int16


@dataclasses.dataclass(frozen=True)
class RoutingTrace:
    """Which experts each token used in each MoE layer.

    expert_ids_BSLK: uint8 or int16, in the router's own order. Meaningless where valid_BS is False: nothing may be
        read there, and replay lets those tokens route live. An id is never a marker: 0 is an expert.
    valid_BS: True where the routing is known.
    layer_names: the L router modules' paths, in order of execution.
    source: the pass that it was recorded in: rollout, old, new. update: gradient updates taken before that pass.
    extras: what else was asked for, by name: router_logits [B, S, L, E], gates [B, S, L, K], margins [B, S, L, 1].
    """

    expert_ids_BSLK: Tensor
    valid_BS: Tensor
    layer_names: tuple[str, ...]
    num_experts: int
    source: str = ""
    update: int = 0
    extras: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        ids, valid = self.expert_ids_BSLK, self.valid_BS
        if ids.dim() != 4 or valid.dtype != torch.bool or ids.shape[:2] != valid.shape:
            raise RoutingError(
                f"expert ids of shape {tuple(ids.shape)} do not fit a validity mask of shape "
                f"{tuple(valid.shape)} {valid.dtype}"
            )
        if ids.shape[2] != len(self.layer_names):
            raise RoutingError(f"expert ids have {ids.shape[2]} layers, {len(self.layer_names)} layer names are given")
        if ids.dtype != id_dtype(self.num_experts):
            raise RoutingError(
                f"ids of {self.num_experts} experts are stored as {id_dtype(self.num_experts)}, not {ids.dtype}; "
                "use RoutingTrace.from_ids"
            )

    @classmethod
    def from_ids(
        cls,
        expert_ids_BSLK: Tensor,
        valid_BS: Tensor,
        layer_names: Sequence[str],
        num_experts: int,
        source: str = "",
        update: int = 0,
    ) -> RoutingTrace:
        """A trace from ids of any integer dtype, checked before they are narrowed (an id above 255 must not wrap)."""
        known = expert_ids_BSLK[valid_BS]
        _check_ids(known, layer_names, num_experts)
        ids = expert_ids_BSLK.masked_fill(~valid_BS[:, :, None, None], 0).to(id_dtype(num_experts))
        return cls(ids, valid_BS, tuple(layer_names), num_experts, source, update)

    def __repr__(self) -> str:
        """Sizes, not tensors."""
        B, S = self.valid_BS.shape
        extras = "".join(f", {name} {list(values.shape)}" for name, values in self.extras.items())
        return (
            f"RoutingTrace({B} sequences x {S} columns, {int(self.valid_BS.sum())} known, {self.num_layers} layers, "
            f"{self.top_k} of {self.num_experts} experts, source={self.source!r}, update={self.update}{extras})"
        )

    @property
    def top_k(self) -> int:
        return self.expert_ids_BSLK.shape[3]

    @property
    def num_layers(self) -> int:
        return len(self.layer_names)

    def check(self) -> None:
        """Raise RoutingError when a valid row names an expert twice or one that does not exist."""
        _check_ids(self.expert_ids_BSLK[self.valid_BS], self.layer_names, self.num_experts)

    def __getitem__(self, rows: Tensor | slice) -> RoutingTrace:
        """The trace of some sequences; `rows` indexes the batch."""
        return dataclasses.replace(
            self,
            expert_ids_BSLK=self.expert_ids_BSLK[rows],
            valid_BS=self.valid_BS[rows],
            extras={name: values[rows] for name, values in self.extras.items()},
        )

    def columns(self, columns: slice) -> RoutingTrace:
        """The trace of some columns."""
        return dataclasses.replace(
            self,
            expert_ids_BSLK=self.expert_ids_BSLK[:, columns],
            valid_BS=self.valid_BS[:, columns],
            extras={name: values[:, columns] for name, values in self.extras.items()},
        )

    def aligned_to(self, mask_BS: Tensor) -> RoutingTrace:
        """The trace over the columns of `mask_BS`, valid only where that mask is True.

        Columns that were never forwarded (the last sampled token) become invalid, never a made-up id. RoutingError for
        another number of sequences, where known columns would be cut off, and where left padding is known: then the
        trace and the mask number their columns differently; ValueError for what is no mask, such as token ids.
        """
        mask_BS = as_mask(mask_BS)
        B, S = mask_BS.shape
        have_B, have_S = self.valid_BS.shape
        if have_B != B or self.valid_BS[:, S:].any():
            raise RoutingError(f"a trace of {have_B} sequences x {have_S} columns does not fit a mask of {B} x {S}")

        refuse_shifted(self.valid_BS, mask_BS.to(self.valid_BS.device))

        return dataclasses.replace(
            self,
            expert_ids_BSLK=_widen(self.expert_ids_BSLK, S),
            valid_BS=_widen(self.valid_BS, S) & mask_BS.to(self.valid_BS.device),
            extras={name: _widen(values, S) for name, values in self.extras.items()},
        )

    def of_neighbours(self) -> RoutingTrace:
        """Each sequence with the routing of the sequence before it (the first with the last's), extras left out.

        Aligned at the first known token of both, so that left padding shifts nothing; valid where both are known.
        RoutingError for fewer than two sequences.
        """
        B, S = self.valid_BS.shape
        if B < 2:
            raise RoutingError(f"a batch of {B} sequence has no neighbours; give each mini-batch two or more")
        first_B = self.valid_BS.long().argmax(1)
        columns_S = torch.arange(S, device=self.valid_BS.device)
        from_BS = columns_S - first_B[:, None] + first_B.roll(1)[:, None]
        inside_BS = (from_BS >= 0) & (from_BS < S)
        from_BS = from_BS.clamp(0, S - 1)
        known_BS = self.valid_BS.roll(1, 0).gather(1, from_BS)
        ids_BSLK = self.expert_ids_BSLK.roll(1, 0)
        ids_BSLK = ids_BSLK.gather(1, from_BS[:, :, None, None].expand_as(ids_BSLK))
        return dataclasses.replace(
            self, expert_ids_BSLK=ids_BSLK, valid_BS=self.valid_BS & inside_BS & known_BS, extras={}
        )

    @staticmethod
    def cat(traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Traces of equal layers, joined along the batch; columns that one lacks on the right are unknown there."""
        first = traces[0]
        for other in traces[1:]:
            if other.layer_names != first.layer_names or other.num_experts != first.num_experts:
                raise RoutingError("traces of different models cannot be joined")
        common = [name for name in first.extras if all(name in trace.extras for trace in traces)]
        width = max(trace.valid_BS.shape[1] for trace in traces)
        return dataclasses.replace(
            first,
            expert_ids_BSLK=torch.cat([_widen(trace.expert_ids_BSLK, width) for trace in traces]),
            valid_BS=torch.cat([_widen(trace.valid_BS, width) for trace in traces]),
            extras={name: torch.cat([_widen(trace.extras[name], width) for trace in traces]) for name in common},
        )


def _widen(tensor: Tensor, width: int) -> Tensor:
    """`tensor` [B, S, ...] with zeros on the right, or cut there, so that S is `width`."""
    B, S = tensor.shape[:2]
    return torch.cat([tensor[:, :width], tensor.new_zeros(B, max(0, width - S), *tensor.shape[2:])], 1)


def as_mask(mask_BS: Tensor) -> Tensor:
    """A mask of True and False from one of these or of 0 and 1. ValueError for anything else."""
    if mask_BS.dtype != torch.bool and ((mask_BS != 0) & (mask_BS != 1)).any():
        raise ValueError(
            f"a mask holds True and False or 0 and 1, this {mask_BS.dtype} tensor goes from {mask_BS.min().item()} to "
            f"{mask_BS.max().item()}; give the attention mask, not token ids"
        )
    return mask_BS.bool()


def refuse_shifted(known_BS: Tensor, real_BS: Tensor) -> None:
    """RoutingError where trace and mask number their columns differently, so that routing would go to other tokens.

    known_BS: where the trace knows routing. real_BS: the attention mask, of columns from the first on. Routing known in
    left padding tells; and under a narrower mask, real tokens left of all that is known, for then the left padding is
    the trace's. (A trace from behind a pre-filled cache looks like that too, and must be used in its full width.) On
    the right more may be known than is real: generate goes on with the rows that have ended.
    """
    S = min(known_BS.shape[1], real_BS.shape[1])
    padding_BS = (real_BS.cumsum(1) == 0) & real_BS.any(1, keepdim=True)
    shifted_B = (known_BS[:, :S] & padding_BS[:, :S]).any(1)
    if known_BS.shape[1] > S:
        unknown_BS = (known_BS.cumsum(1) == 0) & known_BS.any(1, keepdim=True)
        shifted_B |= (real_BS & unknown_BS[:, :S]).any(1)
    if shifted_B.any():
        row = int(shifted_B.nonzero()[0])
        raise RoutingError(
            f"the left padding of {int(shifted_B.sum())} sequences (first: {row}) differs between a trace of "
            f"{known_BS.shape[1]} columns and a mask of {real_BS.shape[1]}, so their columns are not the same tokens; "
            "record with the same padding and attention mask"
        )


def _check_ids(ids_NLK: Tensor, layer_names: Sequence[str], num_experts: int) -> None:
    """ids_NLK: the known rows only. Runs at every replay: pairs of columns are compared, which sorting takes 4 times as
    long for.
    """
    if not len(ids_NLK):
        return
    # Converted only now: 256 does not fit into uint8, nor into a comparison with it.
    outside_L = (ids_NLK.amin((0, 2)).long() < 0) | (ids_NLK.amax((0, 2)).long() >= num_experts)
    pairs = itertools.combinations(ids_NLK.permute(2, 0, 1).contiguous(), 2)
    twice_NL = torch.zeros_like(ids_NLK[..., 0], dtype=torch.bool)
    for one_NL, other_NL in pairs:
        twice_NL |= one_NL == other_NL
    twice_L = twice_NL.any(0)
    for wrong_L, what in (
        (outside_L, f"an expert id outside 0..{num_experts - 1}"),
        (twice_L, "the same expert twice in one row (zero-filled rows?)"),
    ):
        if wrong_L.any():
            names = [layer_names[i] for i in wrong_L.nonzero().flatten().tolist()]
            raise RoutingError(
                f"{what} in {len(names)} of {len(layer_names)} layers ({names[0]}, ...); mark unknown rows invalid"
            )
