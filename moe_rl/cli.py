"""`python experiments/train.py`: one run, a sweep (-m), or a study."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from moe_rl import config as settings
from moe_rl.checkpoint import CheckpointError
from moe_rl.cold_start import ColdStartError
from moe_rl.loggers.base import mirror
from moe_rl.manual import known_settings, manual, nearest
from moe_rl.routing_trace import RoutingError
from moe_rl.store import StoreError, open_run, run_folder, settings_name, state_of

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# What a user can put right. Anything else is a fault of the program and keeps its traceback.
USER_ERRORS = (settings.ConfigError, StoreError, ColdStartError, CheckpointError, RoutingError)

INTERRUPTED = "interrupted; the same command goes on from the last checkpoint (launch.checkpoint_every)"
# Options with a value behind them.
VALUED = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--package", "-p"}


def fail(message: str) -> NoReturn:
    """Print an error as one line and exit with code 2."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    relevant = [
        line
        for line in lines
        if line not in settings.PARTS
        and not line.startswith(("provider=", "full_key:", "object_type=", "Config search"))
    ]
    print(f"error: {' '.join(relevant)}", file=sys.stderr)
    raise SystemExit(2)


sys.path.append(str(Path(__file__).parent / "plugins"))  # where Hydra finds moe_rl's launcher and sweeper
try:
    settings.register()
except TypeError as error:  # a file of a family that is no variant: half written, say
    fail(str(error))
for group, node in {
    "hydra/launcher": {"_target_": "hydra_plugins.moe_rl_local.LocalLauncher"},
    "hydra/sweeper": BasicSweeperConf(_target_="hydra_plugins.moe_rl_local.LocalSweeper"),
}.items():
    ConfigStore.instance().store(group=group, name="moe_rl", node=node)


def help_text(topic: str, *, _root_: DictConfig) -> str:
    """What --help prints; Hydra takes a $ in it for a variable of its own."""
    shown = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    try:
        return manual(topic, GlobalHydra.instance().config_loader(), shown).replace("$", "$$")
    except ValueError as error:
        fail(str(error))


OmegaConf.register_new_resolver("moe_rl_manual", help_text, replace=True)


def run_one(config: DictConfig, varied: dict[str, Any]) -> None:
    """Train the run that `config` describes, unless it is finished. varied: the settings that name its folder."""
    from moe_rl import assembly, loop

    experiment = settings.build(config)
    assembly.require_device(experiment.launch.device)
    folder = run_folder(config.launch.results_dir, experiment.study_name, experiment.arm.label, varied, experiment.seed)
    show = print_step if config.launch.progress else lambda row: None
    identity = settings.identity(config)
    with open_run(folder, identity, settings_name(varied)) as writer:
        if writer is None:
            print(f"{state_of(folder)} before: {folder}")
            return
        if config.launch.progress:  # the first step is a while away
            begins = f"starts, {experiment.cold_start.steps} steps of cold start come first unless they are kept"
            print(f"{'goes on' if writer.resumes else begins}: {folder}", flush=True)
        mirrored = mirror(experiment.logger, folder, experiment.study_name, identity, experiment.updates)
        with mirrored as writer.mirror:
            state = loop.run(experiment, writer, f"{config.launch.results_dir}/.cache/cold_start", show)
    print(f"{state}: {folder}")


def print_step(row: dict[str, Any]) -> None:
    shown = {
        "step": "4d",
        "reward": ".3f",
        "eval_reward": ".3f",
        "entropy": ".3f",
        "slot_change": ".2%",
        "cpu_s": ".1f",
    }
    print(
        "  ".join(f"{key} {row[key]:{digits}}" for key, digits in shown.items() if row.get(key) is not None), flush=True
    )


@hydra.main(version_base="1.3", config_path=settings.config_folder(), config_name="config")
def _main(config: DictConfig) -> None:
    try:
        overrides = HydraConfig.get().overrides.task
        settings.settle(config, overrides)
        run_one(config, settings.knobs(config, overrides))
    except USER_ERRORS as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # of a sweep by another launcher: it must outlive this run
            raise
        fail(str(error))  # here already: Hydra would print a line of its own before ours


def _meant(key: str, unknown: bool) -> str:
    """What to do about a setting that was refused. key: of what was given, as far as Hydra could follow it.
    unknown: what was chosen has no such setting; else its value was refused."""
    given = [word.partition("=")[0] for word in sys.argv[1:]]
    name = next((word for word in given if word == key or word.startswith(f"{key}.")), key)
    known = known_settings()
    if unknown and known.get(name):
        return f"a setting of {', '.join(known[name])}"
    meant = [] if name in known else nearest(name)
    return f"did you mean {' or '.join(meant)}?" if meant else "--help shows every setting"


def for_hydra(words: list[str]) -> list[str]:
    """The command line as Hydra reads it: options before settings, and the bare word of --help, of which Hydra knows
    nothing, as a setting. A setting's name will do for its group."""
    behind = {i + 1 for i, word in enumerate(words) if word in VALUED}
    if {"--help", "-h"} & set(words):
        topic = {i for i, word in enumerate(words) if i not in behind and re.fullmatch(r"\w+(\.\w+)*", word)}
        words = [f"hydra.help.header={w.partition('.')[0]}" if i in topic else w for i, w in enumerate(words)]
    last = [i not in behind and bool(re.match(r"~|[^-].*=", word)) for i, word in enumerate(words)]
    if words and words[-1] in ("--info", "-i"):  # its value may be left out, and a setting would be taken for it
        last[-1] = True
    return [word for _, word in sorted(zip(last, words, strict=True), key=lambda pair: pair[0])]


def train() -> None:
    """The command-line entry point. What a user can put right is said in one line, with exit code 2."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us whole instead of being printed by Hydra
    asks_help = bool({"--help", "-h"} & set(sys.argv))
    sys.argv[1:] = for_hydra(sys.argv[1:])
    try:
        _main()
    except KeyboardInterrupt:  # still ends the process by the signal, which stops a script around it
        sys.excepthook = lambda *told: print(INTERRUPTED, file=sys.stderr)
        raise
    except USER_ERRORS as error:
        fail(str(error))
    except ValueError as error:
        if re.match("Only one of --run|Invalid defaults list", str(error)):  # of -m and --cfg, say
            fail(str(error))
        if "Config group override" not in str(error):  # what Hydra says of arm=null and the like
            raise
        fail("a group cannot be null; choose one of its options (--help shows them)")
    except OverrideParseException as error:
        if "missing EQUAL" not in str(error):
            fail(str(error))
        fail(f"{error.override!r} is not of the form setting=value, which has no spaces around the sign")
    except yaml.YAMLError as error:  # a file of --config-dir; the message says where
        fail(str(error))
    except BrokenPipeError:  # --help | head
        if not asks_help:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        raise SystemExit(1) from None
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        key = getattr(cause, "full_key", None)
        unknown = isinstance(cause, ConfigKeyError | ConfigAttributeError)
        # Of a group that is meant below another one, Hydra goes on with advice that would not work.
        fail(f"{key}: {cause}\n({_meant(key, unknown)})" if key else str(cause).partition("\nTo append to your")[0])
