"""The KDA recurrence in torch, batched over sequences: the decode path at real sizes on any device."""

import torch
from torch import Tensor

from k3lab.kda.call import KdaCall
from k3lab.kda.reference import prepare


def recurrent_kda(call: KdaCall, states: Tensor | None = None) -> dict[str, Tensor]:
    """S <- S Diag(exp(g)) + (beta (v - S Diag(exp(g)) k)) k^T, o = S q, one token of every sequence at a time.

    float32 arithmetic (float64 for float64 calls); o [T, H, V] in the dtype of q; final_state [N, H, V, K] and, for
    speculative rollback, states [T, H, V, K] after each token when the call has speculative rows (in the memory `states`,
    if given). Same result as reference.recurrent_kda up to rounding; meant for short sequences, as its steps are as many as
    the longest one. Raises BadInput if the call is malformed.
    """
    acc = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    x = prepare(call.check(), acc)
    cu, lengths = call.cu_seqlens.long(), call.cu_seqlens.long().diff()
    S = x["state"].clone()  # may be the call's own tensor
    o = torch.empty_like(x["v"])
    if call.spec_mask is not None and states is None:
        states = o.new_empty(*o.shape, call.q.shape[-1])
    for step in range(int(lengths.max())):
        now = (lengths > step).nonzero().flatten()
        t = cu[now] + step
        k, q = x["k"][t].flatten(0, 1)[:, None], x["q"][t].flatten(0, 1)[:, None]  # [n H, 1, K]
        # a view where every sequence is active: decodes are bound by the passes over their states
        live = (S if len(now) == len(S) else S[now]).flatten(0, 1)  # [n H, V, K]
        live.mul_(x["g"][t].exp().flatten(0, 1)[:, None, :])
        # a row times S^T, not S times a column: three times as fast on a CPU
        delta = x["beta"][t].flatten()[:, None] * (x["v"][t].flatten(0, 1) - (k @ live.mT).squeeze(1))  # [n H, V]
        live.baddbmm_(delta[..., None], k)
        o[t] = (q @ live.mT).reshape(o[t].shape)
        if len(now) < len(S):
            S[now] = live.view(-1, *S.shape[1:])
        if states is not None:
            states[t] = live.view(-1, *S.shape[1:])
    out = {"o": o.to(call.q.dtype), "final_state": S}
    return out if states is None else {**out, "states": states}
