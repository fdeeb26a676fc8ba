"""The chunk forward of KDA in three Triton kernels, for speed: what triton_chunk.py shows in seven, without its stage tensors.

    gate    g, the cumulative log-decay of every chunk, log2 units
    halves  (a soft gate in bfloat16) or chunk (any gate and dtype), all chunks and heads side by side; q_n, k_n and A = (I + Akk)^-1,
            with Akk of stages.py, stay on the chip:
            Aqk,  u = A (beta v),  w = A (beta exp2(g) k),  qg = scale q_n exp2(g),  kg_j = k_j exp2(g_last - g_j)
    state   BV rows of the state S [V, K] of one sequence and head to a program, chunk after chunk, everything transposed:
            v_new = u - S w^T,   o = S qg^T + v_new Aqk^T,   S <- S Diag(exp2(g_last)) + v_new kg

Products over pairs of rows need exp2(g_i - g_j) as two factors. `halves` takes k exp2(r - g) and q exp2(g - r), k exp2(g - r) around one
whole number r for each half of a chunk, as far as no factor overflows: bfloat16 and a gate down to -5. `chunk` takes any gate and
dtype, by halving: a block of 2B rows has its lower left quarter from a product whose exponents are split at row B, so that both factors
are at most 1. The inverse goes the other way, from blocks of 2 rows to 64:

    [[X, 0], [C, Y]]^-1 = [[X^-1, 0], [-Y^-1 C X^-1, Y^-1]]

The chain over chunks is what a long sequence waits for, so `state` keeps S in the registers that its next product reads it from, and
where sequences are too few to fill a device it cuts long ones into segments: a first pass finds what each segment makes of any state,
S P + added; the second starts every segment from the states before it and writes o.

Every masked load reads 0 and rows past the end of a sequence are 0 in every tile but g's, which repeat the last, so the state kernel
masks rows only where it stores o; its tiles are fetched through tensor descriptors (TMA on Hopper). Between the kernels a chunk is a
full tile, however short: decodes of one token belong to the recurrent kernel. Products take operands of the call's dtype and accumulate
in fp32; fp32 operands are multiplied as IEEE fp32, and g is kept in float64 then, because differences of it are taken.
"""

from collections.abc import Callable, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3lab.errors import BadInput, Unsupported
from k3lab.kda.call import KdaCall
from k3lab.kda.reference import L2_EPS
from k3lab.kda.runtime import check_launch
from k3lab.kda.stages import RCP_LN2
from k3lab.kda.triton_chunk import HEAD_DIMS
from k3lab.kda.triton_ops import log_decay
from k3lab.shapes import CHUNK

CONFIGS: dict[str, list[dict[str, int]]] = {
    "gate": [{"BK": b, "num_warps": w} for b in (32, 64) for w in (1, 2, 4)],
    "halves": [{"num_warps": w} for w in (4, 8)],
    # not BK 32 at 4 warps and 1 stage: built by Triton 3.6.0 it ends in an illegal memory access on an H200 (data/kernel_sweep.md);
    # the same source at 8 warps or 2 stages does not, so the cause is looked for in the build
    "chunk": [{"BK": b, "num_warps": w, "num_stages": s} for b in (32, 64, 128) for w in (4, 8) for s in (1, 2) if (b, w, s) != (32, 4, 1)],
    "state": [{"BV": b, "num_warps": 4, "num_stages": s} for b in (16, 32, 64) for s in (1, 2, 3)],
}
DEFAULTS: dict[str, dict[str, int]] = {
    "gate": {"BK": 32, "num_warps": 2},
    "halves": {"num_warps": 4},
    "chunk": {"BK": 128, "num_warps": 4, "num_stages": 1},
    "state": {"BV": 64, "num_warps": 4, "num_stages": 3},
}
# LDS of a gfx950 holds no third stage where Triton copies asynchronously, as 3.8 does by default
DEFAULTS_HIP = DEFAULTS | {"state": {"BV": 64, "num_warps": 4, "num_stages": 2}}
DEFAULTS_FP32 = DEFAULTS | {
    "chunk": {"BK": 32, "num_warps": 8, "num_stages": 1},
    "state": {"BV": 16, "num_warps": 4, "num_stages": 1},
}
LARGEST_EXPONENT = 116.0  # log2, of a factor around the reference of half a chunk; bf16 and fp32 end at 127
PROGRAMS = 132  # the multiprocessors of an H200: more programs of the state kernel would wait for one another
SHORTEST = 6  # chunks of a segment; a sequence of fewer than two such gains nothing from being cut, on an H200


