"""Show where the runs of a study stand.

python experiments/status.py results/side_by_side
"""

import sys
from pathlib import Path

from rich.console import Console

from moe_rl.arguments import Arguments
from moe_rl.progress import status_of, table_of
from moe_rl.store import run_folders


def main() -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("study", type=Path, help="folder of a study, such as results/side_by_side")
    study = parser.parse_args().study
    folders = run_folders(study)
    if not folders:
        print(
            f"error: no runs below {study}; give the folder of a study that has run, such as results/<study>",
            file=sys.stderr,
        )
        return 2
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table_of({folder: status_of(folder) for folder in folders}, str(study)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
