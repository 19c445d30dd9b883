"""Clip bounds at which an arm clips a wanted share of tokens, from what a study recorded of it.

python experiments/calibrate_clip.py results/clipping --arm gspo --knobs default --target 0.09
"""

import sys
from pathlib import Path

from moe_rl.arguments import Arguments
from moe_rl.calibration import clip_bounds
from moe_rl.store import StoreError, read_study


def main() -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("study", type=Path, help="folder of a study, such as results/clipping")
    parser.add_argument("--arm", default="gspo")
    parser.add_argument("--target", type=float, required=True, help="share of tokens whose gradient is clipped away")
    parser.add_argument("--level", default="sequence", choices=["sequence", "token"], help="whose ratio is clipped")
    parser.add_argument("--knobs", default="", help="at which the arm ran, as in the folder's name, if at several")
    chosen = parser.parse_args()
    try:
        low, high = clip_bounds(read_study(chosen.study), chosen.arm, chosen.target, chosen.level, chosen.knobs)
    except StoreError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"arm.policy_loss.clip_low={low:.3g} arm.policy_loss.clip_high={high:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
