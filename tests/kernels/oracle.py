"""The truth the kernels are held against: the recurrence itself, in float64, one token at a time.

Nothing here knows of closed forms, masks or chunks. A tree keeps one state a node, made from its parent's.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Inputs:
    """A batch in fp32: q, k [B, N, H, dk], v [B, N, HV, dv], log_decay, beta [B, N, HV], state [B, HV, dk, dv]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    state: np.ndarray

    def args(self) -> tuple[np.ndarray, ...]:
        """In the order of the ops' arguments."""
        return self.q, self.k, self.v, self.log_decay, self.beta, self.state

    def tokens(self, part: slice) -> "Inputs":
        """The same inputs cut along the token axis."""
        return Inputs(*(x[:, part] for x in self.args()[:5]), self.state)

    def row(self, b: int) -> "Inputs":
        """One row, as a batch of one."""
        return Inputs(*(x[b : b + 1] for x in self.args()))


def normalise(x: np.ndarray) -> np.ndarray:
    """L2-normalised along the last axis, as the model does it."""
    return (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)).astype(np.float32)


def random_inputs(
    rng: np.random.Generator,
    rows: int,
    tokens: int,
    *,
    heads: int = 2,
    value_heads: int = 4,
    dk: int = 16,
    dv: int = 32,
    correlation: float = 0.95,
    decay: str = "mixed",
    max_beta: float = 1.0,
) -> Inputs:
    """Inputs whose keys share a direction with the given correlation.

    ``decay``: "none", "weak" (about -0.01 a token), "strong" (about -1) or "mixed" (-1e-3 to -50, token by token).
    """

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def correlated() -> np.ndarray:
        shared = normal(rows, 1, heads, dk)
        own = normal(rows, tokens, heads, dk)
        return normalise(np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own)

    gate_shape = (rows, tokens, value_heads)
    if decay == "mixed":
        log_decay = -np.exp(rng.uniform(np.log(1e-3), np.log(50), gate_shape))
    else:
        rate = {"none": 0.0, "weak": 0.01, "strong": 1.0}[decay]
        log_decay = -rate * np.log1p(np.exp(rng.standard_normal(gate_shape)))
    beta = max_beta / (1 + np.exp(-2 - rng.standard_normal(gate_shape)))
    return Inputs(
        correlated(),
        correlated(),
        normal(rows, tokens, value_heads, dv),
        log_decay.astype(np.float32),
        beta.astype(np.float32),
        normal(rows, value_heads, dk, dv),
    )


def rounded(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """q, k and v in bf16, and the same numbers in fp32 for the oracle."""
    narrow = [x.astype(jnp.bfloat16) for x in (inputs.q, inputs.k, inputs.v)]
    wide = [x.astype(np.float32) for x in narrow]
    return Inputs(*narrow, *inputs.args()[3:]), Inputs(*wide, *inputs.args()[3:])


def random_tree(rng: np.random.Generator, nodes: int, bushiness: float) -> np.ndarray:
    """Parents of a random tree: a chain at bushiness 0, parents drawn evenly from all earlier nodes at 1."""
    parents = np.arange(-1, nodes - 1)
    for t in range(1, nodes):
        if rng.random() < bushiness:
            parents[t] = rng.integers(0, t)
    return parents.astype(np.int32)


def run_tree(
    inputs: Inputs, parents: np.ndarray, b: int = 0, nodes: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row ``b`` in float64: outputs [N, HV, dv], the state after each node [N, HV, dk, dv] and u [N, HV, dv].

    ``parents`` [N] is that row's tree; only the first ``nodes`` are computed.
    """
    q, k, v, log_decay, beta, state = (x[b].astype(np.float64) for x in inputs.args())
    nodes = len(parents) if nodes is None else nodes
    group = v.shape[1] // q.shape[1]
    outputs, states, us = [], [], []
    for t in range(nodes):
        s = state if parents[t] < 0 else states[parents[t]]
        key, query = np.repeat(k[t], group, 0), np.repeat(q[t], group, 0)  # [HV, dk]
        s = np.exp(log_decay[t])[:, None, None] * s
        u = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, key))
        s = s + key[:, :, None] * u[:, None, :]
        outputs.append(np.einsum("hkv,hk->hv", s, query) * q.shape[-1] ** -0.5)
        states.append(s)
        us.append(u)
    return np.stack(outputs), np.stack(states), np.stack(us)


def run_chain(inputs: Inputs, b: int = 0, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Row ``b`` as a chain of ``length`` tokens: outputs [length, HV, dv] and the last state [HV, dk, dv]."""
    tokens = inputs.q.shape[1] if length is None else length
    if tokens == 0:
        return np.zeros((0, *inputs.v.shape[2:])), inputs.state[b].astype(np.float64)
    outputs, states, _ = run_tree(inputs, np.arange(-1, tokens - 1), b, tokens)
    return outputs, states[-1]


def error(result: np.ndarray, truth: np.ndarray) -> float:
    """Relative error in the Euclidean norm."""
    return float(np.linalg.norm(np.asarray(result, np.float64) - truth) / np.linalg.norm(truth))