@triton.jit
def locate(cu_seqlens, N, i_s, BT: tl.constexpr):
    """Sequence and first row of slot i_s: chunk c of sequence n has slot cu_seqlens[n] // BT + n + c, and some slots have none."""
    i_n, end = i_s * 0, i_s * 0 + N
    while end - i_n > 1:
        mid = (i_n + end) // 2
        before = tl.load(cu_seqlens + mid) // BT + mid <= i_s
        i_n, end = tl.where(before, mid, i_n), tl.where(before, end, mid)
    bos = tl.load(cu_seqlens + i_n)
    return i_n, bos + (i_s - bos // BT - i_n) * BT


@triton.jit(do_not_specialize=["N", "T"])
def fused_gate_fwd_kernel(
    raw_g, A_log, dt_bias, g, cu_seqlens, lower_bound, N, T,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """g [slots, H, BT, K], whose rows past the end repeat the last one; raw_g [T, H, K]. SCALE turns nats into log2 units."""
    NK: tl.constexpr = K // BK
    i_h, i_k, i_s = tl.program_id(0) // NK, tl.program_id(0) % NK, tl.program_id(1)
    i_n, row0 = locate(cu_seqlens, N, i_s, BT)
    n = tl.minimum(tl.load(cu_seqlens + i_n + 1), T) - row0
    if n <= 0:
        return
    o_t, o_k = tl.arange(0, BT), i_k * BK + tl.arange(0, BK)
    m_t = (o_t < n)[:, None]
    tile = i_s.to(tl.int64) * H + i_h
    p_g = raw_g + (row0.to(tl.int64) * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    b_x = tl.load(p_g, mask=m_t, other=0.0).to(tl.float32) + tl.load(dt_bias + i_h * K + o_k)[None, :]  # [BT, BK]
    b_g = log_decay(b_x, tl.exp(tl.load(A_log + i_h)), lower_bound, BOUNDED) * SCALE
    b_g = tl.where(m_t, b_g, 0.0).to(g.dtype.element_ty)
    tl.store(g + tile * (BT * K) + o_t[:, None] * K + o_k[None, :], tl.cumsum(b_g, 0))


@triton.jit
def inverse_norm(b_x, EPS: tl.constexpr):
    """1 / |x| of every row [BT, 1]; no approximate root or quotient."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b_x * b_x, 1, keep_dims=True) + EPS))


@triton.jit
def lower_left(o_t, level):
    """Mask of the lower left quarter of every block of 2 * 2**level rows: i and j differ in bit `level` and agree above it."""
    o_i, o_j = o_t[:, None], o_t[None, :]
    return ((o_i ^ o_j) >> level == 1) & (o_i > o_j)


@triton.jit
def invert(b_L, dtype: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular [64, 64], from blocks of 2 rows on."""
    BT: tl.constexpr = b_L.shape[0]
    tl.static_assert(BT == 64)
    o_t = tl.arange(0, BT)
    b_A = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0) - tl.where(lower_left(o_t, 0), b_L, 0.0)
    b_L = b_L.to(dtype)
    for level in tl.static_range(1, 6):
        # A is zero outside its blocks, so the quarters of A L A that count are Y^-1 C X^-1
        b_AL = tl.dot(b_A.to(dtype), b_L, input_precision="ieee").to(dtype)
        b_A = tl.where(lower_left(o_t, level), -tl.dot(b_AL, b_A.to(dtype), input_precision="ieee"), b_A)
    return b_A


@triton.jit
def scale_halves(b_x, first, b_0, b_1):
    """Columns times b_0 [K] in the first half of the rows, times b_1 in the second."""
    return tl.where(first, b_x * b_0[None, :], b_x * b_1[None, :])


@triton.jit(do_not_specialize=["N", "T"])
def fused_halves_fwd_kernel(
    q, k, v, g, raw_beta, wq, kg, uT, Aqk, cu_seqlens, scale, N, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One chunk of one head where halves_fit: q, k, v, raw_beta [T, H, .] and g in.

    Out: wq = [w, qg] [slots, H, 2 BT, K], kg [slots, H, BT, K], u transposed, uT [slots, H, V, BT], and Aqk [slots, H, BT, BT].
    """
    i_h, i_s = tl.program_id(0), tl.program_id(1)
    i_n, row0 = locate(cu_seqlens, N, i_s, BT)
    n = tl.minimum(tl.load(cu_seqlens + i_n + 1), T) - row0
    if n <= 0:
        return
    at, tile = row0.to(tl.int64) * H + i_h, i_s.to(tl.int64) * H + i_h
    dtype = wq.dtype.element_ty
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, V)
    m_t, first = (o_t < n)[:, None], (o_t < BT // 2)[:, None]
    o_tk, p_tk = o_t[:, None] * (H * K) + o_k[None, :], o_t[:, None] * K + o_k[None, :]
    p_g = g + tile * (BT * K)
    # loads stand before their use: nothing is loaded early past a barrier
    b_k, b_d = tl.load(k + at * K + o_tk, mask=m_t, other=0.0), tl.load(p_g + p_tk)  # [BT, K]
    b_beta = tl.load(raw_beta + at + o_t * H, mask=o_t < n, other=0.0)
    b_mid, b_end = tl.load(p_g + (BT // 2 - 1) * K + o_k), tl.load(p_g + (BT - 1) * K + o_k)  # [K]
    # the references of the halves are whole numbers, so a factor 2**(a difference of them) is exact
    b_r0, b_r1 = tl.floor(b_mid * 0.5 + 0.5), tl.floor((b_mid + b_end) * 0.5 + 0.5)
    b_d = tl.where(first, b_d - b_r0[None, :], b_d - b_r1[None, :])
    b_k = b_k.to(tl.float32)
    b_k *= tl.rsqrt(tl.sum(b_k * b_k, 1) + EPS)[:, None]
    b_down = b_k * tl.exp2(-b_d)
    tl.store(kg + tile * (BT * K) + p_tk, scale_halves(b_down, first, tl.exp2(b_end - b_r0), tl.exp2(b_end - b_r1)).to(dtype))
    # the first half around the second one's reference, which no row of it is below by more than a half; in two steps, as
    # 2**(r1 - r0) itself may be 0
    b_lift = tl.floor((b_r1 - b_r0) * 0.5)
    b_kl = tl.where(first, b_down * tl.exp2(b_lift)[None, :] * tl.exp2(b_r1 - b_r0 - b_lift)[None, :], b_down).to(dtype)
    b_kd, b_up = b_down.to(dtype), tl.exp2(b_d)
    b_beta = tl.sigmoid(b_beta.to(tl.float32))[:, None]
    b_e0, b_e1 = tl.exp2(b_r0), tl.exp2(b_r1)
    b_ku = b_k * b_up
    # beta on rows of k and v, not on columns of A: where keys repeat, the terms of a row of A k cancel, and roundings of A beta would not
    b_kw, b_ku = (scale_halves(b_ku, first, b_e0, b_e1) * b_beta).to(dtype), b_ku.to(dtype)
    b_kk = tl.where(first, tl.dot(b_ku, tl.trans(b_kd), input_precision="ieee"), tl.dot(b_ku, tl.trans(b_kl), input_precision="ieee"))
    b_q = tl.load(q + at * K + o_tk, mask=m_t, other=0.0).to(tl.float32)
    b_q *= (tl.rsqrt(tl.sum(b_q * b_q, 1) + EPS) * scale)[:, None] * b_up
    tl.store(wq + tile * (2 * BT * K) + BT * K + p_tk, scale_halves(b_q, first, b_e0, b_e1).to(dtype))
    b_qu = b_q.to(dtype)
    b_qk = tl.where(first, tl.dot(b_qu, tl.trans(b_kd), input_precision="ieee"), tl.dot(b_qu, tl.trans(b_kl), input_precision="ieee"))
    p_tt = Aqk + tile * (BT * BT) + o_t[:, None] * BT + o_t[None, :]
    tl.store(p_tt, tl.where(o_t[:, None] >= o_t[None, :], b_qk, 0.0).to(dtype))
    b_v = tl.load(v + at * V + o_t[:, None] * (H * V) + o_v[None, :], mask=m_t, other=0.0)  # [BT, V]
    b_A = invert(tl.where(o_t[:, None] > o_t[None, :], b_kk, 0.0) * b_beta, dtype).to(dtype)  # [BT, BT]
    b_w = tl.dot(b_A, b_kw, input_precision="ieee")
    tl.store(wq + tile * (2 * BT * K) + p_tk, b_w.to(dtype))
    b_u = tl.dot(tl.trans((b_v * b_beta).to(dtype)), tl.trans(b_A), input_precision="ieee")
    tl.store(uT + tile * (BT * V) + o_v[:, None] * BT + o_t[None, :], b_u.to(dtype))


@triton.jit
def pair_products(
    p_q, p_k, p_g, b_qr, b_kr, m_t, level, H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """q_i . (k_j exp2(g_i - g_j)) and k_i . (k_j exp2(g_i - g_j)) in the lower left quarter of every block of 2 * 2**level rows.

    The exponents are split at the first row of the lower half, so both are at most 0; what is outside the quarters is of no use.
    """
    o_t = tl.arange(0, BT)
    o_mid = (o_t >> (level + 1) << (level + 1)) + (1 << level)
    b_qk, b_kk = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)[None, :]
        o_tk = o_t[:, None] * (H * K) + o_k
        b_g = (tl.load(p_g + o_t[:, None] * K + o_k) - tl.load(p_g + o_mid[:, None] * K + o_k)).to(tl.float32)
        b_f = tl.exp2(-tl.abs(b_g))  # [BT, BK]
        b_k = (tl.load(p_k + o_tk, mask=m_t, other=0.0) * b_kr * b_f).to(dtype)
        b_q = (tl.load(p_q + o_tk, mask=m_t, other=0.0) * b_qr * b_f).to(dtype)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision="ieee")
        b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision="ieee")
    return b_qk, b_kk


@triton.jit(do_not_specialize=["N", "T"])
def fused_chunk_fwd_kernel(
    q, k, v, g, raw_beta, wq, kg, uT, Aqk, cu_seqlens, scale, N, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One chunk of one head at any gate: q, k, v, raw_beta [T, H, .] and g in; out as fused_halves_fwd_kernel's."""
    i_h, i_s = tl.program_id(0), tl.program_id(1)
    i_n, row0 = locate(cu_seqlens, N, i_s, BT)
    n = tl.minimum(tl.load(cu_seqlens + i_n + 1), T) - row0
    if n <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t = (o_t < n)[:, None]
    at, tile = row0.to(tl.int64) * H + i_h, i_s.to(tl.int64) * H + i_h
    dtype = wq.dtype.element_ty
    p_q, p_k, p_g = q + at * K, k + at * K, g + tile * (BT * K)
    o_row = o_t[:, None] * (H * K) + tl.arange(0, K)[None, :]
    b_k, b_q = tl.load(p_k + o_row, mask=m_t, other=0.0).to(tl.float32), tl.load(p_q + o_row, mask=m_t, other=0.0).to(tl.float32)
    b_kr, b_qr = inverse_norm(b_k, EPS), inverse_norm(b_q, EPS) * scale
    b_beta = tl.sigmoid(tl.load(raw_beta + at + o_t * H, mask=o_t < n, other=0.0).to(tl.float32))[:, None]

    b_qk = tl.where(o_t[:, None] == o_t[None, :], tl.sum(b_q * b_qr * (b_k * b_kr), 1)[:, None], 0.0)
    b_kk = tl.zeros([BT, BT], tl.float32)
    for level in range(6):
        b_ql, b_kl = pair_products(p_q, p_k, p_g, b_qr, b_kr, m_t, level, H, K, BT, BK, dtype)
        below = lower_left(o_t, level)
        b_qk, b_kk = tl.where(below, b_ql, b_qk), tl.where(below, b_kl, b_kk)
    tl.store(Aqk + tile * (BT * BT) + o_t[:, None] * BT + o_t[None, :], b_qk.to(dtype))
    b_A = invert(b_kk * b_beta, dtype).to(dtype)  # [BT, BT]

    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)[None, :]
        o_tk, p_tk = o_t[:, None] * (H * K) + o_k, o_t[:, None] * K + o_k
        b_g = tl.load(p_g + p_tk)
        b_last = tl.load(p_g + (BT - 1) * K + o_k)
        b_kn = tl.load(p_k + o_tk, mask=m_t, other=0.0) * b_kr  # [BT, BK]
        b_qn = tl.load(p_q + o_tk, mask=m_t, other=0.0) * b_qr
        b_up = tl.exp2(b_g.to(tl.float32))
        b_w = tl.dot(b_A, (b_kn * b_up * b_beta).to(dtype), input_precision="ieee")
        tl.store(wq + tile * (2 * BT * K) + p_tk, b_w.to(dtype))
        tl.store(wq + tile * (2 * BT * K) + BT * K + p_tk, (b_qn * b_up).to(dtype))
        tl.store(kg + tile * (BT * K) + p_tk, (b_kn * tl.exp2((b_last - b_g).to(tl.float32))).to(dtype))
    for i_v in range(V // BK):
        o_v = i_v * BK + tl.arange(0, BK)
        b_v = tl.load(v + at * V + o_t[:, None] * (H * V) + o_v[None, :], mask=m_t, other=0.0) * b_beta  # [BT, BK]
        b_u = tl.dot(tl.trans(b_v.to(dtype)), tl.trans(b_A), input_precision="ieee")
        tl.store(uT + tile * (BT * V) + o_v[:, None] * BT + o_t[None, :], b_u.to(dtype))


@triton.jit
def high_low(b_x, dtype: tl.constexpr):
    """x as the sum of two tiles of dtype: itself, rounded, and what that leaves."""
    b_h = b_x.to(dtype)
    return b_h, (b_x - b_h.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["T", "G", "SC"])
def fused_state_fwd_kernel(
    wq, kg, uT, Aqk, g, h0, has_h0, added, P, o, ht, cu_seqlens, T, G, SC,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    START: tl.constexpr, MASKED: tl.constexpr, KV: tl.constexpr, CUT: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """BV rows of the state S [V, K] of one sequence and head, over the SC chunks of one of its G segments.

    OUT: the state that the segment starts with, out of h0, `added` and P; then o, and at the end of the sequence ht [N, H, V, K]. Else,
    for every segment but the last of a sequence, what it makes of a state, S P + added: the rows of `added` [N, G - 1, H, V, K] from
    a state of zero, by the programs that are `own`, and those of P [N, G - 1, H, 2, K, K], its high and low parts, from the identity.
    CUT: G > 1; START: h0 [N, H, V, K] is given; MASKED: has_h0 too; KV: h0 is [N, H, K, V]. wq, kg, uT and Aqk are descriptors over
    the rows of all tiles (slot, head, row of the tile).
    """
    NV: tl.constexpr = (V if OUT else V + K) // BV
    i_v, i_g, i_n, i_h = tl.program_id(0) % NV, tl.program_id(0) // NV % G, tl.program_id(0) // (NV * G), tl.program_id(1)
    bos = tl.load(cu_seqlens + i_n)
    length = tl.minimum(tl.load(cu_seqlens + i_n + 1), T) - bos
    chunks = tl.cdiv(length, BT)
    begin = i_g * SC
    end = tl.minimum(begin + SC, chunks)
    if begin >= chunks:
        return
    if (not OUT) & (end == chunks):
        return
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    o_vk = o_v[:, None] * K + o_k[None, :]
    dtype = wq.dtype
    p_S = (i_n.to(tl.int64) * H + i_h) * (K * V)
    own = True
    if OUT:
        b_S = tl.zeros([BV, K], tl.float32)
        if START:
            has = tl.load(has_h0 + i_n) != 0 if MASKED else True
            o_S = o_k[None, :] * V + o_v[:, None] if KV else o_vk
            b_S += tl.load(h0 + p_S + o_S, mask=has, other=0.0).to(tl.float32)
        if CUT:
            for i in tl.range(0, i_g, num_stages=2):
                part = (i_n.to(tl.int64) * (G - 1) + i) * H + i_h
                b_h, b_l = high_low(b_S, dtype)
                p_P = P + part * (2 * K * K) + o_k[:, None] * K + o_k[None, :]
                b_P = tl.load(p_P)
                b_S = tl.dot(b_l, b_P, tl.load(added + part * (V * K) + o_vk), input_precision="ieee")
                b_S = tl.dot(b_h, tl.load(p_P + K * K), b_S, input_precision="ieee")
                b_S = tl.dot(b_h, b_P, b_S, input_precision="ieee")
    else:
        b_S = tl.where(o_v[:, None] - V == o_k[None, :], 1.0, 0.0)
        own = i_v < V // BV
    slot = bos // BT + i_n
    p_last = g + ((slot.to(tl.int64) * H + i_h) * BT + BT - 1) * K + o_k
    b_decay = tl.exp2(tl.load(p_last + begin.to(tl.int64) * (H * BT * K)).to(tl.float32))
    for i_c in range(begin, end):
        tile = (slot + i_c) * H + i_h
        # a step ahead: its wait would be in the chain
        b_next = tl.exp2(tl.load(p_last + tl.minimum(i_c + 1, chunks - 1).to(tl.int64) * (H * BT * K)).to(tl.float32))
        b_h = b_S.to(dtype)
        b_u = uT.load([tile * V + (i_v if OUT else i_v % (V // BV)) * BV, 0]).to(tl.float32)  # [BV, BT]
        b_v = (tl.where(own, b_u, 0.0) - tl.dot(b_h, tl.trans(wq.load([tile * (2 * BT), 0])), input_precision="ieee")).to(dtype)
        b_kg = kg.load([tile * BT, 0])
        if dtype == tl.float32:
            # one rounding at the size of S; a product that accumulates in S would round per token
            b_S = tl.fma(b_S, tl.broadcast_to(b_decay[None, :], [BV, K]), tl.dot(b_v, b_kg, input_precision="ieee"))
        else:
            b_S = tl.dot(b_v, b_kg, b_S * b_decay[None, :])
        b_decay = b_next
        if OUT:
            b_o = tl.dot(b_h, tl.trans(wq.load([tile * (2 * BT) + BT, 0])), input_precision="ieee")  # [BV, BT]
            b_o = tl.dot(b_v, tl.trans(Aqk.load([tile * BT, 0])), b_o, input_precision="ieee")
            p_o = o + ((bos.to(tl.int64) + i_c * BT) * H + i_h) * V + o_t[None, :] * (H * V) + o_v[:, None]
            tl.store(p_o, b_o.to(dtype), mask=(o_t < length - i_c * BT)[None, :])
    if OUT:
        if end == chunks:
            tl.store(ht + p_S + o_vk, b_S)
    else:
        part = (i_n.to(tl.int64) * (G - 1) + i_g) * H + i_h
        if own:
            tl.store(added + part * (V * K) + o_vk, b_S)
        else:
            b_h, b_l = high_low(b_S, dtype)
            p_P = P + part * (2 * K * K) + (o_v[:, None] - V) * K + o_k[None, :]
            tl.store(p_P, b_h)
            tl.store(p_P + K * K, b_l)


def halves_fit(lower_bound: float | None, dtype: torch.dtype) -> bool:
    """Whether no factor of half a chunk around its reference overflows; float16 has no such exponents.

    Not in float32: a device's exp2(x) exp2(-x) is too far from 1.
    """
    return lower_bound is not None and dtype == torch.bfloat16 and CHUNK / 4 * abs(lower_bound) * RCP_LN2 + 0.5 <= LARGEST_EXPONENT


def segments(N: int, programs: int, T: int, dtype: torch.dtype) -> int:
    """Into how many segments the state kernel cuts a sequence that has all T tokens; programs: how many it has uncut.

    One outside bfloat16, and on ROCm, where nobody measured whether it pays.
    """
    if dtype != torch.bfloat16 or torch.version.hip:
        return 1
    return max(1, min(PROGRAMS // programs, T // (N * SHORTEST * CHUNK)))


def checked_configs(configs: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, int]]:
    """configs itself. Raises BadInput for a kernel, an option or a value that no launch could use."""
    if not isinstance(configs, Mapping):
        raise BadInput(f"configs: is a {type(configs).__name__}, expected a mapping from one of {tuple(DEFAULTS)} to launch options")
    for name, config in configs.items():
        if name not in DEFAULTS:
            raise BadInput(f"configs: {name!r} is not one of the kernels {tuple(DEFAULTS)}")
        options = (*(key for key in DEFAULTS[name] if key != "num_stages"), "num_stages")
        if not isinstance(config, Mapping):
            raise BadInput(f"configs: {name}: is a {type(config).__name__}, expected a mapping of {options}")
        for key, x in config.items():
            if key not in options:
                raise BadInput(f"configs: {name}: {key!r} is not one of {options}")
            least = 16 if key.startswith("B") else 1
            if not isinstance(x, int) or x < least or (key != "num_stages" and x & (x - 1)):
                kind = "whole number" if key == "num_stages" else "power of two"
                raise BadInput(f"configs: {name}: {key} is {x!r}, expected a {kind} from {least} on; CONFIGS has some")
    return configs


def chunk_kda(
    call: KdaCall, configs: Mapping[str, Mapping[str, int]] | None = None, check: bool = True, empty: Callable[..., Tensor] = torch.empty
) -> dict[str, Tensor]:
    """Chunk KDA over a varlen batch, from the raw gate: o [T, H, V] in the dtype of v and final_state [N, H, V, K] fp32.

    configs  kernel ("gate", "halves", "chunk", "state") -> launch configuration, over DEFAULTS; CONFIGS lists what is worth trying
    check    False: the caller has checked the call (every sequence has a token); then nothing waits for the device
    empty    makes the buffers, torch.empty's signature; a test passes one that fills them with NaN

    float32, bfloat16 or float16, K and V of 64 or 128; forward only; state_indices are not read, the states are initial_state's. The
    equations are stages.chunk_kda's, whose stage outputs this does not keep. Raises BadInput for a malformed call or configs;
    Unsupported for a head_dim, dtype or device without a kernel.
    """
    names = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias", "cu_seqlens", "initial_state", "has_initial_state")
    tensors = {name: getattr(call, name) for name in names}
    if check:
        call.check()
    check_launch(fused_chunk_fwd_kernel, tensors)
    given = checked_configs(configs or {})
    (T, H, K), V, N, dtype, device = call.q.shape, call.v.shape[-1], call.num_sequences, call.q.dtype, call.q.device
    if dtype == torch.float64:
        raise Unsupported('q is float64; the Triton kernels compute in fp32: use float32, bfloat16 or float16, or impl="torch"')
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        raise Unsupported(f'head_dim K = {K}, V = {V}; the kernel takes {HEAD_DIMS}: use impl="torch"')
    defaults = DEFAULTS_FP32 if dtype == torch.float32 else DEFAULTS_HIP if torch.version.hip else DEFAULTS
    config = {name: {**defaults[name], **given.get(name, {})} for name in DEFAULTS}
    config["gate"]["BK"], config["chunk"]["BK"] = min(config["gate"]["BK"], K), min(config["chunk"]["BK"], K, V)

    q, k, v, raw_g, raw_beta, A_log, dt_bias, cu, h0, has = (None if x is None else x.contiguous() for x in tensors.values())
    cu = cu.int()  # a row of a descriptor is 32 bits wide
    o = empty(v.shape, dtype=dtype, device=device)
    final = empty((N, H, V, K), dtype=torch.float32, device=device)
    slots = T // CHUNK + N
    shapes = ((2 * CHUNK, K), (CHUNK, K), (V, CHUNK), (CHUNK, CHUNK))
    tiles = [empty((slots * H * rows, d), dtype=dtype, device=device) for rows, d in shapes]  # wq, kg, uT, Aqk
    bound = 0.0 if call.lower_bound is None else float(call.lower_bound)
    g = empty((slots * H * CHUNK, K), dtype=torch.float64 if dtype == torch.float32 else torch.float32, device=device)
    fused_gate_fwd_kernel[(H * (K // config["gate"]["BK"]), slots)](
        raw_g, A_log.float(), dt_bias.float(), g, cu, bound, N, T,
        H=H, K=K, BT=CHUNK, SCALE=RCP_LN2, BOUNDED=call.lower_bound is not None, **config["gate"],
    )  # fmt: skip
    name, kernel = ("halves", fused_halves_fwd_kernel) if halves_fit(call.lower_bound, dtype) else ("chunk", fused_chunk_fwd_kernel)
    kernel[(H, slots)](q, k, v, g, raw_beta, *tiles, cu, K**-0.5, N, T, H=H, K=K, V=V, BT=CHUNK, EPS=L2_EPS, **config[name])
    BV = min(config["state"].pop("BV"), K, V)
    blocks = ((CHUNK, K), (CHUNK, K), (BV, CHUNK), (CHUNK, CHUNK))
    tiles = [TensorDescriptor.from_tensor(x, block) for x, block in zip(tiles, blocks, strict=True)]
    G = segments(N, N * H * (V // BV), T, dtype)
    SC = triton.cdiv(triton.cdiv(T, CHUNK), G)
    start = {"START": h0 is not None, "MASKED": has is not None, "KV": call.state_layout == "kv"}
    h0, has = final if h0 is None else h0, cu if has is None else has
    added = empty((N, G - 1, H, V, K), dtype=torch.float32, device=device)
    P = empty((N, G - 1, H, 2, K, K), dtype=dtype, device=device)
    for out in (False, True) if G > 1 else (True,):
        rows = V if out else V + K
        fused_state_fwd_kernel[(N * G * (rows // BV), H)](
            *tiles, g, h0, has, added, P, o, final, cu, T, G, SC,
            H=H, K=K, V=V, BT=CHUNK, BV=BV, CUT=G > 1, OUT=out, **start, **config["state"],
        )  # fmt: skip
    return {"o": o, "final_state": final}
