"""Pack studies into a few small files to keep.

python experiments/pack_study.py results/side_by_side --to packed
"""

import sys
from pathlib import Path

import pandas as pd

from moe_rl.arguments import Arguments
from moe_rl.measures import run_numbers
from moe_rl.store import StoreError, pack, read_study
from moe_rl.summary import summary_table


def main() -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("studies", type=Path, nargs="+", help="folders of studies, such as results/side_by_side")
    parser.add_argument("--to", type=Path, default=Path("experiments/results"), help="where <study>/ is written")
    parser.add_argument("--limit-kb", type=int, default=300, help="thin updates and drift until a study is this small")
    chosen = parser.parse_args()
    try:
        for folder in chosen.studies:
            print(pack_one(folder, chosen.to / folder.resolve().name, chosen.limit_kb))
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def pack_one(folder: Path, target: Path, limit_kb: int) -> str:
    """Pack a study and read it back; returns what was done. StoreError when its summary is not the same any more."""
    study = read_study(folder)
    paths = pack(study, target, run_numbers(study), 1000 * limit_kb)
    packed = read_study(target)
    try:
        pd.testing.assert_frame_equal(summary_table(study), summary_table(packed), rtol=1e-6, check_dtype=False)
    except AssertionError as error:
        raise StoreError(f"{target} does not give the summary of {folder}: {str(error).splitlines()[0]}") from error
    size = sum(path.stat().st_size for path in paths)
    return f"{target}: {len(study.runs)} runs, {size / 1000:.0f} kB" + (f"; {packed.thinned}" if packed.thinned else "")


if __name__ == "__main__":
    sys.exit(main())
