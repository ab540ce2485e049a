"""Verification: the outputs of every node of a draft tree, and the factors that recovery will fold.

One op for a tree, a chain (parents -1, 0, 1, ...) and a single token (N = 1, a plain decode step).

Bytes moved: the state is read once and never written, dk dv fp32 a value head, whatever N is; beside it only the
inputs, the outputs and dk + dv + 2 numbers a node.
"""

import jax
from jaxtyping import Array, Float, Int

from kernels_pallas import pallas_triton
from kernels_pallas.factors import Factors
from kernels_pallas.gdn_verify import mosaic_gpu, reference, triton
from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.shapes import check_gdn_inputs, check_rank, check_shape, check_tree

_FOR_TREES = {
    "mosaic_gpu": mosaic_gpu.gdn_verify,
    "triton": triton.gdn_verify,
    "reference": reference.gdn_verify,
}
# One node is a step of plain decoding: two sums, for which Triton's short kernel is the faster one.
_FOR_ONE_NODE = {name: _FOR_TREES[name] for name in ("triton", "mosaic_gpu", "reference")}


@jax.named_scope("gdn_verify")
def gdn_verify(
    q: Float[Array, "B N H dk"],
    k: Float[Array, "B N H dk"],
    v: Float[Array, "B N HV dv"],
    log_decay: Float[Array, "B N HV"],
    beta: Float[Array, "B N HV"],
    state: Float[Array, "*L B HV dk dv"],
    parents: Int[Array, "B N"],
    num_nodes: Int[Array, " B"] | None = None,
    scale: float | None = None,
    layer: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B N HV dv"], Factors]:
    """Outputs [B, N, HV, dv] in the dtype of ``v``, and the factors of the nodes.

    With G the path sums of ``log_decay`` and sums over ancestors i of t (t itself included in o, not in u):

        u_t = beta_t (v_t - exp(G_t) S^T k_t - sum_i exp(G_t - G_i) (k_t . k_i) u_i)
        o_t = scale (exp(G_t) S^T q_t + sum_i exp(G_t - G_i) (q_t . k_i) u_i)

    which is the gated delta rule (Yang et al. 2025, "Gated Delta Networks", eq. 10) unrolled along each path.

    Args:
        q, k: L2-normalised, fp32 or narrower.
        v: values, fp32 or narrower.
        log_decay, beta, state: fp32.
        parents: int32, ``parents[t] < t``; -1 stands for the committed prefix.
        num_nodes: int32; places from there on are padding, with zero outputs and zero factors. None: all are real.
        scale: of the outputs; dk^-1/2 if None.
        layer: if given, ``state`` has a leading layer axis and this layer of it is read, without a copy.
        implementation: "mosaic_gpu" (bf16 on Hopper), "triton", "reference", or None for the best one that can run
            here.

    Raises:
        ValueError: a shape or dtype does not fit, N is not 1 to 64, or the implementation cannot run.
    """
    if layer is not None:
        check_rank("state", state, "L B HV dk dv")
        if not 0 <= layer < state.shape[0]:
            raise ValueError(f"layer must be 0 to {state.shape[0] - 1}, got {layer}")
    one_state = state if layer is None else jax.eval_shape(lambda x: x[0], state)
    check_gdn_inputs("N", q, k, v, log_decay, beta, one_state)
    check_tree(parents, num_nodes)
    check_shape("parents", parents, "B N", q.shape[:2])
    nodes, dk, dv = q.shape[1], q.shape[-1], v.shape[-1]
    cannot = {"mosaic_gpu": mosaic_gpu.why_not(dk, dv, v.dtype, nodes), "triton": pallas_triton.why_not(dk, dv)}
    run = choose("gdn_verify", implementation, _FOR_ONE_NODE if nodes == 1 else _FOR_TREES, cannot)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run(q, k, v, log_decay, beta, state, parents, num_nodes, scale, layer)
