"""Sources of a stand-in engine, written to files by the recorder's tests: kernels in one module, their caller in another."""

import textwrap

KERNELS = '''
import torch
from k3lab.kda.call import KdaCall
from k3lab.kda.reference import recurrent_kda


def chunk_kda_with_fused_gate(
    q, k, v, raw_g, raw_beta, A_log, g_bias, lower_bound=None, initial_state=None, output_final_state=False, cu_seqlens=None, out=None
):
    """Dense states [N, H, V, K] in, o and new states out."""
    x = [t[0] for t in (q, k, v, raw_g, raw_beta)]
    call = KdaCall(*x, A_log, g_bias.view(A_log.numel(), -1), cu_seqlens, initial_state, lower_bound=lower_bound)
    r = recurrent_kda(call, torch.float32)
    return r["o"].to(q.dtype)[None], r["final_state"] if output_final_state else None


def fused_recurrent_kda(
    q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens=None, out=None
):
    """A pool [slots, H, V, K] updated in place by slot, with a slot per token where the indices are [N, S]."""
    n = cu_seqlens.numel() - 1
    slots = ssm_state_indices[:n].long()
    column = num_accepted_tokens.long() - 1 if num_accepted_tokens is not None else torch.zeros(n, dtype=torch.long, device=q.device)
    start = slots.gather(1, column[:, None])[:, 0] if slots.dim() == 2 else slots
    x = [t[0] for t in (q, k, v, raw_g, raw_beta)]
    call = KdaCall(*x, A_log, dt_bias.view(A_log.numel(), -1), cu_seqlens, initial_state[start.clamp_min(0)], lower_bound=lower_bound)
    r = recurrent_kda(call, torch.float32, token_states=True)
    o = r["o"].to(q.dtype)
    for i in range(n):
        rows = range(int(cu_seqlens[i]), int(cu_seqlens[i + 1]))
        if start[i] <= 0:
            o[rows] = 0
        elif slots.dim() == 2:
            for j, t in enumerate(rows):
                initial_state[slots[i, j]] = r["states"][t]
        else:
            initial_state[start[i]] = r["final_state"][i]
    return o[None], initial_state


def packed_decode(mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices):
    t, (h, d) = len(mixed_qkv), raw_g.shape[-2:]
    q, k, v = (x.reshape(1, t, h, d) for x in mixed_qkv.split(h * d, dim=1))
    cu = torch.arange(t + 1)
    return fused_recurrent_kda(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu, state_indices)


def chunk_kda(q, k, v, g, beta, scale=None, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, state_v_first=False, **kwargs):
    return v * 1.0, None


def attend(x, scale, cache):
    if scale is None:
        raise ZeroDivisionError("the kernel's own trouble")
    return x * scale
'''
LAYER = """
from torch import add

from KERNELS import attend, chunk_kda, chunk_kda_with_fused_gate, fused_recurrent_kda, packed_decode

table = {}
DECAY = 0.5


class Layer:
    def forward(self, x):
        return attend(x, 2.0, None)

    @staticmethod
    def helper(x):
        return x


def prefill(call):
    x = {n: getattr(call, n)[None] for n in ("q", "k", "v", "raw_g", "raw_beta")}
    return chunk_kda_with_fused_gate(
        **x, A_log=call.A_log, g_bias=call.dt_bias.flatten(), lower_bound=call.lower_bound, initial_state=call.initial_state,
        output_final_state=True, cu_seqlens=call.cu_seqlens,
    )


def decode(call, pool, slots, accepted=None):
    x = [getattr(call, n)[None] for n in ("q", "k", "v", "raw_g", "raw_beta")]
    return fused_recurrent_kda(
        *x, call.A_log, call.dt_bias.flatten(), call.lower_bound, pool, call.cu_seqlens, slots, num_accepted_tokens=accepted
    )


def step(x, scale=2.0, cache=None):
    return attend(x, scale, cache)


def plus(x, y):
    return add(x, y)


def fla_style(call, **flags):
    return chunk_kda(call.q[None], call.k[None], call.v[None], call.raw_g[None], call.raw_beta[None], **flags)


def packed(call, pool, slots):
    mixed = torch_cat([call.q.flatten(1), call.k.flatten(1), call.v.flatten(1)])
    return packed_decode(mixed, call.raw_g[None], call.raw_beta[None], call.A_log, call.dt_bias, call.lower_bound, pool, slots)


def torch_cat(parts):
    import torch

    return torch.cat(parts, dim=1)
"""


def write_engine(folder, name: str) -> None:
    (folder / f"{name}_kernels.py").write_text(textwrap.dedent(KERNELS))
    (folder / f"{name}_layer.py").write_text(textwrap.dedent(LAYER).replace("KERNELS", f"{name}_kernels"))
