"""Trains a small GDN target on text files; see ``train_drafter/target_cli.py``."""

from train_drafter.target_cli import main

if __name__ == "__main__":
    raise SystemExit(main())
