"""The chunk forward of KDA in three Triton kernels, for speed: what triton_chunk.py shows in seven, without its stage tensors.

    gate    g, the cumulative log-decay of every chunk, log2 units, and decay = exp2(g_last)
    chunk   all chunks and heads side by side: q_n, k_n, Aqk, A = (I + Akk)^-1 stay in registers; out come
            u = A (beta v),  w = A (beta exp2(g) k),  qg = scale q_n exp2(g),  kg_j = k_j exp2(g_last - g_j)  and  Aqk
    state   BV columns of the state of one sequence and head to a program, chunk after chunk:
            v_new = u - w S,   o = qg S + Aqk v_new,   S <- Diag(decay) S + kg^T v_new

Products over pairs of rows are taken on the whole tile, by halving: a block of 2B rows takes its lower left quarter from a product
whose exponents are split at row B, so that both factors are at most 1. Small blocks are split at their middle row, as far as the bound of
the gate allows: 32 rows at -5, single rows without a bound. The inverse goes the other way, from blocks of 2 rows to 64:

    [[X, 0], [C, Y]]^-1 = [[X^-1, 0], [-Y^-1 C X^-1, Y^-1]]

Every masked load reads 0 and rows past the end of a sequence stay 0 in every tile, so the state kernel needs no mask but its last
store's; its tiles are fetched through tensor descriptors (TMA on Hopper). Between the kernels a chunk is a full tile, however short:
decodes of one token belong to the recurrent kernel. Products take operands of the call's dtype and accumulate in fp32; fp32
operands are multiplied as IEEE fp32, and g is kept in float64 then, because differences of it are taken.
"""

import math
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
    # not BK = 16: on an H200 with Triton 3.6.0 its launch ended in an illegal memory access, cause unknown
    "chunk": [{"BK": b, "num_warps": w, "num_stages": s} for b in (32, 64, 128) for w in (4, 8) for s in (1, 2)],
    "state": [{"BV": b, "num_warps": 4, "num_stages": s} for b in (16, 32, 64) for s in (1, 2, 3)],
}
DEFAULTS: dict[str, dict[str, int]] = {
    "gate": {"BK": 32, "num_warps": 2},
    "chunk": {"BK": 128, "num_warps": 4, "num_stages": 1},
    "state": {"BV": 16, "num_warps": 4, "num_stages": 3},
}
DEFAULTS_FP32 = DEFAULTS | {
    "chunk": {"BK": 32, "num_warps": 8, "num_stages": 1},
    "state": {"BV": 16, "num_warps": 4, "num_stages": 1},
}
LARGEST_EXPONENT = 116.0  # log2, of a factor in a block split at its middle row; bf16 and fp32 end at 127


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
    raw_g, A_log, dt_bias, g, decay, cu_seqlens, lower_bound, N, T,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """g [slots, H, BT, K], whose rows past the end repeat the last one, and decay [slots, H, K]; raw_g [T, H, K]."""
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
    tl.store(decay + tile * K + o_k, tl.exp2(tl.sum(b_g, 0).to(tl.float32)))
    tl.store(g + tile * (BT * K) + o_t[:, None] * K + o_k[None, :], tl.cumsum(b_g, 0))


@triton.jit
def inverse_norm(p_x, m_t, EPS: tl.constexpr):
    """1 / |x| of every row, [BT, 1]."""
    b_x = tl.load(p_x, mask=m_t, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, 1) + EPS)[:, None]


@triton.jit
def lower_left(o_t, level):
    """Mask of the lower left quarter of every block of 2 * 2**level rows: i and j differ in bit `level` and agree above it."""
    o_i, o_j = o_t[:, None], o_t[None, :]
    return ((o_i ^ o_j) >> level == 1) & (o_i > o_j)


