"""Measure costs on this machine.

python experiments/bench.py instrument      # recording and replaying against the plain model: CPU time and memory
python experiments/bench.py cycle           # a cycle of moe_rl's loop against TRL's GRPOTrainer; needs the extra trl
python experiments/bench.py cycle --against experiments/results/bench_cycle.json    # has anything become slower?
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from moe_rl import benchmark_cycle, benchmarks

# command -> (its settings, each a --option; its function from settings to rows)
COMMANDS = {
    "instrument": (benchmarks.Instrument, benchmarks.instrument),
    "cycle": (benchmark_cycle.Cycle, benchmark_cycle.cycle),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (settings, run) in COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__.splitlines()[0], description=run.__doc__)
        for field in dataclasses.fields(settings):
            command.add_argument(f"--{field.name}", type=type(field.default), default=field.default, metavar="N")
        command.add_argument("--json", type=Path, help="also write the rows here")
        command.add_argument(
            "--against",
            type=Path,
            help=f"what --json wrote: exit code 1 if a ratio is now over {1 + benchmarks.TOLERANCE} times its",
        )
    chosen = vars(parser.parse_args())
    settings, run = COMMANDS[chosen.pop("command")]
    path, against = chosen.pop("json"), chosen.pop("against")
    try:
        baseline = json.loads(against.read_text()) if against else {"settings": chosen, "rows": []}
        benchmarks.check_baseline(chosen, baseline)
        rows = run(settings(**chosen))
    except (ValueError, OSError, ImportError) as error:
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
    worse = benchmarks.regressions(rows, baseline)
    for line in worse:
        print(f"slower or larger than in {against}: {line}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
