"""The six chunk stages of KDA as Triton kernels: packed sequences by cu_seqlens, head_dim K, V in {64, 128}.

    prepare        q_n = q / |q|,  k_n = k / |k|,  beta = sigmoid(raw_beta)                    row by row
    gate_cumsum    g   = cumsum(log-decay) inside the chunk, log2 units
    intra          Aqk[i,j] = scale q_i . (k_j exp2(g_i - g_j)), j <= i;   Akk[i,j] = beta_i k_i . (k_j exp2(g_i - g_j)), j < i
    inverse        A   = (I + Akk)^-1
    recompute_w_u  u   = A (beta v),  w = A (beta exp2(g) k),  kg_j = k_j exp2(g_last - g_j)
    state          v_new = u - w S^T,  S <- S Diag(exp2(g_last)) + v_new^T kg                  chunk after chunk
    output         o   = (scale q exp2(g)) S^T + Aqk v_new

The stage split follows flash-linear-attention's and vLLM's kernels; stages.py holds the same stages in torch. A program
loads tiles of 64 token rows; PADDING says what a masked row is worth. Every load is a masked pointer load, so the kernels
build for CUDA and ROCm (compiled with Triton 3.6.0, 3.7.1 and 3.9.0), and run on small shapes under TRITON_INTERPRET=1 (not in bfloat16).
Products take operands of the call's dtype and accumulate in fp32; fp32 operands are multiplied as IEEE fp32.
"""

from collections.abc import Callable, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3lab.errors import BadInput, Unsupported
from k3lab.kda.call import KdaCall
from k3lab.kda.reference import L2_EPS
from k3lab.kda.runtime import check_launch
from k3lab.kda.stages import RCP_LN2, STAGES, chunk_index, gate_is_bounded, padding_of
from k3lab.kda.triton_ops import chunk_span, load_rows, log_decay
from k3lab.shapes import CHUNK, SUB_CHUNK

HEAD_DIMS = (64, 128)
RECOMPUTE_W_U_CONFIGS = [{"num_warps": w, "num_stages": s} for w in (2, 4, 8) for s in (2, 3, 4)]
CONFIGS: dict[str, list[dict[str, int]]] = {
    "prepare": [{"BR": r, "num_warps": w} for r in (16, 32, 64) for w in (4, 8)],
    "gate_cumsum": [{"BK": b, "num_warps": w} for b in (32, 64) for w in (2, 4, 8)],
    "intra": [{"BK": b, "num_warps": w, "num_stages": s} for b in (32, 64) for w in (1, 2, 4) for s in (1, 2, 3)],
    "inverse": [{"num_warps": w} for w in (1, 2, 4)],
    "recompute_w_u": RECOMPUTE_W_U_CONFIGS,
    "state": [{"BV": b, "num_warps": w, "num_stages": s} for b in (16, 32, 64) for w in (2, 4, 8) for s in (1, 2, 3)],
    "output": [{"BK": k, "BV": v, "num_warps": w, "num_stages": s} for k in (32, 64) for v in (32, 64) for w in (4, 8) for s in (1, 2, 3)],
}
DEFAULTS: dict[str, dict[str, int]] = {
    "prepare": {"BR": 32, "num_warps": 4},
    "gate_cumsum": {"BK": 64, "num_warps": 4},
    "intra": {"BK": 64, "num_warps": 4, "num_stages": 1},
    "inverse": {"num_warps": 1},
    "recompute_w_u": {"num_warps": 4, "num_stages": 2},
    "state": {"BV": 16, "num_warps": 4, "num_stages": 1},
    "output": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 1},
}


