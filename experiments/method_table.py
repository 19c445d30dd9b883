"""Write moe_rl/policy_losses/METHODS.md, the table of methods, from the arms and the losses they run.

python experiments/method_table.py
"""

import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from moe_rl.advantage import ADVANTAGES
from moe_rl.arguments import Arguments
from moe_rl.arm import OLD_LOGPROBS, REPLAYS
from moe_rl.cli import settings
from moe_rl.corrections import CORRECTIONS
from moe_rl.reference import ESTIMATORS
from moe_rl.summary import KNOWN_ARMS

TABLE = Path(__file__).resolve().parents[1] / "moe_rl" / "policy_losses" / "METHODS.md"
REDUCTIONS = {
    "sequence_mean": "mean over sequences of the mean over a sequence's tokens",
    "token_mean": "mean over all tokens",
    "token_sum": "mean over sequences of the sum over a sequence's tokens, divided by `length` where there is one",
}
HEAD = """# Methods

Every arm of `conf/arm/`, `python experiments/train.py arm=<arm>`: its loss, what its ratio weighs, and what surrounds
it. Written by `python experiments/method_table.py`; a loss states its ratio and its reduction, and
`tests/test_losses.py` holds it to them. Every formula is in the file of its loss.

"""


def arms() -> list[str]:
    """The names of all arms, the three under comparison first."""
    found = {path.stem for path in Path(settings.config_folder(), "arm").glob("*.yaml")}
    return [*KNOWN_ARMS, *sorted(found - set(KNOWN_ARMS))]


def row(arm: str) -> list[str]:
    """The cells of an arm. `compose` must be initialized."""
    config = compose("config", overrides=[f"arm={arm}"])
    node = config.arm.policy_loss
    loss = settings.build(config).arm.policy_loss
    values = OmegaConf.to_container(node, resolve=False)
    shown = [f"{key} {str(value).strip('${}')}" for key, value in values.items() if key != "_target_"]
    source = re.search(r"Source: (.*?)$", " ".join(type(loss).__doc__.split()), re.M).group(1)
    return [
        f"`{arm}`",
        type(loss).__module__.rpartition(".")[2],
        loss.ratio,
        ", ".join(shown) or "-",
        loss.reduction,
        config.arm.advantage,
        config.arm.replay,
        config.arm.old_logprobs,
        config.arm.correction,
        f"{config.arm.kl} {config.arm.kl_estimator}" if config.arm.kl else "0",
        source.rstrip("."),
    ]


def table() -> str:
    """The text of METHODS.md."""
    with initialize_config_dir(settings.config_folder(), version_base="1.3"):
        rows = [row(arm) for arm in arms()]
    columns = [
        "arm",
        "loss",
        "ratio",
        "settings",
        "reduction",
        "advantage",
        "replay",
        "old logprobs",
        "correction",
        "kl",
        "source",
    ]
    lines = [columns, ["---"] * len(columns), *rows]
    legend = [
        f"\n{title}\n\n" + "".join(f"- `{name}`: {meaning}\n" for name, meaning in meanings.items())
        for title, meanings in (
            ("Reductions:", REDUCTIONS),
            ("Advantages:", ADVANTAGES),
            ("Replay:", REPLAYS),
            ("Old logprobs:", OLD_LOGPROBS),
            ("Corrections, c = old policy / sampler:", CORRECTIONS),
            ("KL to the reference policy, r = reference / new policy:", ESTIMATORS),
        )
    ]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "".join(legend)


if __name__ == "__main__":
    Arguments(description=__doc__).parse_args()
    TABLE.write_text(table(), encoding="utf-8")
