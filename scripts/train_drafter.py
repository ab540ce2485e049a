"""Trains an EAGLE drafter for a target; see ``train_drafter/drafter_cli.py``."""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    # The folder of scripts comes first on the path, and in it this file has the name of the package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    raise SystemExit(import_module("train_drafter.drafter_cli").main(prog="train_drafter.py"))
