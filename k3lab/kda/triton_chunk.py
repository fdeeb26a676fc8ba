"""The six chunk stages of KDA as Triton kernels: packed sequences by cu_seqlens, head_dim K, V in {64, 128}."""

import triton
import triton.language as tl

RECOMPUTE_W_U_CONFIGS = [{"num_warps": w, "num_stages": s} for w in (2, 4, 8) for s in (2, 3, 4)]


@triton.jit
def load_rows(p, m, PADDING: tl.constexpr):
    """Load a tile by a row mask; PADDING says what a masked row is worth: no `other`, 0 or NaN."""
    if PADDING == "undefined":
        b = tl.load(p, mask=m)
    elif PADDING == "zero":
        b = tl.load(p, mask=m, other=0.0)
    else:
        b = tl.load(p, mask=m, other=float("nan"))
    return b


@triton.jit
def chunk_span(cu_seqlens, chunk_indices, T, i_t, BT: tl.constexpr):
    """First token row of chunk i_t in the packed batch, and how many of its BT rows are valid (none past T)."""
    i_n = tl.load(chunk_indices + 2 * i_t)
    row0 = tl.load(cu_seqlens + i_n) + tl.load(chunk_indices + 2 * i_t + 1) * BT
    eos = tl.minimum(tl.load(cu_seqlens + i_n + 1), T)
    return row0.to(tl.int64), tl.minimum(eos - row0, BT)


@triton.jit
def recompute_w_u_fwd_kernel(
    k,  # [T, H, K] normalised
    kg,  # [T, H, K] out
    v,  # [T, H, V]
    beta,  # [T, H] fp32
    w,  # [T, H, K] out
    u,  # [T, H, V] out
    A,  # [T, H, BT]
    gk,  # [T, H, K] fp32, log2 units, cumulative inside the chunk
    cu_seqlens,
    chunk_indices,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PADDING: tl.constexpr,
):
    """u = A (beta v),  w = A (beta exp2(g) k),  kg = k exp2(g_last - g): both dots contract over the token axis."""
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
