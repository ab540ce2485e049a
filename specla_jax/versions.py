"""The range of JAX versions that is tested, checked where work starts."""

import jax

from specla_jax.errors import UserError

OLDEST, FIRST_UNTESTED = (0, 10, 2), (0, 13)


def check_jax(version: str = jax.__version__) -> None:
    """Raises :class:`UserError` if this JAX is outside the range of ``pyproject.toml``."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < FIRST_UNTESTED:
        low, high = (".".join(map(str, bound)) for bound in (OLDEST, FIRST_UNTESTED))
        raise UserError(f"jax must be at least {low} and below {high}, got {version}")
