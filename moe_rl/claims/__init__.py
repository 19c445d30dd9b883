"""The claims under test: one file a claim, found by itself. Its verdict comes from its rule and the data alone.

A claim's file has `CLAIM` (what was said, the measure, the rule in words) and `judge(studies) -> Finding`, which gets
the studies that were run, by name, and at least one of those that it reads.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from moe_rl.claims.base import (
    NOT_RUN,
    NOT_SUPPORTED,
    NOT_TESTABLE,
    SUPPORTED,
    VERDICTS,
    Claim,
    Effect,
    Finding,
    Judgement,
    not_run,
)
from moe_rl.store import Study

__all__ = [
    "NOT_RUN", "NOT_SUPPORTED", "NOT_TESTABLE", "SUPPORTED", "VERDICTS", "Claim", "Effect", "Finding", "Judgement",
    "judge", "judge_all", "names",
]  # fmt: skip


def names() -> list[str]:
    """All claims, by walking this package; `base` and files whose name starts with _ are what they share."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if name != "base" and not name.startswith("_"))


def judge(name: str, studies: Mapping[str, Study]) -> tuple[Claim, Finding]:
    """A claim and what the studies say on it. Without any study that it reads, it is `not run`."""
    module = importlib.import_module(f"{__name__}.{name}")
    claim: Claim = module.CLAIM
    if not any(study in studies for study in claim.studies):
        return claim, not_run(*claim.studies)
    found: Finding = module.judge(studies)
    return claim, found


def judge_all(studies: Mapping[str, Study]) -> list[tuple[Claim, Finding]]:
    """Every claim with its finding, in the order of their ids."""
    return [judge(name, studies) for name in names()]
