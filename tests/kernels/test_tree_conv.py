"""The short convolution along trees and over prompts, against a plain walk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import prefill_conv, recover_window, tree_conv
from tests.kernels.oracle import random_tree

CHANNELS = 6
conv = jax.jit(tree_conv)
recover = jax.jit(recover_window)
prefill = jax.jit(prefill_conv)


def random_case(taps: int, rows: int, nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.random.Generator]:
    rng = np.random.default_rng(taps)
    x, window, weight = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((rows, nodes, CHANNELS), (rows, taps - 1, CHANNELS), (taps, CHANNELS))
    )
    return x, window, weight, rng


def history(window: np.ndarray, x: np.ndarray, parents: np.ndarray, node: int) -> np.ndarray:
    """All inputs up to ``node`` of one row, oldest first: the window, then the path."""
    path = []
    while node >= 0:
        path.append(x[node])
        node = parents[node]
    return np.concatenate([window, np.array(path[::-1]).reshape(-1, window.shape[1])])


def silu_of(inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    y = (inputs[-len(weight) :].astype(np.float64) * weight).sum(0)
    return y / (1 + np.exp(-y))


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
def test_along_trees(taps):
    x, window, weight, rng = random_case(taps, 4, 12)
    parents = np.stack([random_tree(rng, 12, bushiness) for bushiness in (0, 0.3, 0.7, 1)])
    num_nodes = np.array([12, 7, 12, 0], np.int32)
    padding = np.arange(12) >= num_nodes[:, None]
    x[padding] = np.nan
    y = np.asarray(conv(x, window, weight, parents, num_nodes))
    for b, n in enumerate(num_nodes):
        assert not y[b, n:].any()
        for t in range(n):
            np.testing.assert_allclose(y[b, t], silu_of(history(window[b], x[b], parents[b], t), weight), atol=1e-6)


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
def test_window_follows_every_accepted_path(taps):
    """Known faults A2, A4: every accepted count from 0 up, below and above the reach of the convolution."""
    x, window, _, rng = random_case(taps, 3, 9)
    parents = np.stack([random_tree(rng, 9, bushiness) for bushiness in (0, 0.3, 0.7)])
    for last in range(-1, 9):
        new = np.asarray(recover(window, x, parents, np.full(3, last, np.int32)))
        for b in range(3):
            inputs = history(window[b], x[b], parents[b], last)
            np.testing.assert_array_equal(new[b], inputs[len(inputs) - taps + 1 :])


def test_window_of_all_layers_at_once():
    x, window, _, rng = random_case(4, 6, 9)
    x, window = x.reshape(2, 3, 9, CHANNELS), window.reshape(2, 3, 3, CHANNELS)
    parents = np.stack([random_tree(rng, 9, bushiness) for bushiness in (0, 0.3, 0.7)])
    last = np.array([8, -1, 1], np.int32)
    together = recover(window, x, parents, last)
    for i in range(2):
        np.testing.assert_array_equal(together[i], recover(window[i], x[i], parents, last))
    np.testing.assert_array_equal(together[:, 1], window[:, 1])


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
def test_prompts(taps):
    """Known faults B1, B2, B5: ragged prompts, shorter than the window and longer; padding is never looked at."""
    lengths = np.array([0, 1, 2, 3, 4, 7, 10], np.int32)
    x, window, weight, _ = random_case(taps, len(lengths), 10)
    x[np.arange(10) >= lengths[:, None]] = np.nan
    y, new = (np.asarray(a) for a in prefill(x, window, weight, lengths))
    chain = np.arange(-1, 9)
    for b, n in enumerate(lengths):
        assert not y[b, n:].any()
        for t in range(n):
            np.testing.assert_allclose(y[b, t], silu_of(history(window[b], x[b], chain, t), weight), atol=1e-6)
        inputs = history(window[b], x[b], chain, n - 1)
        np.testing.assert_array_equal(new[b], inputs[len(inputs) - taps + 1 :])
    whole, end = prefill(x[-1:], window[-1:], weight)
    np.testing.assert_array_equal(whole, y[-1:])
    np.testing.assert_array_equal(end, new[-1:])


def test_chain_gives_the_bits_of_a_prompt():
    x, window, weight, _ = random_case(4, 2, 9)
    parents = np.tile(np.arange(-1, 8, dtype=np.int32), (2, 1))
    y, new = prefill(x, window, weight)
    np.testing.assert_array_equal(conv(x, window, weight, parents), y)
    np.testing.assert_array_equal(recover(window, x, parents, np.array([8, 8], np.int32)), new)


def test_prompt_split_anywhere():
    """Known fault A12: two-token continuations use the window too."""
    x, window, weight, _ = random_case(4, 2, 9)
    whole, end = prefill(x, window, weight)
    for cut in range(1, 9):
        first, middle = prefill(x, window, weight, np.full(2, cut, np.int32))
        second, last = prefill(np.roll(x, -cut, 1), middle, weight, np.full(2, 9 - cut, np.int32))
        y = np.concatenate([np.asarray(first)[:, :cut], np.asarray(second)[:, : 9 - cut]], 1)
        np.testing.assert_allclose(y, whole, atol=1e-6)
        np.testing.assert_array_equal(last, end)


def test_bf16_sums_in_fp32():
    x, window, weight, _ = random_case(4, 2, 9)
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in (x, window, weight)]
    y, new = prefill(*narrow)
    wide, _ = prefill(*(a.astype(jnp.float32) for a in narrow))
    assert y.dtype == new.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))


def test_wrong_arguments_are_named():
    x, window, weight, _ = random_case(4, 2, 3)
    parents = np.tile(np.arange(-1, 2, dtype=np.int32), (2, 1))
    last = np.array([0, 0], np.int32)
    with pytest.raises(ValueError, match=r"window must be \[B, W-1, C\] = \[2, 3, 6\], got \[2, 2, 6\]"):
        tree_conv(x, window[:, 1:], weight, parents)
    with pytest.raises(ValueError, match=r"weight must be \[W, C\] = \[4, 6\], got \[4, 5\]"):
        prefill_conv(x, window, weight[:, :5])
    with pytest.raises(ValueError, match=r"x must be \[B, N, C\] = \[2, 3, 6\], got \[2, 3, 5\]"):
        recover_window(window, x[..., :5], parents, last)
    with pytest.raises(ValueError, match="parents must be int32"):
        recover_window(window, x, parents.astype(np.float32), last)
