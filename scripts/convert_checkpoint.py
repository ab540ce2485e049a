"""Converts an fla checkpoint: python scripts/convert_checkpoint.py SRC DST [--dtype bfloat16] [--overwrite]."""

import sys

from specla_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
