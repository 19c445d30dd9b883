"""The model's own router."""

from __future__ import annotations

import dataclasses

from moe_rl.routers.base import Router


@dataclasses.dataclass(frozen=True, kw_only=True)
class Native(Router):
    """The model routes as it was made to."""
