"""Write the report of studies, or of a whole results folder.

python experiments/make_report.py results
python experiments/make_report.py results/side_by_side results/staleness
"""

import sys
from pathlib import Path

from moe_rl.arguments import Arguments
from moe_rl.figures import FORMATS, FigureError
from moe_rl.report import is_study, report_results, report_study
from moe_rl.store import StoreError


def main() -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="studies, or folders that hold studies")
    parser.add_argument("--format", nargs="+", default=["png"], choices=FORMATS, help="formats of figures/")
    chosen = parser.parse_args()
    try:
        for folder in chosen.folders:
            paths = (
                report_study(folder, chosen.format)[1] if is_study(folder) else report_results(folder, chosen.format)
            )
            for path in paths:
                if path.stem == "report":
                    print(path, flush=True)
    except (StoreError, FigureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
