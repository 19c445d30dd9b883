"""One look per arm: colour, line style and marker, the same in every figure of every study."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple


class Look(NamedTuple):
    """Colour, line style and marker of an arm. Any one of the three is enough to tell the known arms apart."""

    color: str
    line: Any
    marker: str

    @property
    def as_line(self) -> dict[str, Any]:
        """As matplotlib's lines take it."""
        return {"color": self.color, "linestyle": self.line, "marker": self.marker}


# Red, yellow and blue of Paul Tol's high-contrast scheme, the yellow darkened for thin lines: safe for colour-blind
# readers, and three clearly different greys in print.
KNOWN = {
    "grpo": Look("#BB5566", "-", "o"),
    "grpo_routing_replay": Look("#D39A16", (0, (5, 1.6)), "s"),
    "gspo": Look("#004488", (0, (6, 1.5, 1.2, 1.5)), "^"),
}
FIELD = {  # the other arms of conf/arm
    "gspo_token": Look("#44AA99", (0, (1.2, 1.2)), "v"),
    "dapo": Look("#882255", (0, (3, 1.2)), "D"),
    "cispo": Look("#117733", (0, (7, 2)), "P"),
    "sapo": Look("#AA4499", (0, (5, 1.2, 1.2, 1.2, 1.2, 1.2)), "*"),
    "gmpo": Look("#555555", (0, (2, 1, 1, 1)), "8"),
    "dr_grpo": Look("#332288", (0, (1.2, 1.2)), "p"),
    "minirl": Look("#661100", (0, (3, 1.2)), "h"),
    "rloo": Look("#999933", (0, (7, 2)), "<"),
    "grpo_r3": Look("#EE7733", (0, (2, 1, 1, 1)), "d"),
    "grpo_shuffled_replay": Look("#BBAA88", (0, (1.2, 1.2)), "H"),
    "grpo_thresholded_replay": Look("#A65628", (0, (7, 2)), "$R$"),
    "grpo_sticky_replay": Look("#C2571A", (0, (5, 1.2, 1.2, 1.2, 1.2, 1.2)), "$Y$"),
    "grpo_engine_logprobs": Look("#6F4C9B", (0, (3, 1.2)), "$E$"),
    "gspo_engine_logprobs": Look("#1B7F79", (0, (3, 1.2)), "$G$"),
    "grpo_tis": Look("#EE99AA", (0, (7, 2)), "$T$"),
    "grpo_icepop": Look("#994455", (0, (2, 1, 1, 1)), "$I$"),
    "grpo_sequence_mask": Look("#997700", (0, (5, 1.2, 1.2, 1.2, 1.2, 1.2)), "$M$"),
    "grpo_kl": Look("#0E7490", (0, (1.2, 1.2)), "$K$"),
    "gmpo_rspo": Look("#7F7F00", (0, (5, 1.2, 1.2, 1.2, 1.2, 1.2)), "$S$"),
    "ppo": Look("#C2185B", (0, (3, 1.2)), "$P$"),
    "gspo_routing_replay": Look("#6699CC", (0, (5, 1.2, 1.2, 1.2, 1.2, 1.2)), ">"),
}
SPARE_COLORS = ("#0077BB", "#994F00", "#7A7ACD", "#228833", "#CC6677", "#222222")
SPARE_LINES = ((0, (1.2, 1.2)), (0, (3, 1.2)), (0, (7, 2)), (0, (5, 1.2, 1.2, 1.2, 1.2, 1.2)))
SPARE_MARKERS = ("<", ">", "p", "h", "d")  # X marks a divergence


def look(arm: str) -> Look:
    """An arm's look. It depends on the name alone, so an arm looks the same in every figure of every study."""
    if arm in KNOWN or arm in FIELD:
        return KNOWN.get(arm) or FIELD[arm]
    digest = hashlib.sha256(arm.encode()).digest()
    return Look(
        SPARE_COLORS[digest[0] % len(SPARE_COLORS)],
        SPARE_LINES[digest[1] % len(SPARE_LINES)],
        SPARE_MARKERS[digest[2] % len(SPARE_MARKERS)],
    )
