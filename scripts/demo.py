"""Decodes three prompts with the bundled model, plain and speculative, and shows both speeds."""

import sys

from specla_jax.demo import demo

if __name__ == "__main__":
    sys.exit(demo())
