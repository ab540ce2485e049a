"""The front of a mixer along trees, and the convolution over prompts, against a plain walk in float64."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import prefill_conv, tree_conv
from kernels_pallas.tree_conv.reference import MixerInputs, l2_norm
from tests.kernels.oracle import random_tree

CHANNELS = 6
prefill = jax.jit(prefill_conv)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape of ``tree_conv``. ``taps`` 0: no convolution. ``layers`` 0: a window without a layer axis."""

    rows: int = 3
    nodes: int = 5
    heads: int = 2
    value_heads: int = 4
    dk: int = 16
    dv: int = 32
    taps: int = 4
    between: int = 3  # columns between v and the gates
    layers: int = 0
    max_beta: float = 1.0
    dtype: str = "float32"

    @property
    def channels(self) -> int:
        return 2 * self.heads * self.dk + self.value_heads * self.dv

    @property
    def options(self) -> dict:
        """The keyword arguments of the op."""
        return {
            "key_heads": self.heads,
            "dk": self.dk,
            "dv": self.dv,
            "dtype": jnp.dtype(self.dtype),
            "max_beta": self.max_beta,
            "layer": self.layers - 1 if self.layers else None,
        }

    def arguments(self, seed: int = 0) -> tuple:
        """Positional arguments. The first row is a chain and whole; others bush out, end early, or are empty.

        All that must not be read is NaN, or a parent outside the tree.
        """
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        num_nodes = np.array([self.nodes, self.nodes, (self.nodes + 1) // 2, 0][: self.rows], np.int32)
        parents = np.stack([random_tree(rng, self.nodes, b) for b in (0, 0.5, 1, 0.5)[: self.rows]])
        parents[1:, 2:3] = -1  # a second child of the committed prefix
        padding = np.arange(self.nodes) >= num_nodes[:, None]
        parents[padding] = 10**6
        projected = normal(self.rows, self.nodes, self.channels + self.between + 2 * self.value_heads)
        projected[padding] = np.nan
        projected[..., self.channels : self.channels + self.between] = np.nan
        window = weight = None
        if self.taps:
            window = normal(*((self.layers,) if self.layers else ()), self.rows, self.taps - 1, self.channels)
            if self.layers:
                window[:-1] = np.nan
            weight = normal(self.taps, self.channels)
            window, weight = window.astype(self.dtype), weight.astype(self.dtype)
        return projected, window, weight, normal(self.value_heads), normal(self.value_heads), parents, num_nodes

    def truth(self, projected, window, weight, A_log, dt_bias, parents, num_nodes) -> MixerInputs:
        """In float64, node by node; only ``inputs`` are rounded."""
        H, HV, dk, dv = self.heads, self.value_heads, self.dk, self.dv
        inputs = np.asarray(projected)[..., : self.channels].astype(self.dtype)
        y = np.zeros(inputs.shape)
        log_decay, beta = np.zeros((2, self.rows, self.nodes, HV))
        for b, n in enumerate(num_nodes):
            for t in range(n):
                if weight is None:
                    y[b, t] = silu(inputs[b, t].astype(np.float64))
                else:
                    old = window[-1][b] if self.layers else window[b]
                    y[b, t] = silu_of(history(old, inputs[b], parents[b], t), weight)
                a, c = projected[b, t, -2 * HV :].astype(np.float64).reshape(2, HV)
                log_decay[b, t] = -np.exp(A_log.astype(np.float64)) * np.logaddexp(a + dt_bias, 0)
                beta[b, t] = self.max_beta / (1 + np.exp(-c))
        q, k = (x.reshape(self.rows, self.nodes, H, dk) for x in (y[..., : H * dk], y[..., H * dk : 2 * H * dk]))
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        v = y[..., 2 * H * dk :].reshape(self.rows, self.nodes, HV, dv)
        return MixerInputs(q, k, v, log_decay, beta, inputs)

    def check(self, result: MixerInputs, arguments: tuple) -> None:
        """Holds ``result`` against the truth: 1e-6 in fp32, in bf16 one rounding for v and two for q and k.

        A rounding is half an ulp, 2^-8; those of y also change its norm, by less than another half.
        """
        truth = self.truth(*arguments)
        narrow = self.dtype == "bfloat16"
        rounding = {"q": 2.5 * 2.0**-8, "k": 2.5 * 2.0**-8, "v": 2.0**-8} if narrow else {}
        for name, x, wanted in zip(result._fields, result, truth):
            assert x.shape == wanted.shape
            assert x.dtype == ("float32" if name in ("log_decay", "beta") else self.dtype)
            x, wanted = np.asarray(x, np.float64), np.asarray(wanted, np.float64)
            if name == "inputs":
                np.testing.assert_array_equal(x, wanted)
                continue
            np.testing.assert_allclose(x, wanted, atol=1e-6, rtol=1.01 * rounding.get(name, 0) + 1e-6, err_msg=name)
            for b, n in enumerate(arguments[-1]):
                assert not x[b, n:].any(), name


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
    return np.concatenate([window, np.array(path[::-1], x.dtype).reshape(-1, window.shape[1])])


def silu(y: np.ndarray) -> np.ndarray:
    return y / (1 + np.exp(-y))


def silu_of(inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return silu((inputs[-len(weight) :].astype(np.float64) * weight.astype(np.float64)).sum(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("taps", [0, 1, 2, 3, 4, 5])
def test_along_trees(taps, dtype):
    case = Case(taps=taps, rows=4, nodes=12, dtype=dtype, max_beta=2.0, layers=2 if taps == 4 else 0)
    arguments = case.arguments()
    case.check(jax.jit(partial(tree_conv, **case.options, implementation="reference"))(*arguments), arguments)


def test_all_nodes_are_real_by_default():
    case = Case(rows=2, nodes=5)
    *arguments, num_nodes = case.arguments()
    assert (num_nodes == 5).all()
    options = {name: value for name, value in case.options.items() if name not in ("dv", "max_beta", "layer")}
    case.check(tree_conv(*arguments, **options), (*arguments, num_nodes))


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
    """Operation by operation: XLA may fuse products into sums in one program and not in another."""
    case = Case(rows=2, nodes=9)
    projected, window, weight, A_log, dt_bias, _, _ = case.arguments()
    parents = np.tile(np.arange(-1, 8, dtype=np.int32), (2, 1))
    result = tree_conv(projected, window, weight, A_log, dt_bias, parents, **case.options)
    y, new = prefill_conv(projected[..., : case.channels], window, weight)
    q, k, v = (y[..., a:b].reshape(2, 9, n, -1) for a, b, n in ((0, 32, 2), (32, 64, 2), (64, None, 4)))
    np.testing.assert_array_equal(result.v, v)
    for x, wanted in ((result.q, q), (result.k, k)):
        np.testing.assert_array_equal(x, l2_norm(wanted))
    np.testing.assert_array_equal(result.inputs[:, -3:], new)


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


def test_wrong_arguments_of_prefill_conv_are_named():
    x, window, weight, _ = random_case(4, 2, 3)
    with pytest.raises(ValueError, match=r"weight must be \[W, C\] = \[4, 6\], got \[4, 5\]"):
        prefill_conv(x, window, weight[:, :5])
    with pytest.raises(ValueError, match=r"window must be \[B, W-1, C\] = \[2, 3, 6\], got \[2, 2, 6\]"):
        prefill_conv(x, window[:, 1:], weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"window": lambda x: x[:, :, 1:]},
            r"window must be \[L, B, W-1, C\] = \[2, 3, 3, 192\], got \[2, 3, 2, 192\]",
        ),
        ({"window": lambda x: x[0]}, r"window must be \[L, B, W-1, C\], got \[3, 3, 192\]"),
        ({"window": lambda x: None}, "weight and window must both be given or both be None"),
        ({"weight": lambda x: x[:, 1:]}, r"weight must be \[W, C\] = \[4, 192\], got \[4, 191\]"),
        ({"weight": lambda x: x[:, 1:], "dv": lambda x: None}, "weight must have 64 channels and a multiple of 4 more"),
        ({"weight": lambda x: None, "window": lambda x: None, "dv": lambda x: None}, "dv must be given"),
        ({"projected": lambda x: x[..., 4:]}, "projected must have at least 200 columns"),
        ({"projected": lambda x: x.astype(np.float16)}, "projected must be float32, got float16"),
        ({"A_log": lambda x: x[:3], "dt_bias": lambda x: x[:3]}, "A_log must have a multiple of key_heads=2 heads"),
        ({"dt_bias": lambda x: x[:3]}, r"dt_bias must be \[HV\] = \[4\], got \[3\]"),
        ({"parents": lambda x: x[:2]}, r"parents must be \[B, N\] = \[3, 5\], got \[2, 5\]"),
        ({"dtype": lambda x: "float16"}, "dtype must be float32 or bfloat16, got float16"),
        ({"layer": lambda x: 2}, "layer must be 0 to 1, got 2"),
        ({"implementation": lambda x: "triton"}, "'triton' of tree_conv cannot run: it needs an NVIDIA GPU"),
    ],
)
def test_wrong_arguments_of_tree_conv_are_named(change, message):
    case = Case(layers=2)
    names = ("projected", "window", "weight", "A_log", "dt_bias", "parents")
    arguments = {**dict(zip(names, case.arguments())), **case.options, "implementation": "reference"}
    tree_conv(**arguments)
    for name, wrong in change.items():
        arguments[name] = wrong(arguments[name])
    with pytest.raises(ValueError, match=message):
        tree_conv(**arguments)
