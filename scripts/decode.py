"""``specla decode`` as a script."""

import sys

from specla_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["decode", *sys.argv[1:]]))
