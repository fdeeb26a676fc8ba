"""The recurrent decode of KDA as a Triton kernel: a state pool updated in place, one token after the other.

    S <- (I - beta_t k_t k_t^T) Diag(exp(g_t)) S + beta_t k_t v_t^T,      o_t = S^T q_t

A program holds BV columns of one head's state in fp32 registers, reads it once and writes it once (after every token for
speculative rows). At one token a sequence the traffic is the state: N * H * K * V * 4 bytes read and as many written.
Runs natively on CUDA and ROCm, and on small shapes under TRITON_INTERPRET=1 (not in bfloat16).
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3lab.errors import BadInput, Unsupported
from k3lab.kda.call import STATE_LAYOUTS, KdaCall
from k3lab.kda.reference import L2_EPS
from k3lab.kda.runtime import check_launch
from k3lab.kda.triton_chunk import HEAD_DIMS
from k3lab.kda.triton_ops import log_decay

CONFIGS = [{"BV": b, "num_warps": w, "num_stages": 1} for b in (8, 16, 32, 64) for w in (1, 2, 4, 8)]
DEFAULT = {"BV": 16, "num_warps": 1, "num_stages": 1}


@triton.jit
def fused_recurrent_kda_fwd_kernel(
    q, k, v, raw_g, raw_beta, A_log, dt_bias, o, state, state_indices, num_accepted_tokens, cu_seqlens, lower_bound, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S: tl.constexpr, BV: tl.constexpr,
    EPS: tl.constexpr, BOUNDED: tl.constexpr, KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """One sequence, head and block of V. KV says that a slot is [K, V]; the tile then is [K, BV], so that rows coalesce."""
    NV: tl.constexpr = V // BV
    i_n, i_v, i_h = tl.program_id(0) // NV, tl.program_id(0) % NV, tl.program_id(1)
    bos, eos = tl.load(cu_seqlens + i_n), tl.load(cu_seqlens + i_n + 1)
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    read = i_n * S
    if SPEC:
        read += tl.load(num_accepted_tokens + i_n) - 1
    slot = tl.load(state_indices + read).to(tl.int64)
    base0 = bos.to(tl.int64) * H + i_h
    if slot <= 0:
        for i in range(eos - bos):
            tl.store(o + (base0 + i * H) * V + o_v, tl.zeros([BV], o.dtype.element_ty))
        return

    o_S = o_k[:, None] * V + o_v[None, :] if KV else o_v[:, None] * K + o_k[None, :]
    b_S = tl.load(state + (slot * H + i_h) * (K * V) + o_S)
    b_a = tl.exp(tl.load(A_log + i_h))
    b_bias = tl.load(dt_bias + i_h * K + o_k)
    for i in range(eos - bos):
        base = base0 + i * H
        b_q = tl.load(q + base * K + o_k).to(tl.float32)  # [K]
        b_k = tl.load(k + base * K + o_k).to(tl.float32)
        b_v = tl.load(v + base * V + o_v).to(tl.float32)  # [BV]
        b_g = tl.load(raw_g + base * K + o_k).to(tl.float32) + b_bias
        b_decay = tl.exp(log_decay(b_g, b_a, lower_bound, BOUNDED))
        b_beta = tl.sigmoid(tl.load(raw_beta + base).to(tl.float32))
        b_q *= tl.rsqrt(tl.sum(b_q * b_q) + EPS) * scale
        b_k *= tl.rsqrt(tl.sum(b_k * b_k) + EPS)
        if KV:
            b_S *= b_decay[:, None]
            b_u = b_beta * (b_v - tl.sum(b_S * b_k[:, None], 0))
            b_S += b_k[:, None] * b_u[None, :]
            b_o = tl.sum(b_S * b_q[:, None], 0)
        else:
            b_S *= b_decay[None, :]
            b_u = b_beta * (b_v - tl.sum(b_S * b_k[None, :], 1))
            b_S += b_u[:, None] * b_k[None, :]
            b_o = tl.sum(b_S * b_q[None, :], 1)
        tl.store(o + base * V + o_v, b_o.to(o.dtype.element_ty))
        if SPEC:
            to = tl.load(state_indices + i_n * S + i).to(tl.int64)
            if to > 0:
                tl.store(state + (to * H + i_h) * (K * V) + o_S, b_S)
    if not SPEC:
        tl.store(state + (slot * H + i_h) * (K * V) + o_S, b_S)


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, state_pool: Tensor, state_indices: Tensor, cu_seqlens: Tensor,
    state_layout: str, num_accepted_tokens: Tensor | None,
) -> None:  # fmt: skip
    if state_layout not in STATE_LAYOUTS:
        raise BadInput(f"state_layout: {state_layout!r} is not one of {STATE_LAYOUTS}")
    (T, H, K), V, N = q.shape, v.shape[-1], cu_seqlens.numel() - 1
    slot = (H, V, K) if state_layout == "vk" else (H, K, V)
    expected = {"k": (k, (T, H, K)), "v": (v, (T, H, V)), "raw_g": (raw_g, (T, H, K)), "raw_beta": (raw_beta, (T, H))}
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != shape:
            raise BadInput(f"{name}: shape {tuple(x.shape)}, expected {list(shape)} from q {tuple(q.shape)} and v {tuple(v.shape)}")
    if tuple(state_pool.shape[1:]) != slot:
        raise BadInput(
            f"state_pool: shape {tuple(state_pool.shape)}, expected [slots, {', '.join(map(str, slot))}] in layout {state_layout!r}"
        )
    if state_pool.dtype != torch.float32 or not state_pool.is_contiguous():
        raise BadInput(
            f"state_pool: dtype {state_pool.dtype}, strides {state_pool.stride()}; it is updated in place and must be contiguous fp32"
        )
    spec = state_indices.dim() == 2
    if state_indices.dim() not in (1, 2) or len(state_indices) != N:
        raise BadInput(f"state_indices: shape {tuple(state_indices.shape)}, expected [{N}] or, for speculative rows, [{N}, S]")
    if spec != (num_accepted_tokens is not None):
        raise BadInput("num_accepted_tokens goes with state_indices [N, S] (speculative rows), and only with it")
    if spec and tuple(num_accepted_tokens.shape) != (N,):
        raise BadInput(f"num_accepted_tokens: shape {tuple(num_accepted_tokens.shape)}, expected [{N}]")
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        raise Unsupported(f'head_dim K = {K}, V = {V}; the kernel takes {HEAD_DIMS}: use impl="torch"')


def _check_values(T: int, slots: int, state_indices: Tensor, cu_seqlens: Tensor, num_accepted_tokens: Tensor | None) -> None:
    lengths = cu_seqlens.long().cpu().diff()
    indices = state_indices.cpu()
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != T or bool((lengths < 0).any()):
        raise BadInput(f"cu_seqlens: must run from 0 to T = {T} and never fall")
    if indices.numel() and int(indices.max()) >= slots:
        raise BadInput(f"state_indices: holds {int(indices.max())}, but state_pool has {slots} slots")
    live = indices[indices > 0]
    if len(live.unique()) != len(live):
        twice = [int(x) for x in live.unique() if int((live == x).sum()) > 1]
        raise BadInput(f"state_indices: slots {twice[:4]} are used by more than one row; two programs would write the same state")
    if num_accepted_tokens is not None and len(indices):
        S, accepted = indices.shape[1], num_accepted_tokens.cpu()
        if int(lengths.max()) > S:
            raise BadInput(f"cu_seqlens: a sequence has {int(lengths.max())} tokens, but state_indices has {S} slots for each")
        if int(accepted.min()) < 1 or int(accepted.max()) > S:
            raise BadInput(f"num_accepted_tokens: {int(accepted.min())}..{int(accepted.max())} is outside 1..{S}")


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    state_pool: Tensor, state_indices: Tensor, cu_seqlens: Tensor, lower_bound: float | None = -5.0, state_layout: str = "vk",
    num_accepted_tokens: Tensor | None = None, config: dict[str, int] | None = None, check_values: bool = True,
    empty: Callable[..., Tensor] = torch.empty,
) -> Tensor:  # fmt: skip
    """o [T, H, V] in the dtype of v; state_pool is updated in place, by slot.

    q, k, raw_g [T, H, K] before the L2 norm and the gate; v [T, H, V]; raw_beta [T, H] before the sigmoid; A_log [H] and
    dt_bias [H, K] fp32; q is scaled by K^-1/2 here. lower_bound in natural log, or None for the softplus gate.

    state_pool     [slots, H, V, K] ("vk") or [slots, H, K, V] ("kv"), contiguous fp32; an index <= 0 is the null slot: the
                   state is not touched and the rows of o are zero
    state_indices  [N]: read from and written to this slot; [N, S]: token t of a sequence writes its state to
                   state_indices[n, t] (skipped at the null slot), and the start is read from
                   state_indices[n, num_accepted_tokens[n] - 1]
    config         over DEFAULT; CONFIGS lists what is worth trying
    check_values   also check what indices and cu_seqlens hold, which waits for the device; False leaves that to the caller
    empty          makes the output buffer, torch.empty's signature; a test passes one that fills it with NaN

    Raises BadInput for shapes, layouts or values that do not fit, Unsupported for a head_dim, dtype or device without a kernel.
    """
    tensors = {
        "q": q, "k": k, "v": v, "raw_g": raw_g, "raw_beta": raw_beta, "A_log": A_log, "dt_bias": dt_bias, "state_pool": state_pool,
        "state_indices": state_indices, "cu_seqlens": cu_seqlens, "num_accepted_tokens": num_accepted_tokens,
    }  # fmt: skip
    check_launch(fused_recurrent_kda_fwd_kernel, tensors)
    _check_shapes(q, k, v, raw_g, raw_beta, state_pool, state_indices, cu_seqlens, state_layout, num_accepted_tokens)
    if check_values:
        _check_values(len(q), len(state_pool), state_indices, cu_seqlens, num_accepted_tokens)
    (T, H, K), V, N = q.shape, v.shape[-1], cu_seqlens.numel() - 1
    o = empty(v.shape, dtype=v.dtype, device=v.device)
    if not (T and H and N):
        return o
    q, k, v, raw_g, raw_beta = (x.contiguous() for x in (q, k, v, raw_g, raw_beta))
    indices = state_indices.int().contiguous()
    spec = num_accepted_tokens is not None
    fused_recurrent_kda_fwd_kernel[lambda m: (N * (V // m["BV"]), H)](
        q, k, v, raw_g, raw_beta, A_log.float().contiguous(), dt_bias.float().contiguous(), o, state_pool, indices,
        num_accepted_tokens.int() if spec else indices, cu_seqlens.int(), 0.0 if lower_bound is None else float(lower_bound), K**-0.5,
        H=H, K=K, V=V, S=indices.shape[1] if spec else 1, EPS=L2_EPS, BOUNDED=lower_bound is not None, KV=state_layout == "kv", SPEC=spec,
        **{**DEFAULT, **(config or {})},
    )  # fmt: skip
    return o


def recurrent_kda(call: KdaCall, token_states: bool | None = None, config: dict[str, int] | None = None) -> dict[str, Tensor]:
    """reference.recurrent_kda by the kernel: o [T, H, V] in the dtype of v and final_state [N, H, V, K] fp32.

    The call's gathered states become a pool whose slot 0 is the null slot, in the call's state layout. With token_states
    (None: if the call has speculative rows) also states [T, H, V, K] fp32, the state after each token, written as
    speculative rows write theirs. Raises BadInput if the call is malformed.
    """
    call.check()
    token_states = call.spec_mask is not None if token_states is None else token_states
    T, N, vk = len(call.q), call.num_sequences, call.state_layout == "vk"
    cu = call.cu_seqlens.long()
    start = call.state_vk().float() if vk else call.state_vk().float().transpose(-1, -2)
    pool = start.new_zeros(1 + (T if token_states else N), *start.shape[1:])
    if token_states:
        lengths = cu.diff()
        token = torch.arange(int(lengths.max()), device=cu.device)
        indices = torch.where(token < lengths[:, None], 1 + cu[:-1, None] + token, 0)
        accepted = torch.ones(N, dtype=torch.int32, device=cu.device)
        pool[indices[:, 0]] = start
    else:
        indices, accepted = torch.arange(1, N + 1, device=cu.device), None
        pool[1:] = start
    o = fused_recurrent_kda(
        call.q, call.k, call.v, call.raw_g, call.raw_beta, call.A_log, call.dt_bias, pool, indices, call.cu_seqlens,
        call.lower_bound, call.state_layout, accepted, config,
    )  # fmt: skip
    states = pool[1:] if vk else pool[1:].transpose(-1, -2)
    if not token_states:
        return {"o": o, "final_state": states}
    return {"o": o, "final_state": states[cu[1:] - 1], "states": states}
