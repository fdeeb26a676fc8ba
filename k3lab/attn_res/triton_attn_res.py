"""The AttnRes mixture as a Triton kernel: one program per token, every source read once, an online softmax over the sources.

    score(x) = (a * p) . x * rsqrt(mean(x^2) + eps)        mixture = sum softmax(score) x        (the raw x)

A program walks over its token's committed blocks, BL at a time, and keeps the weighted sum [hidden] in fp32 registers; num_stages
says how many tiles are in flight. Bytes per token: (blocks + 1) rows read and one written, the pending row read and the new
prefix written where there is one. Runs natively on CUDA and ROCm, and on small shapes under TRITON_INTERPRET=1 (not in bfloat16).
"""

from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3lab.attn_res.reference import Mixture, check
from k3lab.errors import BadInput
from k3lab.kda.runtime import check_launch, is_interpreted

# BL sources a tile; LAST folds the prefix in after the blocks (its load then overlaps theirs, for more registers)
CONFIGS = [
    {"BL": bl, "LAST": last, "num_warps": w, "num_stages": s}
    for bl, stages in ((1, (1, 3, 4)), (2, (1, 3)), (4, (1, 3)), (8, (1,)))
    for last in (False, True)
    for w in (4, 8, 16)
    for s in stages
]
FEW = 132  # tokens; about the multiprocessors of a device: up to here a program has one to itself, and its latency is what counts
SHARED_BYTES = 160_000 if torch.version.hip is None else 64_000  # what the tiles in flight may take of a multiprocessor's shared memory


@triton.jit
def fold(b_x, m_x, b_w, b_m, b_l, b_o, HIDDEN: tl.constexpr, EPS: tl.constexpr):
    """A tile of sources [BL, BD] into the running softmax: their scores [BL, 1], then maximum, sum [1, 1] and weighted sum [1, BD]."""
    b_x = b_x.to(tl.float32)
    b_s = tl.sum(b_x * b_w, 1, keep_dims=True) * tl.rsqrt(tl.sum(b_x * b_x, 1, keep_dims=True) / HIDDEN + EPS)
    b_s = tl.where(m_x, b_s, float("-inf"))
    b_top = tl.maximum(b_m, tl.max(b_s, 0, keep_dims=True))
    b_r, b_p = tl.exp(b_m - b_top), tl.exp(b_s - b_top)
    return b_s, b_top, b_l * b_r + tl.sum(b_p, 0, keep_dims=True), b_o * b_r + tl.sum(b_p * b_x, 0, keep_dims=True)


