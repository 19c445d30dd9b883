"""Markdown from numbers and from names that nobody vouches for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from moe_rl.stats import Estimate


def escape(text: object) -> str:
    """Text that says in markdown what it says: no markup, no HTML, no entity, no second table cell, one line."""
    line = " ".join(str(text).split())
    line = re.sub(r"([\\`*\[\]|~$]|<(?=[\w/!?])|&(?=#?\w+;))", r"\\\1", line)
    line = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line)
    line = re.sub(r"^([#=]|[+-](?=[\s+-]|$))", r"\\\1", line)
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)


def slug(text: str) -> str:
    """The name of a heading's anchor, the same as GitHub's for words, spaces, colons and commas."""
    return re.sub(r"\W+", "-", text.lower()).strip("-") or "section"


def link(text: object, target: str) -> str:
    """A link to a file, given relative to the report, or to an anchor in it (#...)."""
    return f"[{escape(text)}]({quote(target, safe='/#=,+')})"


def image(alt: str, target: str) -> str:
    return f"![{escape(alt)}]({quote(target, safe='/=,+')})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table. Cells are taken as markdown: escape names."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def bullets(items: Iterable[str]) -> str:
    return "".join(f"- {item}\n" for item in items)


def number(value: float, digits: int = 3) -> str:
    """A number in few digits, '-' for none."""
    if not math.isfinite(value):
        return "-"
    if value == round(value) and abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def interval(estimate: Estimate) -> str:
    return _to(number(estimate.low), number(estimate.high)) if math.isfinite(estimate.low) else "-"


def span(values: Iterable[float]) -> str:
    """'256' or '250 to 262': what the finite ones of these values lie between."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "-"
    low, high = (number(bound, 4) for bound in (min(finite), max(finite)))
    return low if low == high else _to(low, high)


def _to(low: str, high: str) -> str:
    return f"{low}\u00a0to\u00a0{high}"  # stays on one line of a table cell


def plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
