"""Prefill: the gated delta rule over a prompt, in chunks, from any state.

Differentiable, so training uses it too. Bytes moved: see ``forward.py`` for the kernels; the plain version reads and
writes the state once a chunk.
"""

from jaxtyping import Array, Float, Int

from kernels_pallas.gdn_prefill import mosaic_gpu, reference, triton
from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.shapes import check_gdn_inputs, check_rows

_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.gdn_prefill,
    "triton": triton.gdn_prefill,
    "reference": reference.gdn_prefill,
}


def gdn_prefill(
    q: Float[Array, "B T H dk"],
    k: Float[Array, "B T H dk"],
    v: Float[Array, "B T HV dv"],
    log_decay: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV dk dv"],
    lengths: Int[Array, " B"] | None = None,
    scale: float | None = None,
    chunk: int = 64,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T HV dv"], Float[Array, "B HV dk dv"]]:
    """Outputs [B, T, HV, dv] in the dtype of ``v`` and the fp32 state after ``lengths`` tokens of each row.

    The same recurrence as ``gdn_verify``, for a chain of any length; the chunked closed form is section 3.3 of Yang et
    al. 2025, "Gated Delta Networks". Inputs from ``lengths`` on are padding: their outputs are zero, and neither the
    state nor any other output depends on them.

    Args:
        q, k: L2-normalised, fp32 or narrower.
        v: values, fp32 or narrower.
        log_decay, beta, state: fp32.
        lengths: int32, 0 to T; None means T for every row. A row of length 0 keeps its state.
        scale: of the outputs; dk^-1/2 if None.
        chunk: tokens a step, 8, 16, 32, 64 or 128; a shorter prompt is one chunk of the next such size.
        implementation: "mosaic_gpu" (bf16 q, k, v and a chunk of 64, on Hopper), "triton" (the same on any NVIDIA GPU),
            "reference", or None for the best one that can run here. All are differentiable.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
    """
    check_gdn_inputs("T", q, k, v, log_decay, beta, state)
    check_rows("lengths", lengths, q.shape[0])
    if chunk not in (8, 16, 32, 64, 128):
        raise ValueError(f"chunk must be 8, 16, 32, 64 or 128, got {chunk}")
    cannot = {"mosaic_gpu": mosaic_gpu.why_not(q, k, v, chunk), "triton": triton.why_not(q, k, v, chunk)}
    run = choose("gdn_prefill", implementation, _IMPLEMENTATIONS, cannot)
    return run(q, k, v, log_decay, beta, state, lengths, q.shape[-1] ** -0.5 if scale is None else scale, chunk)
