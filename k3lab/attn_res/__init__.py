"""Attention Residuals: the mixture of committed blocks and running prefix, and the two streams at a tap."""

from collections.abc import Callable

from torch import Tensor

from k3lab.attn_res.reference import Mixture, attn_res_reference, attn_res_torch
from k3lab.errors import BadInput

IMPLS = ("reference", "torch", "triton")

__all__ = ["IMPLS", "Mixture", "attn_res"]


def attn_res(
    prefix: Tensor, score_norm: Tensor | None = None, score_proj: Tensor | None = None, bank: Tensor | None = None,
    pending: Tensor | None = None, num_blocks: int | None = None, eps: float = 1e-5, output_norm: Tensor | None = None,
    output_eps: float | None = None, commit: bool = False, return_weights: bool = False, impl: str = "torch",
) -> Mixture:  # fmt: skip
    """What one consumer of Attention Residuals reads, [T, hidden].

        x_0..x_{n-1} = bank[:n],  x_n = prefix + pending, rounded to the storage dtype
        score(x) = (a * p) . x * rsqrt(mean(x^2) + eps)        mixture = sum softmax(score) x

    prefix, pending         [T, hidden] in the storage dtype; pending is the delta not yet added (the MLP output), or None
    bank                    [blocks, T, hidden] in the storage dtype, any strides; None or no valid block: the mixture is the prefix
    score_norm, score_proj  a and p of the consumer, [hidden]; folded in fp32
    num_blocks              n, how many blocks are valid; default all (but the one to be committed). Later ones are never read
    output_norm             [hidden]: o is RMSNorm(mixture) * output_norm, normed before it is rounded; output_eps defaults to eps
    commit                  also write prefix + pending to bank[n], in place, as a layer does whose index is a multiple of the block size
    impl                    "reference" (float64), "torch" (any device, fp32 arithmetic) or "triton" (CUDA, ROCm, small shapes under the
                            interpreter, not in bfloat16 there)

    Raises BadInput for an unknown impl or shapes and dtypes that do not fit, Unsupported where the kernel cannot run.
    """
    if impl not in IMPLS:
        raise BadInput(f"impl: {impl!r} is not one of {IMPLS}")
    run: Callable[..., Mixture] = attn_res_reference if impl == "reference" else attn_res_torch
    if impl == "triton":
        # the interpreter switch is read when Triton kernels are defined, so they are imported only when asked for
        from k3lab.attn_res.triton_attn_res import attn_res_triton as run
    return run(prefix, score_norm, score_proj, bank, pending, num_blocks, eps, output_norm, output_eps, commit, return_weights)
