"""Trains a small GDN target on text files; see ``train_drafter/target_cli.py``."""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    # The folder of scripts comes first on the path, and train_drafter.py there has the name of the package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    raise SystemExit(import_module("train_drafter.target_cli").main())
