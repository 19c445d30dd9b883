"""Check every MoE family of the installed transformers and write moe_rl/models/FAMILIES.md.

python experiments/family_table.py            # all families: minutes; exits with 1 if one fails
python experiments/family_table.py zaya dbrx  # these only, printed, not written
"""

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "moe_rl" / "models" / "FAMILIES.md"
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

HEAD = """# Record and replay, family by family

Every MoE family of transformers {version}, checked on a tiny random model by `python experiments/family_table.py`,
which writes this file. {exact} families are recorded and replayed exactly, {refused} are refused by name.

{checks}

| family | model | router | MoE layers | chosen | state | checks | remarks |
|---|---|---|---|---|---|---|---|
"""


def main(names: list[str]) -> int:
    from conformance import CHECKS, row
    from families import FAMILIES
    from transformers import __version__

    rows, failures = [], []
    for family in FAMILIES:
        if not names or family.name in names:
            start = time.time()
            try:
                rows.append(row(family))
            except AssertionError as error:
                failures.append(str(error))
            print(f"{time.time() - start:5.1f} s  {family.label}", flush=True)
    print(*(rows if names else []), *failures, sep="\n")
    if failures:
        print(f"{len(failures)} families fail; {TABLE.name} is left as it was")
    elif not names:
        refused = {family.name for family in FAMILIES if family.refused}
        exact = {family.name for family in FAMILIES} - refused
        checks = "\n".join(
            f"- {name}: {' '.join(getattr(check, 'func', check).__doc__.split())}" for name, check in CHECKS.items()
        )
        head = HEAD.format(version=__version__, exact=len(exact), refused=len(refused), checks=checks)
        TABLE.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")
    return bool(failures)


if __name__ == "__main__":
    from moe_rl.arguments import Arguments

    parser = Arguments(description=__doc__)
    parser.add_argument("families", nargs="*", help="names of families; all if none is given")
    raise SystemExit(main(parser.parse_args().families))
