"""What changed in the routing between two checkpoints, on the same text; options: moe_rl/comparison/settings.py.

python experiments/compare_checkpoints.py old=<folder or hub id> new=<folder or hub id> text=<.txt|.jsonl|a task>
"""

import sys

from moe_rl.comparison import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