@triton.jit
def prepare_fwd_kernel(q, k, raw_beta, q_n, k_n, beta, R, EPS: tl.constexpr, K: tl.constexpr, BR: tl.constexpr):
    """q_n = q / sqrt(q.q + eps), k_n alike, beta = sigmoid(raw_beta), over R = T * H rows."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    m_r = o_r < R
    o_rk = o_r[:, None] * K + tl.arange(0, K)[None, :]
    b_q = tl.load(q + o_rk, mask=m_r[:, None], other=0.0).to(tl.float32)  # [BR, K]
    b_k = tl.load(k + o_rk, mask=m_r[:, None], other=0.0).to(tl.float32)
    b_q *= tl.rsqrt(tl.sum(b_q * b_q, 1) + EPS)[:, None]
    b_k *= tl.rsqrt(tl.sum(b_k * b_k, 1) + EPS)[:, None]
    tl.store(q_n + o_rk, b_q.to(q_n.dtype.element_ty), mask=m_r[:, None])
    tl.store(k_n + o_rk, b_k.to(k_n.dtype.element_ty), mask=m_r[:, None])
    b_b = tl.load(raw_beta + o_r, mask=m_r, other=0.0).to(tl.float32)
    tl.store(beta + o_r, tl.sigmoid(b_b), mask=m_r)


@triton.jit
def gate_cumsum_fwd_kernel(
    raw_g, A_log, dt_bias, g, cu_seqlens, chunk_indices, lower_bound, T,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, BOUNDED: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """g[i] = 1/ln 2 * sum_{j <= i} log_decay(raw_g[j]) inside the chunk: a scan, so valid rows never meet masked ones."""
    NK: tl.constexpr = K // BK
    i_t, i_k, i_h = tl.program_id(0) // NK, tl.program_id(0) % NK, tl.program_id(1)
    row0, n = chunk_span(cu_seqlens, chunk_indices, T, i_t, BT)
    o_t = tl.arange(0, BT)
    m_t = (o_t < n)[:, None]
    o_k = i_k * BK + tl.arange(0, BK)
    o_tk = (row0 * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    b_x = load_rows(raw_g + o_tk, m_t, PADDING).to(tl.float32) + tl.load(dt_bias + i_h * K + o_k)[None, :]  # [BT, BK]
    b_g = log_decay(b_x, tl.exp(tl.load(A_log + i_h)), lower_bound, BOUNDED)
    tl.store(g + o_tk, tl.cumsum(b_g * SCALE, 0), mask=m_t)


@triton.jit
def intra_fwd_kernel(
    q_n, k_n, g, beta, Aqk, Akk, cu_seqlens, chunk_indices, scale, T,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BOUNDED: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """BC rows of Aqk and Akk: columns before the row block by one product, the diagonal block apart.

    Before the block, exponents are split at its first row, so both halves are <= 0. On the diagonal they are split at row
    min(BC/2, n-1) if the gate is bounded (at most 8 rows * |lower_bound|), else taken pair by pair. What a column after
    row i holds may be inf or NaN; the causal mask is a select and drops it.
    """
    NC: tl.constexpr = BT // BC
    i_t, i_c, i_h = tl.program_id(0) // NC, tl.program_id(0) % NC, tl.program_id(1)
    row0, n = chunk_span(cu_seqlens, chunk_indices, T, i_t, BT)
    first = i_c * BC
    if first >= n:
        return
    base = row0 * H + i_h
    dtype = q_n.dtype.element_ty
    o_t, o_c = tl.arange(0, BT), tl.arange(0, BC)
    o_i = first + o_c
    m_t, m_i = (o_t < n)[:, None], (o_i < n)[:, None]
    b_beta = load_rows(beta + base + o_i * H, o_i < n, PADDING)[:, None]

    b_qk, b_kk = tl.zeros([BC, BT], tl.float32), tl.zeros([BC, BT], tl.float32)
    b_dqk, b_dkk = tl.zeros([BC, BC], tl.float32), tl.zeros([BC, BC], tl.float32)
    for i_k in range(K // BK):
        o_k = (base * K + i_k * BK + tl.arange(0, BK))[None, :]
        o_ik = o_i[:, None] * (H * K) + o_k
        b_q = load_rows(q_n + o_ik, m_i, PADDING).to(tl.float32)  # [BC, BK]
        b_k = load_rows(k_n + o_ik, m_i, PADDING).to(tl.float32)
        b_g = load_rows(g + o_ik, m_i, PADDING)
        if first > 0:
            b_ref = tl.load(g + first * (H * K) + o_k)  # [1, BK]
            b_up = tl.exp2(b_g - b_ref)
            o_tk = o_t[:, None] * (H * K) + o_k
            b_down = load_rows(k_n + o_tk, m_t, PADDING) * tl.exp2(b_ref - load_rows(g + o_tk, m_t, PADDING))  # [BT, BK]
            b_down = tl.trans(b_down.to(dtype))
            b_qk += tl.dot((b_q * b_up).to(dtype), b_down, input_precision="ieee")
            b_kk += tl.dot((b_k * b_up).to(dtype), b_down, input_precision="ieee")
        if BOUNDED:
            b_ref = tl.load(g + (first + tl.minimum(BC // 2, n - first - 1)) * (H * K) + o_k)
            b_up = tl.exp2(b_g - b_ref)
            b_down = tl.trans(b_k * tl.exp2(b_ref - b_g))
            b_dqk += tl.dot(b_q * b_up, b_down, input_precision="ieee")
            b_dkk += tl.dot(b_k * b_up, b_down, input_precision="ieee")
        else:
            for j in range(tl.minimum(BC, n - first)):
                o_jk = (first + j) * (H * K) + o_k
                b_pair = tl.load(k_n + o_jk).to(tl.float32) * tl.exp2(b_g - tl.load(g + o_jk))
                b_dqk += tl.where(o_c[None, :] == j, tl.sum(b_q * b_pair, 1)[:, None], 0.0)
                b_dkk += tl.where(o_c[None, :] == j, tl.sum(b_k * b_pair, 1)[:, None], 0.0)

    before, outside = o_t[None, :] < first, (o_t[None, :] < first) | (o_t[None, :] >= first + BC)
    o_A = base * BT + o_i[:, None] * (H * BT)
    tl.store(Aqk + o_A + o_t[None, :], tl.where(before, b_qk * scale, 0.0).to(Aqk.dtype.element_ty), mask=m_i & outside)
    tl.store(Akk + o_A + o_t[None, :], tl.where(before, b_kk * b_beta, 0.0), mask=m_i & outside)
    b_dqk = tl.where(o_c[:, None] >= o_c[None, :], b_dqk * scale, 0.0)
    b_dkk = tl.where(o_c[:, None] > o_c[None, :], b_dkk * b_beta, 0.0)
    tl.store(Aqk + o_A + o_i[None, :], b_dqk.to(Aqk.dtype.element_ty), mask=m_i)
    tl.store(Akk + o_A + o_i[None, :], b_dkk, mask=m_i)


@triton.jit
def load_block(p_A, n, i_r, i_c, H: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PADDING: tl.constexpr):
    """Block (i_r, i_c) of the chunk's [BT, BT] matrix, [BC, BC]."""
    o_r, o_c = i_r * BC + tl.arange(0, BC), i_c * BC + tl.arange(0, BC)
    return load_rows(p_A + o_r[:, None] * (H * BT) + o_c[None, :], (o_r < n)[:, None], PADDING)


