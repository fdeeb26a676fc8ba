"""KDA in float64: the recurrence, which is the truth here, and a chunked twin that checks it.

    g_t  = lower_bound * sigmoid(exp(A_log) * (raw_g_t + dt_bias))      natural log, per channel
           (lower_bound None: g_t = -exp(A_log) * softplus(raw_g_t + dt_bias))
    S_t  = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T,      beta_t = sigmoid(raw_beta_t)
    o_t  = S_t^T q_t

with q and k L2-normalised (eps 1e-6 inside the root) and q scaled by K^-1/2. States are returned as [N, H, V, K].
"""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from k3lab.kda.call import KdaCall
from k3lab.shapes import CHUNK

L2_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def log_decay(raw_g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The log-decay g, natural log, of raw_g [..., H, K] with A_log [H] and dt_bias [H, K]."""
    x = raw_g + dt_bias
    a = A_log.exp()[:, None]
    return lower_bound * torch.sigmoid(a * x) if lower_bound is not None else -a * F.softplus(x)


def output_norm_gate(o: Tensor, norm_weight: Tensor, output_gate: Tensor, eps: float) -> Tensor:
    """RMSNorm(o) * norm_weight * sigmoid(output_gate): what the layer's output projection reads. o [T, H, V]."""
    y = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * norm_weight
    return y * torch.sigmoid(output_gate)


def prepare(call: KdaCall, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """q, k normalised and q scaled, v, g (natural log), beta, state: all in dtype, tokens first."""
    c = {n: getattr(call, n).to(dtype) for n in ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")}
    return {
        "q": l2norm(c["q"]) * call.q.shape[-1] ** -0.5,
        "k": l2norm(c["k"]),
        "v": c["v"],
        "g": log_decay(c["raw_g"], c["A_log"], c["dt_bias"], call.lower_bound),
        "beta": torch.sigmoid(c["raw_beta"]),
        "state": call.state_vk().to(dtype),
    }


def recurrent_kda(call: KdaCall, dtype: torch.dtype = torch.float64, token_states: bool = False) -> dict[str, Tensor]:
    """The recurrence, token by token.

    Returns o [T, H, V] and final_state [N, H, V, K]; with token_states also states [T, H, V, K], the state after
    each token (what speculative rows write). Raises BadInput if the call is malformed.
    """
    x = prepare(call.check(), dtype)
    cu = call.cu_seqlens.long().tolist()
    decay = x["g"].exp()
    o = torch.empty_like(x["v"])
    final = x["state"].clone()
    states = o.new_empty(*o.shape, call.q.shape[-1]) if token_states else None
    for n in range(call.num_sequences):
        S = final[n]  # [H, V, K]
        for t in range(cu[n], cu[n + 1]):
            S = S * decay[t][:, None, :]
            k = x["k"][t][:, :, None]  # [H, K, 1]
            delta = x["beta"][t][:, None] * (x["v"][t] - (S @ k).squeeze(-1))  # [H, V]
            S = S + delta[:, :, None] * k.transpose(1, 2)
            o[t] = (S @ x["q"][t][:, :, None]).squeeze(-1)
            if states is not None:
                states[t] = S
        final[n] = S
    out = {"o": o, "final_state": final}
    return out if states is None else {**out, "states": states}


def chunk_kda_core(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK, store: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The chunked form over equal-length sequences, differentiable, in the dtype of its inputs.

        A[i,j] = beta_i sum_c k_ic k_jc exp(G_ic - G_jc), j < i;    U = (I + A)^-1 beta (v - (k exp(G)) S)
        o = (q exp(G)) S + tril(q k^T exp(G_i - G_j)) U;            S <- Diag(exp(G_last)) S + (k exp(G_last - G))^T U

    q, k, g [B, H, T, K] (prepared: normalised, scaled, natural log), v [B, H, T, V], beta [B, H, T], state [B, H, K, V].
    The pair factors are split around the chunk's middle row, so exponents reach lower_bound * chunk / 2: take
    chunk <= 32 in float32 (exp(80)), any in float64. `store`, if given, rounds each stage output to that dtype and
    back and takes the pair products in float64, so that float32 inputs show the error that float32 arithmetic with
    such storage cannot avoid, at gates above -22 nats a token (the low-precision reference of the budget rule, k3lab.testing).
    Returns o [B, H, T, V] and the final state [B, H, K, V].
    """
    B, H, T = q.shape[:3]
    V = v.shape[-1]
    pad = -T % chunk
    q, k, v, g = (F.pad(x, (0, 0, 0, pad)).reshape(B, H, -1, chunk, x.shape[-1]) for x in (q, k, v, g))
    beta = F.pad(beta, (0, pad)).reshape(B, H, -1, chunk, 1)

    def stored(x: Tensor) -> Tensor:
        return x if store is None else x.to(store).to(x.dtype)

    # torch.cumsum adds in float64 on a CPU; the low-precision reference adds row by row in its own precision
    G = g.cumsum(-2) if store is None else torch.stack(list(accumulate(g.unbind(-2))), -2)
    wide = G if store is None else G.double()
    mid = wide[..., chunk // 2 - 1 : chunk // 2, :]
    up, down = (wide - mid).exp(), (mid - wide).exp()
    kd = (k * down).transpose(-1, -2)
    Akk = ((k * up) @ kd).tril(-1).to(q.dtype) * beta  # tril selects, so inf above the diagonal is dropped
    Aqk = stored(((q * up) @ kd).tril().to(q.dtype))
    eye = torch.eye(chunk, dtype=q.dtype, device=q.device).expand_as(Akk)
    A = stored(torch.linalg.solve_triangular(Akk, eye, upper=False, unitriangular=True))
    u = stored(A @ (v * beta))
    w = stored(A @ (k * G.exp() * beta))
    last = G[..., -1:, :]
    kg = stored(k * (last - G).exp()).transpose(-1, -2)
    decay = last.exp().transpose(-1, -2)
    qg = q * G.exp()
    outs = []
    for n in range(q.shape[2]):
        held = stored(state)
        v_new = stored(u[:, :, n] - w[:, :, n] @ held)
        outs.append(qg[:, :, n] @ held + Aqk[:, :, n] @ v_new)
        state = state * decay[:, :, n] + kg[:, :, n] @ v_new
    return torch.stack(outs, 2).reshape(B, H, T + pad, V)[:, :, :T], state


def chunk_kda(call: KdaCall, dtype: torch.dtype = torch.float64, store: torch.dtype | None = None, chunk: int = CHUNK) -> dict[str, Tensor]:
    """The chunked twin of recurrent_kda over a varlen batch: o [T, H, V] and final_state [N, H, V, K].

    dtype, store and chunk as in chunk_kda_core. Raises BadInput if the call is malformed.
    """
    x = prepare(call.check(), dtype)
    cu = call.cu_seqlens.long().tolist()
    o, final = torch.empty_like(x["v"]), torch.empty_like(x["state"])
    for n in range(call.num_sequences):
        rows = slice(cu[n], cu[n + 1])
        q, k, v, g = (x[name][rows].transpose(0, 1)[None] for name in ("q", "k", "v", "g"))
        out, S = chunk_kda_core(q, k, v, g, x["beta"][rows].T[None], x["state"][n].transpose(-1, -2)[None], chunk, store)
        o[rows] = out[0].transpose(0, 1)
        final[n] = S[0].transpose(-1, -2)
    if store is not None:
        o = o.to(store).to(dtype)
    return {"o": o, "final_state": final}
