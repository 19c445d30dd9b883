"""The arguments of the scripts in experiments/."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Arguments(argparse.ArgumentParser):
    """A parser whose help shows the script's docstring as it is written, and whose errors are one line, exit code 2."""

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; --help says more\n")