@triton.jit
def pair_products(
    p_q, p_k, p_g, b_qr, b_kr, m_t, bits, AROUND: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """q_i . (k_j exp2(g_i - g_j)) and k_i . (k_j exp2(g_i - g_j)), exponents split at the middle row of blocks of 2**bits.

    AROUND: right for all j <= i of a block; else for its lower left quarter alone, at no risk of overflow. The rest may be inf or NaN.
    """
    o_t = tl.arange(0, BT)
    o_mid = (o_t >> bits << bits) + (1 << bits >> 1)
    b_qk, b_kk = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)[None, :]
        o_tk = o_t[:, None] * (H * K) + o_k
        b_g = (tl.load(p_g + o_t[:, None] * K + o_k) - tl.load(p_g + o_mid[:, None] * K + o_k)).to(tl.float32)
        b_k = tl.load(p_k + o_tk, mask=m_t, other=0.0) * b_kr  # [BT, BK]
        b_q = tl.load(p_q + o_tk, mask=m_t, other=0.0) * b_qr
        b_up = tl.exp2(b_g if AROUND else -tl.abs(b_g))
        b_ku = (b_k * b_up).to(dtype)
        b_kd = (b_k * tl.exp2(-b_g)).to(dtype) if AROUND else b_ku
        b_qk = tl.dot((b_q * b_up).to(dtype), tl.trans(b_kd), b_qk, input_precision="ieee")
        b_kk = tl.dot(b_ku, tl.trans(b_kd), b_kk, input_precision="ieee")
    return b_qk, b_kk