@triton.jit
def attn_res_fwd_kernel(
    bank, prefix, pending, score_norm, score_proj, output_norm, o, new_prefix, weights, stride_block, stride_token,
    BLOCKS: tl.constexpr, COMMIT: tl.constexpr, HIDDEN: tl.constexpr, EPS: tl.constexpr, OUTPUT_EPS: tl.constexpr,
    BL: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One token. pending, output_norm and weights may be None; COMMIT writes the new prefix to block BLOCKS of the bank."""
    i_t = tl.program_id(0).to(tl.int64)
    # rows are [1, BD], not [BD]: they keep the layout of a tile, and no value moves between threads but sums
    o_d = tl.arange(0, BD)[None, :]
    m_d = o_d < HIDDEN
    b_x = tl.load(prefix + i_t * HIDDEN + o_d, mask=m_d, other=0.0)
    if pending is not None:
        b_d = tl.load(pending + i_t * HIDDEN + o_d, mask=m_d, other=0.0)
        b_x = (b_x.to(tl.float32) + b_d.to(tl.float32)).to(prefix.dtype.element_ty)
        tl.store(new_prefix + i_t * HIDDEN + o_d, b_x, mask=m_d)
    p_bank = bank + i_t * stride_token
    if COMMIT:
        tl.store(p_bank + tl.full([], BLOCKS, tl.int64) * stride_block + o_d, b_x, mask=m_d)
    if BLOCKS == 0:
        b_o = b_x.to(tl.float32)
        if weights is not None:
            tl.store(weights + i_t, 1.0)
    else:
        b_w = tl.load(score_norm + o_d, mask=m_d, other=0.0).to(tl.float32) * tl.load(score_proj + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_m, b_l = tl.full([1, 1], float("-inf"), tl.float32), tl.zeros([1, 1], tl.float32)
        b_o = tl.zeros([1, BD], tl.float32)
        o_s = tl.arange(0, BS)[None, :]
        b_scores = tl.zeros([1, BS], tl.float32)
        if not LAST:
            b_first, b_m, b_l, b_o = fold(b_x, True, b_w, b_m, b_l, b_o, HIDDEN, EPS)
            b_scores += tl.where(o_s == BLOCKS, b_first, 0.0)
        for i in tl.range(0, (BLOCKS + BL - 1) // BL, num_stages=STAGES):
            o_l = i * BL + tl.arange(0, BL)[:, None]
            m_l = o_l < BLOCKS
            b_y = tl.load(p_bank + o_l.to(tl.int64) * stride_block + o_d, mask=m_l & m_d, other=0.0, eviction_policy="evict_first")
            b_s, b_m, b_l, b_o = fold(b_y, m_l, b_w, b_m, b_l, b_o, HIDDEN, EPS)
            if weights is not None:
                b_scores += tl.sum(tl.where((o_s == o_l) & m_l, b_s, 0.0), 0, keep_dims=True)
        if LAST:
            b_last, b_m, b_l, b_o = fold(b_x, True, b_w, b_m, b_l, b_o, HIDDEN, EPS)
            b_scores += tl.where(o_s == BLOCKS, b_last, 0.0)
        b_o /= b_l
        if weights is not None:
            tl.store(weights + i_t * (BLOCKS + 1) + o_s, tl.exp(b_scores - b_m) / b_l, mask=o_s <= BLOCKS)
    if output_norm is not None:
        b_n = tl.load(output_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_o *= tl.rsqrt(tl.sum(b_o * b_o, 1, keep_dims=True) / HIDDEN + OUTPUT_EPS) * b_n
    tl.store(o + i_t * HIDDEN + o_d, b_o.to(o.dtype.element_ty), mask=m_d)


def default_config(tokens: int, hidden: int, itemsize: int, blocks: int, pending: bool = False) -> dict:
    """A launch configuration by shape alone: few tokens want every source in flight at once, many want several programs at a time.

    pending: whether the prefix is summed first; many tokens then want it folded in at once, not held over the blocks.
    """
    return dict(_config(tokens <= FEW, hidden, itemsize, blocks, pending))


@cache
def _config(few: bool, hidden: int, itemsize: int, blocks: int, pending: bool) -> dict:
    BD = _power_of_2(hidden)
    BL = min(4 if few else 1, _power_of_2(blocks))
    fit = SHARED_BYTES // (BL * BD * itemsize)  # num_stages tiles in flight take num_stages - 1 buffers
    # the fastest of sweeps on an H200 at hidden 7168, 8 blocks, bfloat16
    launch = {"num_warps": max(1, min(8 if few else 4, BD // 512)), "num_stages": min(3 if few else 4, fit + 1)}
    return {"BL": BL, "LAST": few or not pending, **launch}


def _power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def attn_res_triton(
    prefix: Tensor, score_norm: Tensor | None = None, score_proj: Tensor | None = None, bank: Tensor | None = None,
    pending: Tensor | None = None, num_blocks: int | None = None, eps: float = 1e-5, output_norm: Tensor | None = None,
    output_eps: float | None = None, commit: bool = False, return_weights: bool = False, config: dict | None = None,
    empty: Callable[..., Tensor] = torch.empty_like,
) -> Mixture:  # fmt: skip
    """attn_res by the kernel; one launch, no synchronisation. Arguments as attn_res, and:

    config   one of CONFIGS; default: default_config of the shape
    empty    makes output buffers like a tensor, torch.empty_like's signature; a test passes one that fills them with NaN

    Raises BadInput for shapes and dtypes that do not fit, Unsupported for a device or dtype without a kernel.
    """
    n = check(prefix, score_norm, score_proj, bank, pending, num_blocks, output_norm, commit)
    if is_interpreted(attn_res_fwd_kernel) or not prefix.is_cuda:
        given = {"prefix": prefix, "pending": pending, "bank": bank, "score_norm": score_norm, "score_proj": score_proj}
        check_launch(attn_res_fwd_kernel, given | {"output_norm": output_norm})
    T, D = prefix.shape
    prefix = prefix.contiguous()
    if bank is None:
        bank = prefix[None]
    elif bank.stride(2) != 1:
        if commit:
            raise BadInput(f"bank: strides {bank.stride()}; rows must be contiguous for a block to be committed in place")
        bank = bank.contiguous()
    if n == 0:
        score_norm = score_proj = prefix  # never read
    o = empty(prefix)
    new_prefix = prefix if pending is None else empty(prefix)
    weights = empty(prefix.new_empty(T, n + 1, dtype=torch.float32)) if return_weights else None
    if T:
        c = config or _config(T <= FEW, D, prefix.element_size(), n, pending is not None)
        attn_res_fwd_kernel[(T,)](
            bank, prefix, None if pending is None else pending.contiguous(), score_norm.contiguous(), score_proj.contiguous(),
            None if output_norm is None else output_norm.contiguous(), o, new_prefix, weights, bank.stride(0), bank.stride(1),
            n, commit, D, eps, eps if output_eps is None else output_eps,
            c["BL"], _power_of_2(D), _power_of_2(n + 1), c["num_stages"], c["LAST"],
            num_warps=c["num_warps"], num_stages=c["num_stages"],
        )  # fmt: skip
    return Mixture(o, new_prefix, weights)
