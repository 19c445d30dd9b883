"""Measure costs on this machine.

python experiments/bench.py instrument      # recording and replaying against the plain model: CPU time and memory
python experiments/bench.py cycle           # a cycle of moe_rl's loop against TRL's GRPOTrainer; needs the extra trl
python experiments/bench.py scaling --json rows.json --figure scaling.png    # cost against size; 3 minutes
python experiments/bench.py scaling --draw rows.json --figure scaling.png    # the figure again, without measuring
python experiments/bench.py harness         # the loop against its bare calls; runs an hour of a sweep, on two cores
python experiments/bench.py cycle --against experiments/results/bench_cycle.json    # has anything become slower?
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from moe_rl.arguments import Arguments
from moe_rl.benchmarks import cycle, harness, instrument, scaling, turns
from moe_rl.benchmarks import figure as figures


@dataclasses.dataclass(frozen=True)
class Command:
    """settings: each field an --option. run: from settings to rows. draw: writes the rows' figure, if there is one."""

    settings: type
    run: Callable[[Any], list[dict[str, Any]]]
    draw: Callable[[list[dict[str, Any]], Path], None] | None = None


COMMANDS = {
    "instrument": Command(instrument.Instrument, instrument.instrument),
    "cycle": Command(cycle.Cycle, cycle.cycle),
    "scaling": Command(scaling.Scaling, scaling.scaling, figures.write),
    "harness": Command(harness.Harness, harness.harness),
}


def main() -> int:
    chosen = vars(parser().parse_args())
    command = COMMANDS[chosen.pop("command")]
    path, against = chosen.pop("json"), chosen.pop("against")
    figure, drawn = chosen.pop("figure", None), chosen.pop("draw", None)
    try:
        if figure is not None:
            figures.format_of(figure)
        if drawn is not None:
            if figure is None:
                raise ValueError(f"nowhere to draw {drawn} to; add --figure=<name>.png")
            command.draw(json.loads(drawn.read_text())["rows"], figure)
            return 0
        baseline = json.loads(against.read_text()) if against else {"settings": chosen, "rows": []}
        turns.check_baseline(chosen, baseline)
        rows = command.run(command.settings(**chosen))
    except (ValueError, OSError, ImportError, figures.FigureError) as error:
        print(error, file=sys.stderr)
        return 2
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    if path is not None:
        path.write_text(json.dumps({"settings": chosen, "rows": rows}, indent=1) + "\n")
    if figure is not None:
        command.draw(rows, figure)
    worse = turns.regressions(rows, baseline)
    for line in worse:
        print(f"slower or larger than in {against}: {line}", file=sys.stderr)
    return 1 if worse else 0


def parser() -> Arguments:
    parser = Arguments(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        options = commands.add_parser(name, help=command.run.__doc__.splitlines()[0], description=command.run.__doc__)
        for field in dataclasses.fields(command.settings):
            options.add_argument(f"--{field.name}", type=type(field.default), default=field.default, metavar="N")
        options.add_argument("--json", type=Path, help="also write the rows here")
        options.add_argument(
            "--against",
            type=Path,
            help=f"what --json wrote: exit code 1 if a ratio is now over {1 + turns.TOLERANCE} times its",
        )
        if command.draw is not None:
            options.add_argument("--figure", type=Path, help="also draw the rows here, as .png, .svg or .pdf")
            options.add_argument("--draw", type=Path, metavar="ROWS", help="measure nothing: draw what --json wrote")
    return parser


if __name__ == "__main__":
    sys.exit(main())
