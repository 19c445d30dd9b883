"""Draw a study's figures and print its summary.

python experiments/make_figures.py results/side_by_side --only reward clip_fraction
"""

import sys
from pathlib import Path

from moe_rl.arguments import Arguments
from moe_rl.figures import FORMATS, FigureError, draw_all, names
from moe_rl.printing import print_summary
from moe_rl.store import StoreError


def main() -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("study", type=Path, help="folder of a study, such as results/side_by_side")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="figures to draw: " + ", ".join(names()))
    parser.add_argument("--format", nargs="+", default=["png", "svg"], choices=FORMATS, help="picture formats")
    chosen = parser.parse_args()
    try:
        study, paths = draw_all(chosen.study, chosen.only, chosen.format)
    except (StoreError, FigureError) as error:
        print(error, file=sys.stderr)
        return 2
    print_summary(study)
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
