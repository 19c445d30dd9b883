"""The seam: while a router's forward runs, its own top-k call over the experts is answered by us.

Everything else in the router (normalisation, scale, casts, autograd) stays the model's own code, so one mechanism
serves every family without a formula per family. Router variants choose here, replay forces here; both nest, and the
innermost answer wins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from moe_rl.models.families import RouterSite
from moe_rl.routing_trace import RoutingError

_TOP_K = (torch.topk, torch.Tensor.topk)
_MASK = (torch.masked_fill, torch.Tensor.masked_fill)


class Selection(TorchFunctionMode):
    """Answers `torch.topk(scores_NE, K)` with `choose(scores_NE, live)`; gathered values keep the scores' gradient.

    `live()` gives the ids that would have been chosen otherwise. `forced_N` marks the tokens whose choice does not
    depend on the scores: for those, a group limit must not zero the scores of experts outside today's groups
    (DeepSeek-V2 gathers its gates from the masked scores, so a forced expert would get gate 0 and no gradient).
    """

    def __init__(
        self, site: RouterSite, choose: Callable[[Tensor, Callable[[], Tensor]], Tensor], forced_N: Tensor | None = None
    ):
        super().__init__()
        self.site, self.choose, self.forced_N = site, choose, forced_N
        self.calls = 0
        self.group_masked: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOP_K:
            scores = args[0] if args else kwargs["input"]
            k = args[1] if len(args) > 1 else kwargs["k"]
            # The dimensions tell the choice of experts from the scoring of expert groups, [N, groups, E/groups].
            if (
                k == self.site.top_k
                and scores.dim() == self.site.scores_dim
                and scores.shape[-1] == self.site.num_experts
            ):
                return self._answer(func, scores, args, kwargs)
        elif (
            self.forced_N is not None
            and func in _MASK
            and args
            and args[0].dim() == 2
            and args[0].shape[-1] == self.site.num_experts
        ):
            masked = func(*args, **kwargs)
            mixed = torch.where(self.forced_N[:, None], args[0], masked)
            self.group_masked = (mixed, masked)
            return mixed
        return func(*args, **kwargs)

    def _answer(self, func: Any, scores: Tensor, args: Any, kwargs: Any) -> Any:
        self.calls += 1

        def live() -> Tensor:
            if self.group_masked is not None and scores is self.group_masked[0]:
                ids = func(self.group_masked[1], *args[1:], **{k: v for k, v in kwargs.items() if k != "input"}).indices
            else:
                ids = func(*args, **kwargs).indices
            return ids.reshape(-1, self.site.top_k)

        flat_NE = scores.reshape(-1, self.site.num_experts)
        ids = self.choose(flat_NE, live).view(*scores.shape[:-1], self.site.top_k)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def check_called_once(self) -> None:
        if self.calls != 1:
            raise RoutingError(
                f"{self.site.name} ({type(self.site.module).__name__}) chose experts {self.calls} times with "
                "top-k in one forward, not once; this family needs an entry in moe_rl/models/families.py"
            )


def around(
    site: RouterSite, enter: Callable[[], Selection | None], leave: Callable[[Selection | None, Any], Any]
) -> list[Callable[[], None]]:
    """Run `enter` before and `leave` after each forward of a router, with the Selection in force between them.

    Returns the functions that remove the hooks. Later calls nest inside earlier ones. The hooks act on this very module
    only: a deepcopy of the model carries them, but there they do nothing.
    """
    active: list[Selection | None] = []

    def drop_leftovers() -> None:
        """A KeyboardInterrupt in a router runs no hooks: what it left in force must answer nothing more."""
        for selection in [selection for selection in active if selection is not None and _take_off(selection)]:
            active.remove(selection)

    def before(module: nn.Module, args: Any) -> None:
        if module is site.module:
            drop_leftovers()
            selection = enter()
            if selection is not None:
                selection.__enter__()
            active.append(selection)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if module is not site.module or not active:
            return None
        selection = active.pop()
        if selection is not None:
            selection.__exit__(None, None, None)
        if output is None:  # the forward raised: only clean up
            return None
        if selection is not None:
            selection.check_called_once()
        return leave(selection, output)

    return [
        drop_leftovers,
        site.module.register_forward_pre_hook(before).remove,
        # Prepended, so that the last to enter is the first to leave.
        site.module.register_forward_hook(after, prepend=True, always_call=True).remove,
    ]


def _take_off(selection: Selection) -> bool:
    """Take a selection out of the modes in force in this thread, wherever it stands; False if it is not among them."""
    if not any(mode is selection for mode in _get_current_function_mode_stack()):
        return False
    above = []
    while (mode := _pop_mode()) is not selection:
        above.append(mode)
    for mode in reversed(above):
        _push_mode(mode)
    return True
