"""Train one arm, or a sweep of them; see README.md.

python experiments/train.py arm=gspo seed=1 optim.lr=2e-4
python experiments/train.py -m arm=grpo,grpo_routing_replay,gspo seed=0,1,2
python experiments/train.py study=side_by_side
"""

from moe_rl.cli import train

if __name__ == "__main__":
    train()
