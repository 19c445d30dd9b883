"""Each arm's learning rate with the highest mean final reward, for lr_of_arm in a study's config.

python experiments/tuned_rates.py results/tuning
"""

import sys
from pathlib import Path

import pandas as pd

from moe_rl.arguments import Arguments
from moe_rl.measures import run_numbers
from moe_rl.store import StoreError, read_study


def outcomes(folder: Path) -> pd.DataFrame:
    """Mean final reward over seeds (a diverged run: 0), a row an arm, a column a learning rate.

    StoreError where some have fewer runs that have ended: their means are over other seeds.
    """
    study = read_study(folder)
    numbers = run_numbers(study).assign(lr=[float(lr) for lr in study.setting("optim.lr")])
    ended = numbers.pivot_table(index="arm", columns="lr", values="outcome", aggfunc="count", fill_value=0).stack()
    if ended.nunique() > 1:
        (arm, lr), most = ended.idxmin(), ended.max()
        raise StoreError(
            f"{arm} at {lr:g} has {ended.min()} runs that have ended, others {most}; launch {folder} again"
        )
    return numbers.pivot_table(index="arm", columns="lr", values="outcome", aggfunc="mean")


def main(arguments: list[str]) -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("study", type=Path, help="folder of a study that swept optim.lr, such as results/tuning")
    try:
        table = outcomes(parser.parse_args(arguments).study)
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table.round(3).to_string())
    print("\nlr_of_arm:")
    for arm, lr in table.idxmax(axis=1).items():
        print(f"  {arm}: {lr:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
