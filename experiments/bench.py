"""Measure costs on this machine.

python experiments/bench.py instrument      # recording and replaying against the plain model: CPU time and memory
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from moe_rl import benchmarks

# command -> (its settings, each a --option; its function from settings to rows)
COMMANDS = {"instrument": (benchmarks.Instrument, benchmarks.instrument)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (settings, run) in COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__.splitlines()[0], description=run.__doc__)
        for field in dataclasses.fields(settings):
            command.add_argument(f"--{field.name}", type=type(field.default), default=field.default, metavar="N")
        command.add_argument("--json", type=Path, help="also write the rows here")
    chosen = vars(parser.parse_args())
    settings, run = COMMANDS[chosen.pop("command")]
    path = chosen.pop("json")
    try:
        rows = run(settings(**chosen))
    except ValueError as error:
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