@triton.jit
def invert(b_L, dtype: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular [64, 64], from blocks of 2 rows on."""
    BT: tl.constexpr = b_L.shape[0]
    tl.static_assert(BT == 64)
    o_t = tl.arange(0, BT)
    b_A = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0) - tl.where(lower_left(o_t, 0), b_L, 0.0)
    for level in range(1, 6):
        b_C = tl.where(lower_left(o_t, level), b_L, 0.0).to(dtype)
        b_AC = tl.dot(b_A.to(dtype), b_C, input_precision="ieee").to(dtype)
        b_A -= tl.dot(b_AC, b_A.to(dtype), input_precision="ieee")
    return b_A


@triton.jit(do_not_specialize=["N", "T"])
def fused_chunk_fwd_kernel(
    q, k, v, g, raw_beta, wq, kg, u, Aqk, cu_seqlens, scale, N, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    FIRST: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: q, k, v, raw_beta [T, H, .] and g in; wq = [w, qg] [slots, H, 2 BT, K], kg, u, Aqk [slots, H, BT, .] out.

    FIRST is the level of the pair products: blocks of 2**FIRST rows are split at their middle row, larger ones by halving.
    """
    i_h, i_s = tl.program_id(0), tl.program_id(1)
    i_n, row0 = locate(cu_seqlens, N, i_s, BT)
    n = tl.minimum(tl.load(cu_seqlens + i_n + 1), T) - row0
    if n <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t = (o_t < n)[:, None]
    at = row0.to(tl.int64) * H + i_h
    tile = i_s.to(tl.int64) * H + i_h
    dtype = wq.dtype.element_ty
    p_q, p_k, p_g = q + at * K, k + at * K, g + tile * (BT * K)
    o_row = o_t[:, None] * (H * K) + tl.arange(0, K)[None, :]
    b_kr = inverse_norm(p_k + o_row, m_t, EPS)
    b_qr = inverse_norm(p_q + o_row, m_t, EPS) * scale
    b_beta = tl.sigmoid(tl.load(raw_beta + at + o_t * H, mask=o_t < n, other=0.0).to(tl.float32))[:, None]

    b_qk, b_kk = pair_products(p_q, p_k, p_g, b_qr, b_kr, m_t, FIRST, True, H, K, BT, BK, dtype)
    same = (o_t[:, None] ^ o_t[None, :]) >> FIRST == 0
    b_qk, b_kk = tl.where(same, b_qk, 0.0), tl.where(same, b_kk, 0.0)
    for level in range(FIRST, 6):
        b_ql, b_kl = pair_products(p_q, p_k, p_g, b_qr, b_kr, m_t, level + 1, False, H, K, BT, BK, dtype)
        below = lower_left(o_t, level)
        b_qk, b_kk = tl.where(below, b_ql, b_qk), tl.where(below, b_kl, b_kk)
    p_tt = Aqk + tile * (BT * BT) + o_t[:, None] * BT + o_t[None, :]
    tl.store(p_tt, tl.where(o_t[:, None] >= o_t[None, :], b_qk, 0.0).to(dtype))
    b_A = invert(tl.where(o_t[:, None] > o_t[None, :], b_kk, 0.0) * b_beta, dtype).to(dtype)  # [BT, BT]

    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)[None, :]
        o_tk, p_tk = o_t[:, None] * (H * K) + o_k, o_t[:, None] * K + o_k
        b_g = tl.load(p_g + p_tk)
        b_last = tl.load(p_g + (BT - 1) * K + o_k)
        b_k = tl.load(p_k + o_tk, mask=m_t, other=0.0) * b_kr  # [BT, BK]
        b_q = tl.load(p_q + o_tk, mask=m_t, other=0.0) * b_qr
        b_up = tl.exp2(b_g.to(tl.float32))
        b_w = tl.dot(b_A, (b_k * b_up * b_beta).to(dtype), input_precision="ieee")
        tl.store(wq + tile * (2 * BT * K) + p_tk, b_w.to(dtype))
        tl.store(wq + tile * (2 * BT * K) + BT * K + p_tk, (b_q * b_up).to(dtype))
        tl.store(kg + tile * (BT * K) + p_tk, (b_k * tl.exp2((b_last - b_g).to(tl.float32))).to(dtype))
    for i_v in range(V // BK):
        o_v = i_v * BK + tl.arange(0, BK)[None, :]
        b_v = tl.load(v + at * V + o_t[:, None] * (H * V) + o_v, mask=m_t, other=0.0) * b_beta  # [BT, BK]
        b_u = tl.dot(b_A, b_v.to(dtype), input_precision="ieee")
        tl.store(u + tile * (BT * V) + o_t[:, None] * V + o_v, b_u.to(dtype))


@triton.jit(do_not_specialize=["T"])
def fused_state_fwd_kernel(
    wq, kg, u, Aqk, decay, h0, has_h0, o, ht, cu_seqlens, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    START: tl.constexpr, MASKED: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """BV columns of one sequence's and head's state S [K, V], all its chunks. START: h0 is given; MASKED: has_h0 too; KV: h0 is [K, V].

    wq, kg, u and Aqk are descriptors over rows (slot, head, row of the tile).
    """
    NV: tl.constexpr = V // BV
    i_n, i_v, i_h = tl.program_id(0) // NV, tl.program_id(0) % NV, tl.program_id(1)
    bos = tl.load(cu_seqlens + i_n)
    length = tl.minimum(tl.load(cu_seqlens + i_n + 1), T) - bos
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    dtype = wq.dtype
    p_S = (i_n.to(tl.int64) * H + i_h) * (K * V)
    o_vk = o_v[None, :] * K + o_k[:, None]
    b_S = tl.zeros([K, BV], tl.float32)
    if START:
        has = tl.load(has_h0 + i_n) != 0 if MASKED else True
        o_S = o_k[:, None] * V + o_v[None, :] if KV else o_vk
        b_S += tl.load(h0 + p_S + o_S, mask=has, other=0.0).to(tl.float32)
    slot = bos // BT + i_n
    p_decay = decay + (slot.to(tl.int64) * H + i_h) * K + o_k
    o_tv = o_t[:, None] * (H * V) + o_v[None, :]
    chunks = tl.cdiv(length, BT)
    b_decay = tl.load(p_decay)
    for i_c in range(chunks):
        row = ((slot + i_c) * H + i_h) * BT
        b_next = tl.load(p_decay + tl.minimum(i_c + 1, chunks - 1) * (H * K))  # a step ahead: its wait would be in the chain
        b_h = b_S.to(dtype)
        b_wq = tl.dot(wq.load([2 * row, 0]), b_h, input_precision="ieee")  # [2 BT, BV]
        b_wS, b_o = tl.split(tl.permute(tl.reshape(b_wq, [2, BT, BV]), (1, 2, 0)))
        b_v = (u.load([row, i_v * BV]) - b_wS).to(dtype)  # [BT, BV]
        b_dS = tl.dot(tl.trans(kg.load([row, 0])), b_v, input_precision="ieee")
        # one rounding at the size of S; `b_S += dot` would be fused into the product, with a rounding per token
        b_S = tl.fma(b_S, tl.broadcast_to(b_decay[:, None], [K, BV]), b_dS)
        b_decay = b_next
        b_o += tl.dot(Aqk.load([row, 0]), b_v, input_precision="ieee")
        p_o = o + ((bos.to(tl.int64) + i_c * BT) * H + i_h) * V + o_tv
        tl.store(p_o, b_o.to(dtype), mask=(o_t < length - i_c * BT)[:, None])
    tl.store(ht + p_S + o_vk, b_S)


def first_level(lower_bound: float | None, dtype: torch.dtype) -> int:
    """log2 of the rows that may be split at their middle row: 0 without a bound, and outside bfloat16.

    float16 has no such exponents, and in float32 a device's exp2(x) exp2(-x) is too far from 1.
    """
    if lower_bound is None or dtype != torch.bfloat16:
        return 0
    rows = 2 * LARGEST_EXPONENT / (abs(lower_bound) * RCP_LN2)
    return int(math.log2(min(max(rows, 1.0), CHUNK)))


def chunk_kda(
    call: KdaCall, configs: Mapping[str, Mapping[str, int]] | None = None, check: bool = True, empty: Callable[..., Tensor] = torch.empty
) -> dict[str, Tensor]:
    """Chunk KDA over a varlen batch, from the raw gate: o [T, H, V] in the dtype of v and final_state [N, H, V, K] fp32.

    configs  kernel ("gate", "chunk", "state") -> launch configuration, over DEFAULTS; CONFIGS lists what is worth trying
    check    False: the caller has checked the call; then nothing waits for the device
    empty    makes the buffers, torch.empty's signature; a test passes one that fills them with NaN

    The equations are stages.chunk_kda's, whose stage outputs this does not keep. Raises BadInput for a malformed call or configs;
    Unsupported for a head_dim, dtype or device without a kernel.
    """
    names = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias", "cu_seqlens", "initial_state", "has_initial_state")
    tensors = {name: getattr(call, name) for name in names}
    check_launch(fused_chunk_fwd_kernel, tensors)
    if check:
        call.check()
    given = configs or {}
    unknown = [name for name in given if name not in DEFAULTS]
    if unknown:
        raise BadInput(f"configs: {unknown[0]!r} is not one of the kernels {tuple(DEFAULTS)}")
    (T, H, K), V, N, dtype, device = call.q.shape, call.v.shape[-1], call.num_sequences, call.q.dtype, call.q.device
    if dtype == torch.float64:
        raise Unsupported('q is float64; the Triton kernels compute in fp32: use float32, bfloat16 or float16, or impl="torch"')
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        raise Unsupported(f'head_dim K = {K}, V = {V}; the kernel takes {HEAD_DIMS}: use impl="torch"')
    defaults = DEFAULTS_FP32 if dtype == torch.float32 else DEFAULTS
    config = {name: {**defaults[name], **given.get(name, {})} for name in DEFAULTS}
    config["chunk"]["BK"] = min(config["chunk"]["BK"], K, V)

    q, k, v, raw_g, raw_beta, A_log, dt_bias, cu, h0, has = (None if x is None else x.contiguous() for x in tensors.values())
    o = empty(v.shape, dtype=dtype, device=device)
    final = empty((N, H, V, K), dtype=torch.float32, device=device)
    if not (T and N):
        return {"o": o, "final_state": final}
    slots = T // CHUNK + N
    g = empty((slots * H * CHUNK, K), dtype=torch.float64 if dtype == torch.float32 else torch.float32, device=device)
    decay = empty((slots, H, K), dtype=torch.float32, device=device)
    blocks = ((2 * CHUNK, K), (CHUNK, K), (CHUNK, V), (CHUNK, CHUNK))
    wq, kg, u, Aqk = (empty((slots * H * rows, d), dtype=dtype, device=device) for rows, d in blocks)
    bound = 0.0 if call.lower_bound is None else float(call.lower_bound)
    fused_gate_fwd_kernel[(H * (K // config["gate"]["BK"]), slots)](
        raw_g, A_log.float(), dt_bias.float(), g, decay, cu, bound, N, T,
        H=H, K=K, BT=CHUNK, SCALE=RCP_LN2, BOUNDED=call.lower_bound is not None, **config["gate"],
    )  # fmt: skip
    fused_chunk_fwd_kernel[(H, slots)](
        q, k, v, g, raw_beta, wq, kg, u, Aqk, cu, K**-0.5, N, T,
        H=H, K=K, V=V, BT=CHUNK, FIRST=first_level(call.lower_bound, dtype), EPS=L2_EPS, **config["chunk"],
    )  # fmt: skip
    BV = config["state"]["BV"]
    tiles = [TensorDescriptor.from_tensor(x, [rows, BV if x is u else d]) for x, (rows, d) in zip((wq, kg, u, Aqk), blocks, strict=True)]
    fused_state_fwd_kernel[(N * (V // BV), H)](
        *tiles, decay, decay if h0 is None else h0, cu if has is None else has, o, final, cu, T,
        H=H, K=K, V=V, BT=CHUNK, START=h0 is not None, MASKED=has is not None, KV=call.state_layout == "kv", **config["state"],
    )  # fmt: skip
    return {"o": o, "final_state": final}
