"""Show where the runs of a study stand, or of all studies of a results folder.

python experiments/status.py results/side_by_side
python experiments/status.py results
"""

import sys
from pathlib import Path

from rich.console import Console

from moe_rl.arguments import Arguments
from moe_rl.progress import status_of, table_of
from moe_rl.store import run_folders


def main() -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("folder", type=Path, help="a study, such as results/side_by_side, or a folder of studies")
    folder = parser.parse_args().folder
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    studies = {study: runs for study in [folder, *inside] if (runs := run_folders(study))}
    if not studies:
        print(
            f"error: no runs below {folder}; give the folder of a study that has run, such as results/<study>",
            file=sys.stderr,
        )
        return 2
    console = Console()
    if not console.is_terminal:
        console.width = 200
    for study, runs in studies.items():
        console.print(table_of({run: status_of(run) for run in runs}, str(study)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