@triton.jit
def invert_block(p_A, n, i_b, H: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PADDING: tl.constexpr):
    """(I + L)^-1 of diagonal block i_b, row by row. The sum of a step runs over the whole tile, masked rows included."""
    o_c = tl.arange(0, BC)
    b_X = -tl.where(o_c[:, None] > o_c[None, :], load_block(p_A, n, i_b, i_b, H, BT, BC, PADDING), 0.0)
    for i in range(2, tl.minimum(BC, n - i_b * BC)):
        b_row = -tl.where(o_c < i, tl.load(p_A + (i_b * BC + i) * (H * BT) + i_b * BC + o_c), 0.0)
        b_row += tl.sum(b_row[:, None] * b_X, 0)
        b_X = tl.where((o_c == i)[:, None], b_row[None, :], b_X)
    return b_X + tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)


@triton.jit
def store_block(p_A, n, i_r, i_c, b, H: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    o_r, o_c = i_r * BC + tl.arange(0, BC), i_c * BC + tl.arange(0, BC)
    tl.store(p_A + o_r[:, None] * (H * BT) + o_c[None, :], b.to(p_A.dtype.element_ty), mask=(o_r < n)[:, None])


@triton.jit
def inverse_fwd_kernel(
    Akk, A, cu_seqlens, chunk_indices, T, H: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PADDING: tl.constexpr
):  # fmt: skip
    """A = (I + Akk)^-1: the four diagonal blocks by substitution, then A_rc = -A_rr sum_m Akk_rm A_mc by products."""
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    row0, n = chunk_span(cu_seqlens, chunk_indices, T, i_t, BT)
    p_L, p_A = Akk + (row0 * H + i_h) * BT, A + (row0 * H + i_h) * BT
    b_00 = invert_block(p_L, n, 0, H, BT, BC, PADDING)
    b_11 = invert_block(p_L, n, 1, H, BT, BC, PADDING)
    b_22 = invert_block(p_L, n, 2, H, BT, BC, PADDING)
    b_33 = invert_block(p_L, n, 3, H, BT, BC, PADDING)

    L_10 = load_block(p_L, n, 1, 0, H, BT, BC, PADDING)
    L_20 = load_block(p_L, n, 2, 0, H, BT, BC, PADDING)
    L_21 = load_block(p_L, n, 2, 1, H, BT, BC, PADDING)
    L_30 = load_block(p_L, n, 3, 0, H, BT, BC, PADDING)
    L_31 = load_block(p_L, n, 3, 1, H, BT, BC, PADDING)
    L_32 = load_block(p_L, n, 3, 2, H, BT, BC, PADDING)

    b_10 = -tl.dot(b_11, tl.dot(L_10, b_00, input_precision="ieee"), input_precision="ieee")
    b_21 = -tl.dot(b_22, tl.dot(L_21, b_11, input_precision="ieee"), input_precision="ieee")
    b_32 = -tl.dot(b_33, tl.dot(L_32, b_22, input_precision="ieee"), input_precision="ieee")
    b_s = tl.dot(L_20, b_00, input_precision="ieee") + tl.dot(L_21, b_10, input_precision="ieee")
    b_20 = -tl.dot(b_22, b_s, input_precision="ieee")
    b_s = tl.dot(L_31, b_11, input_precision="ieee") + tl.dot(L_32, b_21, input_precision="ieee")
    b_31 = -tl.dot(b_33, b_s, input_precision="ieee")
    b_s = tl.dot(L_30, b_00, input_precision="ieee") + tl.dot(L_31, b_10, input_precision="ieee")
    b_s += tl.dot(L_32, b_20, input_precision="ieee")
    b_30 = -tl.dot(b_33, b_s, input_precision="ieee")

    o_t = tl.arange(0, BT)
    above = o_t[None, :] // BC > o_t[:, None] // BC
    p_above = p_A + o_t[:, None] * (H * BT) + o_t[None, :]
    tl.store(p_above, tl.zeros([BT, BT], A.dtype.element_ty), mask=above & (o_t < n)[:, None])
    store_block(p_A, n, 0, 0, b_00, H, BT, BC)
    store_block(p_A, n, 1, 0, b_10, H, BT, BC)
    store_block(p_A, n, 1, 1, b_11, H, BT, BC)
    store_block(p_A, n, 2, 0, b_20, H, BT, BC)
    store_block(p_A, n, 2, 1, b_21, H, BT, BC)
    store_block(p_A, n, 2, 2, b_22, H, BT, BC)
    store_block(p_A, n, 3, 0, b_30, H, BT, BC)
    store_block(p_A, n, 3, 1, b_31, H, BT, BC)
    store_block(p_A, n, 3, 2, b_32, H, BT, BC)
    store_block(p_A, n, 3, 3, b_33, H, BT, BC)


@triton.jit
def recompute_w_u_fwd_kernel(
    k, kg, v, beta, w, u, A, gk, cu_seqlens, chunk_indices, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """u = A (beta v),  w = A (beta exp2(g) k),  kg = k exp2(g_last - g): both products contract over the token axis.

    k, kg, w [T, H, K]; v, u [T, H, V]; A [T, H, BT]; beta [T, H] and gk [T, H, K] (g, log2 units) fp32. Argument order, tiles
    and the two loops are upstream's: the loops are pipelined by num_stages, which is what the race analysis is about.
    """
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    row0, n = chunk_span(cu_seqlens, chunk_indices, T, i_t, BT)
    o_t = tl.arange(0, BT)
    m_t = o_t < n
    base = row0 * H + i_h
    o_row = o_t[:, None] * H
    b_beta = load_rows(beta + base + o_t * H, m_t, PADDING)  # [BT]
    b_A = load_rows(A + base * BT + o_row * BT + o_t[None, :], m_t[:, None], PADDING)  # [BT, BT]

    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        b_v = load_rows(v + base * V + o_row * V + o_v[None, :], m_t[:, None], PADDING)  # [BT, BV]
        b_vb = (b_v * b_beta[:, None]).to(b_A.dtype)
        b_u = tl.dot(b_A, b_vb, input_precision="ieee")
        tl.store(u + base * V + o_row * V + o_v[None, :], b_u.to(u.dtype.element_ty), mask=m_t[:, None])

    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        b_k = load_rows(k + base * K + o_row * K + o_k[None, :], m_t[:, None], PADDING)  # [BT, BK]
        b_g = load_rows(gk + base * K + o_row * K + o_k[None, :], m_t[:, None], PADDING)  # [BT, BK]
        b_last = tl.load(gk + base * K + (n - 1) * H * K + o_k)  # [BK], always a valid row
        b_kb = (b_k * b_beta[:, None] * tl.exp2(b_g)).to(b_A.dtype)
        b_w = tl.dot(b_A, b_kb, input_precision="ieee")
        tl.store(w + base * K + o_row * K + o_k[None, :], b_w.to(w.dtype.element_ty), mask=m_t[:, None])
        b_kg = b_k * tl.exp2(b_last[None, :] - b_g)
        tl.store(kg + base * K + o_row * K + o_k[None, :], b_kg.to(kg.dtype.element_ty), mask=m_t[:, None])


@triton.jit
def state_fwd_kernel(
    w, u, kg, g, h0, h, v_new, ht, cu_seqlens, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """BV rows of the state [V, K] of one sequence and head, chunk after chunk; kg^T v_new contracts over the token axis."""
    NV: tl.constexpr = V // BV
    i_n, i_v, i_h = tl.program_id(0) // NV, tl.program_id(0) % NV, tl.program_id(1)
    bos, eos = tl.load(cu_seqlens + i_n), tl.minimum(tl.load(cu_seqlens + i_n + 1), T)
    chunk0 = tl.zeros([], tl.int32)
    for i in range(0, i_n, 128):
        o_n = i + tl.arange(0, 128)
        b_len = tl.load(cu_seqlens + o_n + 1, mask=o_n < i_n, other=0) - tl.load(cu_seqlens + o_n, mask=o_n < i_n, other=0)
        chunk0 += tl.sum((b_len + BT - 1) // BT)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    o_vk = o_v[:, None] * K + o_k[None, :]
    o_S = (i_n.to(tl.int64) * H + i_h) * (V * K) + o_vk
    b_S = tl.load(h0 + o_S).to(tl.float32)  # [BV, K]
    for i_c in range(tl.cdiv(eos - bos, BT)):
        row0 = bos + i_c * BT
        n = tl.minimum(eos - row0, BT)
        m_t = (o_t < n)[:, None]
        base = row0.to(tl.int64) * H + i_h
        b_h = b_S.to(h.dtype.element_ty)
        tl.store(h + ((chunk0 + i_c).to(tl.int64) * H + i_h) * (V * K) + o_vk, b_h)
        o_tk = base * K + o_t[:, None] * (H * K) + o_k[None, :]
        o_tv = base * V + o_t[:, None] * (H * V) + o_v[None, :]
        b_w = load_rows(w + o_tk, m_t, PADDING)  # [BT, K]
        b_v = load_rows(u + o_tv, m_t, PADDING) - tl.dot(b_w, tl.trans(b_h), input_precision="ieee")
        b_v = b_v.to(v_new.dtype.element_ty)  # [BT, BV]
        tl.store(v_new + o_tv, b_v, mask=m_t)
        b_decay = tl.exp2(tl.load(g + base * K + (n - 1) * (H * K) + o_k))[None, :]
        b_dS = tl.dot(tl.trans(b_v), load_rows(kg + o_tk, m_t, PADDING), input_precision="ieee")
        # one rounding at the size of S; `b_S += dot` would be fused into the product, with a rounding per token
        b_S = tl.fma(b_S, tl.broadcast_to(b_decay, [BV, K]), b_dS)
    tl.store(ht + o_S, b_S)


@triton.jit
def output_fwd_kernel(
    q_n, g, Aqk, v_new, h, o, cu_seqlens, chunk_indices, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """o = scale (q exp2(g)) S^T + Aqk v_new: the second product contracts over the token axis."""
    NV: tl.constexpr = V // BV
    i_t, i_v, i_h = tl.program_id(0) // NV, tl.program_id(0) % NV, tl.program_id(1)
    row0, n = chunk_span(cu_seqlens, chunk_indices, T, i_t, BT)
    base = row0 * H + i_h
    o_t, o_v = tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_t = (o_t < n)[:, None]
    b_o = tl.zeros([BT, BV], tl.float32)
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_tk = base * K + o_t[:, None] * (H * K) + o_k[None, :]
        b_qg = load_rows(q_n + o_tk, m_t, PADDING) * tl.exp2(load_rows(g + o_tk, m_t, PADDING))  # [BT, BK]
        b_h = tl.load(h + (i_t.to(tl.int64) * H + i_h) * (V * K) + o_v[:, None] * K + o_k[None, :])  # [BV, BK]
        b_o += tl.dot(b_qg.to(b_h.dtype), tl.trans(b_h), input_precision="ieee")
    b_A = load_rows(Aqk + base * BT + o_t[:, None] * (H * BT) + o_t[None, :], m_t, PADDING)  # [BT, BT]
    o_tv = base * V + o_t[:, None] * (H * V) + o_v[None, :]
    b_o = b_o * scale + tl.dot(b_A, load_rows(v_new + o_tv, m_t, PADDING), input_precision="ieee")
    tl.store(o + o_tv, b_o.to(o.dtype.element_ty), mask=m_t)


Empty = Callable[..., Tensor]


def _ready(kernel: object, **tensors: Tensor) -> list[Tensor]:
    """The tensors, contiguous, once the kernel is known to take them where they are."""
    check_launch(kernel, tensors)
    for name, x in tensors.items():
        if x.dtype == torch.float64:
            raise Unsupported(f'{name} is float64; the Triton kernels compute in fp32: use float32, bfloat16 or float16, or impl="torch"')
        if name in ("q", "k", "v", "q_n", "k_n", "w", "u", "v_new", "raw_g") and x.shape[-1] not in HEAD_DIMS:
            raise Unsupported(f'{name}: head_dim {x.shape[-1]} is not one of {HEAD_DIMS}; use impl="torch"')
    return [x.contiguous() for x in tensors.values()]


def _config(stage: str, config: Mapping[str, int] | None) -> dict[str, int]:
    return {**DEFAULTS[stage], **(config or {})}


def prepare(
    q: Tensor, k: Tensor, raw_beta: Tensor, config: Mapping[str, int] | None = None, empty: Empty = torch.empty
) -> dict[str, Tensor]:
    """q_n, k_n [T, H, K] (L2-normalised, eps 1e-6 in the root, dtype of q) and beta = sigmoid(raw_beta) [T, H] fp32."""
    q, k, raw_beta = _ready(prepare_fwd_kernel, q=q, k=k, raw_beta=raw_beta)
    q_n, k_n = (empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    beta = empty(raw_beta.shape, dtype=torch.float32, device=q.device)
    rows = beta.numel()
    if rows:
        prepare_fwd_kernel[lambda m: (triton.cdiv(rows, m["BR"]),)](
            q, k, raw_beta, q_n, k_n, beta, rows, EPS=L2_EPS, K=q.shape[-1], **_config("prepare", config)
        )  # fmt: skip
    return {"q_n": q_n, "k_n": k_n, "beta": beta}


def gate_cumsum(
    raw_g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, cu_seqlens: Tensor, chunk_indices: Tensor,
    padding: str = "zero", config: Mapping[str, int] | None = None, empty: Empty = torch.empty,
) -> Tensor:  # fmt: skip
    """g [T, H, K] fp32: the inclusive cumulative log-decay inside each chunk, log2 units."""
    named = {"raw_g": raw_g, "A_log": A_log.float(), "dt_bias": dt_bias.float()}
    raw_g, A_log, dt_bias, cu, ci = _ready(gate_cumsum_fwd_kernel, **named, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    T, H, K = raw_g.shape
    g = empty(raw_g.shape, dtype=torch.float32, device=raw_g.device)
    if len(ci) and H:
        gate_cumsum_fwd_kernel[lambda m: (len(ci) * (K // m["BK"]), H)](
            raw_g, A_log, dt_bias, g, cu, ci, 0.0 if lower_bound is None else float(lower_bound), T,
            H=H, K=K, BT=CHUNK, SCALE=RCP_LN2, BOUNDED=lower_bound is not None, PADDING=padding, **_config("gate_cumsum", config),
        )  # fmt: skip
    return g


def intra(
    q_n: Tensor, k_n: Tensor, g: Tensor, beta: Tensor, bounded: bool, cu_seqlens: Tensor, chunk_indices: Tensor,
    padding: str = "zero", config: Mapping[str, int] | None = None, empty: Empty = torch.empty,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Aqk [T, H, 64] in the dtype of q_n and Akk [T, H, 64] fp32.

    bounded: no step decays by more than about 5 nats, so that half a 16-row block stays within fp32.
    """
    named = {"q_n": q_n, "k_n": k_n, "g": g, "beta": beta}
    q_n, k_n, g, beta, cu, ci = _ready(intra_fwd_kernel, **named, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    T, H, K = q_n.shape
    Aqk = empty((T, H, CHUNK), dtype=q_n.dtype, device=q_n.device)
    Akk = empty((T, H, CHUNK), dtype=torch.float32, device=q_n.device)
    if len(ci) and H:
        intra_fwd_kernel[(len(ci) * (CHUNK // SUB_CHUNK), H)](
            q_n, k_n, g, beta, Aqk, Akk, cu, ci, K**-0.5, T,
            H=H, K=K, BT=CHUNK, BC=SUB_CHUNK, BOUNDED=bounded, PADDING=padding, **_config("intra", config),
        )  # fmt: skip
    return Aqk, Akk


def inverse(
    Akk: Tensor, dtype: torch.dtype, cu_seqlens: Tensor, chunk_indices: Tensor,
    padding: str = "zero", config: Mapping[str, int] | None = None, empty: Empty = torch.empty,
) -> Tensor:  # fmt: skip
    """A = (I + Akk)^-1 [T, H, 64] in dtype."""
    Akk, cu, ci = _ready(inverse_fwd_kernel, Akk=Akk, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    T, H = Akk.shape[:2]
    A = empty(Akk.shape, dtype=dtype, device=Akk.device)
    if len(ci) and H:
        inverse_fwd_kernel[(len(ci), H)](Akk, A, cu, ci, T, H=H, BT=CHUNK, BC=SUB_CHUNK, PADDING=padding, **_config("inverse", config))
    return A


def recompute_w_u(
    k_n: Tensor, v: Tensor, beta: Tensor, A: Tensor, g: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor,
    padding: str = "zero", config: Mapping[str, int] | None = None, empty: Empty = torch.empty,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """w [T, H, K], u [T, H, V] and kg [T, H, K] in the dtypes of k_n and v."""
    named = {"k_n": k_n, "v": v, "beta": beta, "A": A, "g": g}
    k_n, v, beta, A, g, cu, ci = _ready(recompute_w_u_fwd_kernel, **named, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    (T, H, K), V = k_n.shape, v.shape[-1]
    w, u, kg = (empty(x.shape, dtype=x.dtype, device=x.device) for x in (k_n, v, k_n))
    if len(ci) and H:
        recompute_w_u_fwd_kernel[(len(ci), H)](
            k_n, kg, v, beta, w, u, A, g, cu, ci, T,
            H=H, K=K, V=V, BT=CHUNK, BK=64, BV=64, PADDING=padding, **_config("recompute_w_u", config),
        )  # fmt: skip
    return w, u, kg


def state_pass(
    w: Tensor, u: Tensor, kg: Tensor, g: Tensor, initial_state: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor,
    padding: str = "zero", config: Mapping[str, int] | None = None, empty: Empty = torch.empty,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """h [NT, H, V, K] (the state before each chunk, dtype of u), v_new [T, H, V] and final_state [N, H, V, K] fp32.

    initial_state [N, H, V, K] fp32.
    """
    named = {"w": w, "u": u, "kg": kg, "g": g, "initial_state": initial_state}
    w, u, kg, g, S, cu, ci = _ready(state_fwd_kernel, **named, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    (T, H, K), V, N = w.shape, u.shape[-1], len(S)
    h = empty((len(ci), H, V, K), dtype=u.dtype, device=u.device)
    v_new = empty(u.shape, dtype=u.dtype, device=u.device)
    final = empty(S.shape, dtype=torch.float32, device=u.device)
    if N and H:
        state_fwd_kernel[lambda m: (N * (V // m["BV"]), H)](
            w, u, kg, g, S, h, v_new, final, cu, T,
            H=H, K=K, V=V, BT=CHUNK, PADDING=padding, **_config("state", config),
        )  # fmt: skip
    return h, v_new, final


def output(
    q_n: Tensor, g: Tensor, Aqk: Tensor, v_new: Tensor, h: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor,
    padding: str = "zero", config: Mapping[str, int] | None = None, empty: Empty = torch.empty,
) -> Tensor:  # fmt: skip
    """o [T, H, V] in the dtype of v_new."""
    named = {"q_n": q_n, "g": g, "Aqk": Aqk, "v_new": v_new, "h": h}
    q_n, g, Aqk, v_new, h, cu, ci = _ready(output_fwd_kernel, **named, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    (T, H, K), V = q_n.shape, v_new.shape[-1]
    o = empty(v_new.shape, dtype=v_new.dtype, device=v_new.device)
    if len(ci) and H:
        output_fwd_kernel[lambda m: (len(ci) * (V // m["BV"]), H)](
            q_n, g, Aqk, v_new, h, o, cu, ci, K**-0.5, T, H=H, K=K, V=V, BT=CHUNK, PADDING=padding, **_config("output", config)
        )  # fmt: skip
    return o


def chunk_kda(
    call: KdaCall, padding: str | Mapping[str, str] = "zero", configs: Mapping[str, dict[str, int]] | None = None,
    chunk_indices: Tensor | None = None, empty: Empty = torch.empty,
) -> dict[str, Tensor]:  # fmt: skip
    """Chunk KDA over a varlen batch, every stage's output by name (STAGE_OUTPUTS), plus q_n, k_n and beta.

    padding        "undefined" (no `other`), "zero" or "nan" for every stage, or a mapping stage -> name (others "zero")
    configs        stage -> launch configuration, over DEFAULTS; CONFIGS lists what is worth trying. Timing never chooses.
    chunk_indices  chunk_index(call.cu_seqlens) as int32, from a caller who has it and has checked the call: no host sync then
    empty          makes the output buffers, torch.empty's signature; a test passes one that fills them with NaN

    Dtypes as in stages.chunk_kda: the call's, except g, Akk, beta and final_state in fp32. States are [N, H, V, K].
    Raises BadInput for a malformed call, padding or configs; Unsupported for a head_dim, dtype or device without a kernel.
    """
    if chunk_indices is None:
        call.check()
        chunk_indices = chunk_index(call.cu_seqlens)
    for name, given in (("padding", () if isinstance(padding, str) else padding), ("configs", configs or {})):
        for stage in given:
            if stage not in STAGES and not (name == "configs" and stage == "prepare"):
                raise BadInput(f"{name}: {stage!r} is not one of the stages {STAGES}")

    def how(stage: str) -> dict:
        return {"padding": padding_of(padding, stage), "config": (configs or {}).get(stage), "empty": empty}

    at = (call.cu_seqlens.int(), chunk_indices)
    out = prepare(call.q, call.k, call.raw_beta, (configs or {}).get("prepare"), empty)
    q_n, k_n, beta = out["q_n"], out["k_n"], out["beta"]
    out["g"] = g = gate_cumsum(call.raw_g, call.A_log, call.dt_bias, call.lower_bound, *at, **how("gate_cumsum"))
    out["Aqk"], out["Akk"] = intra(q_n, k_n, g, beta, gate_is_bounded(call.lower_bound), *at, **how("intra"))
    out["A"] = inverse(out["Akk"], call.q.dtype, *at, **how("inverse"))
    out["w"], out["u"], out["kg"] = recompute_w_u(k_n, call.v, beta, out["A"], g, *at, **how("recompute_w_u"))
    out["h"], out["v_new"], out["final_state"] = state_pass(out["w"], out["u"], out["kg"], g, call.state_vk(), *at, **how("state"))
    out["o"] = output(q_n, g, out["Aqk"], out["v_new"], out["h"], *at, **how("output"))
    return out
