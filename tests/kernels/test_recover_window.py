"""The window of the convolution along an accepted path, against a plain walk: the plain version and the kernel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.factors import Factors
from kernels_pallas.gdn_recover import gdn_recover, reference, triton
from kernels_pallas.tree_conv import prefill_conv
from tests.kernels.oracle import random_tree

CHANNELS = 6
IMPLEMENTATIONS = {"reference": reference.gdn_recover, "triton": partial(triton.gdn_recover, interpret=True)}
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def recover(implementation: str, window, x, parents, last) -> np.ndarray:
    """The window alone, beside a state of one small head."""
    state, factors = tiny(x.shape[:-2], x.shape[-2])
    return np.asarray(jax.jit(IMPLEMENTATIONS[implementation])(state, factors, parents, last, window, x)[1])


def tiny(lead: tuple[int, ...], nodes: int) -> tuple[np.ndarray, Factors]:
    def ones(*shape: int) -> np.ndarray:
        return np.ones((*lead, *shape), np.float32)

    return ones(1, 16, 16), Factors(ones(nodes, 1, 16), ones(nodes, 1, 16), -ones(nodes, 1))


def random_case(taps: int, rows: int, nodes: int, channels: int = CHANNELS):
    rng = np.random.default_rng(taps)
    x, window = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((rows, nodes, channels), (rows, taps - 1, channels))
    )
    parents = np.stack([random_tree(rng, nodes, bushiness) for bushiness in np.linspace(0, 0.7, rows)])
    return x, window, parents


def expected(window: np.ndarray, x: np.ndarray, parents: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The last inputs up to ``last``, a row at a time: the window, then the path."""
    new = []
    for b, node in enumerate(last):
        path = []
        while node >= 0:
            path.append(x[b, node])
            node = parents[b, node]
        inputs = np.concatenate([window[b], np.array(path[::-1]).reshape(-1, window.shape[-1])])
        new.append(inputs[len(inputs) - window.shape[1] :])
    return np.stack(new)


@every_implementation
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
def test_window_follows_every_accepted_path(implementation, taps):
    """Known faults A2, A4: every accepted count from 0 up, below and above the reach of the convolution."""
    x, window, parents = random_case(taps, 3, 9)
    for end in range(-1, 9):
        last = np.full(3, end, np.int32)
        new = recover(implementation, window, x, parents, last)
        np.testing.assert_array_equal(new, expected(window, x, parents, last))


@every_implementation
def test_window_of_all_layers_at_once(implementation):
    x, window, parents = random_case(4, 6, 9)
    x, window, parents = x.reshape(2, 3, 9, CHANNELS), window.reshape(2, 3, 3, CHANNELS), parents[::2]
    last = np.array([8, -1, 1], np.int32)
    together = recover(implementation, window, x, parents, last)
    for i in range(2):
        np.testing.assert_array_equal(together[i], expected(window[i], x[i], parents, last))
    np.testing.assert_array_equal(together[:, 1], window[:, 1])


@every_implementation
def test_chain_gives_the_window_of_a_prompt(implementation):
    x, window, _ = random_case(4, 2, 9)
    parents = np.tile(np.arange(-1, 8, dtype=np.int32), (2, 1))
    _, new = prefill_conv(x, window, np.ones((4, CHANNELS), np.float32))
    np.testing.assert_array_equal(recover(implementation, window, x, parents, np.array([8, 8], np.int32)), new)


@every_implementation
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_dtypes(implementation, dtypes):
    """The window keeps its dtype, and an input is rounded to it once."""
    x, window, parents = random_case(4, 3, 5)
    x, window = jnp.asarray(x, dtypes[0]), jnp.asarray(window, dtypes[1])
    last = np.array([4, 0, -1], np.int32)
    new = recover(implementation, window, x, parents, last)
    assert new.dtype == dtypes[1]
    wanted = expected(*(np.asarray(a.astype(dtypes[1]).astype("float32")) for a in (window, x)), parents, last)
    np.testing.assert_array_equal(new.astype(np.float32), wanted)


@pytest.mark.parametrize("channels", [16, 1040, 2048])
def test_blocks_of_channels(channels):
    """Several programs share a window; the last one has channels to spare."""
    x, window, parents = random_case(4, 3, 7, channels)
    x[np.arange(3), [5, 6, 6]] = np.nan  # off the paths
    last = np.array([4, 1, 0], np.int32)
    new = recover("triton", window, x, parents, last)
    np.testing.assert_array_equal(new, expected(window, x, parents, last))


@every_implementation
def test_broken_parents_end_the_path(implementation):
    x, window, _ = random_case(4, 2, 5)
    parents = np.array([[-1, 1, 1, 2, 3], [-1, 0, 4, 2, 3]], np.int32)
    last = np.array([2, 4], np.int32)
    ordered = np.where(parents < np.arange(5), parents, -1)
    np.testing.assert_array_equal(recover(implementation, window, x, parents, last), expected(window, x, ordered, last))


def test_both_results_of_the_op():
    x, window, parents = random_case(4, 2, 3)
    state, factors = tiny((2,), 3)
    last = np.array([2, -1], np.int32)
    new_state, new_window = gdn_recover(state, factors, parents, last, window, x, implementation="reference")
    np.testing.assert_array_equal(new_state, gdn_recover(state, factors, parents, last, implementation="reference"))
    np.testing.assert_array_equal(new_window, expected(window, x, parents, last))


def test_wrong_arguments_are_named():
    x, window, parents = random_case(4, 2, 3)
    state, factors = tiny((2,), 3)
    last = np.array([0, 0], np.int32)
    for arguments, message in (
        ({"window": window}, "conv_inputs must be given with window, got None"),
        ({"conv_inputs": x}, "window must be given with conv_inputs, got None"),
        ({"window": window[None], "conv_inputs": x}, r"window must be \[B, W-1, C\], got \[1, 2, 3, 6\]"),
        ({"window": window[:1], "conv_inputs": x}, r"window must be \[B, W-1, C\] = \[2, 3, 6\], got \[1, 3, 6\]"),
        ({"window": window, "conv_inputs": x[..., :5]}, r"conv_inputs must be \[B, N, C\] = \[2, 3, 6\], got"),
        ({"window": window, "conv_inputs": x[:, :2]}, r"conv_inputs must be \[B, N, C\] = \[2, 3, 6\], got"),
    ):
        with pytest.raises(ValueError, match=message):
            gdn_recover(state, factors, parents, last, **arguments)
    with pytest.raises(ValueError, match="parents must be int32"):
        gdn_recover(state, factors, parents.astype(np.float32), last, window, x)
