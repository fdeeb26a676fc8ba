"""One KDA layer step over a batch of prefills and decodes, with the route as a choice.

    chunk_all     every plain sequence, decodes of length 1 included, through the chunk kernel: the fault of vLLM PR 50649
    split         decode-first batch: decodes to the recurrent kernel, the prefill tail to the chunk kernel with rebased
                  cu_seqlens, outputs stitched in order: the fix
    gather_split  speculative rows between plain ones, where a cut at num_decodes cannot apply: gather the length-1 plain
                  sequences and the speculative ones for the recurrent kernel, the rest for the chunk kernel, scatter back

Speculative sequences take the recurrent kernel on every route, as in vLLM.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3lab.errors import BadInput
from k3lab.kda import recurrent, reference, stages
from k3lab.kda.call import KdaCall

ROUTES = ("chunk_all", "split", "gather_split")
IMPLS = ("reference", "torch", "triton", "triton_fused")


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a step: which sequences and token rows of the batch went in, and what came out."""

    kernel: str  # "chunk" or "recurrent"
    sequences: list[int]
    rows: Tensor
    call: KdaCall
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a layer step returns.

    o            [T, H, V] in the dtype of q, rows of null-slot sequences zero
    y            RMSNorm(o) * sigmoid(output_gate), or None where the call has no output gate or norm weight
    final_state  [N, H, V, K] fp32, whatever the layout of the call
    states       [T, H, V, K] after each token, only rows of speculative sequences filled (others NaN); None without them
    launches     the kernel launches in order, every stage's tensors by name
    """

    o: Tensor
    y: Tensor | None
    final_state: Tensor
    states: Tensor | None
    launches: list[Launch] = field(repr=False)


def plan(call: KdaCall, route: str) -> list[tuple[str, list[int]]]:
    """The launches of a route: (kernel, sequences) in order, null-slot sequences left out.

    Raises BadInput if the route is unknown or cannot apply: "split" needs a decode-first batch without speculative rows.
    """
    if route not in ROUTES:
        raise BadInput(f"route: {route!r} is not one of {ROUTES}")
    lengths = call.lengths.tolist()
    live = [n for n in range(len(lengths)) if call.state_indices is None or int(call.state_indices[n]) > 0]
    spec = set() if call.spec_mask is None else set(call.spec_mask.nonzero().flatten().tolist())
    if route == "split":
        if spec:
            raise BadInput('route "split" cannot apply: the batch has speculative rows between plain ones; use "gather_split"')
        long = [n for n in range(call.num_decodes) if lengths[n] != 1]
        if long:
            raise BadInput(
                f'route "split" needs a decode-first batch: sequence {long[0]} is below num_decodes but has {lengths[long[0]]} tokens'
            )
        decode = [n for n in live if n < call.num_decodes]
    elif route == "gather_split":
        decode = [n for n in live if n in spec or lengths[n] == 1]
    else:
        decode = [n for n in live if n in spec]
    taken = set(decode)
    chunk = [n for n in live if n not in taken]
    return [(kernel, seqs) for kernel, seqs in (("recurrent", decode), ("chunk", chunk)) if seqs]


def _launch(kernel: str, call: KdaCall, impl: str, padding: stages.Padding, states: Tensor | None) -> dict[str, Tensor]:
    if impl in ("reference", "triton_fused") and not (isinstance(padding, str) and padding == "zero"):
        why = "has no tiles" if impl == "reference" else "shows no stages"
        raise BadInput(f'impl "{impl}" {why}, so padding must be "zero"; use "torch" or "triton"')
    if impl == "reference":
        out = (reference.chunk_kda if kernel == "chunk" else reference.recurrent_kda)(call)
        if kernel == "recurrent" and call.spec_mask is not None:
            out = reference.recurrent_kda(call, token_states=True)
        return out
    if impl == "torch":
        return stages.chunk_kda(call, padding) if kernel == "chunk" else recurrent.recurrent_kda(call, states)
    # the interpreter switch is read when Triton kernels are defined, so they are imported only when asked for
    from k3lab.kda import triton_chunk, triton_fused, triton_recurrent

    if kernel == "recurrent":
        return triton_recurrent.recurrent_kda(call)
    return triton_fused.chunk_kda(call) if impl == "triton_fused" else triton_chunk.chunk_kda(call, padding)


def kda_layer_step(
    call: KdaCall, route: str = "split", impl: str = "torch", padding: stages.Padding = "zero", states: Tensor | None = None
) -> StepResult:
    """Run one KDA layer step by a route, and stitch outputs and states back into batch order.

    impl      "reference" (float64), "torch" (any device), "triton" (CUDA, ROCm, small shapes under the interpreter) or
              "triton_fused": the same with the fast chunk forward, which keeps no stage tensors and takes padding "zero"
    padding   what masked rows of the chunk kernel's tiles are worth, see stages.chunk_kda; a bool tensor [N, H] over the
              sequences of this batch is allowed with impl="torch"
    states    [T, H, V, K] in the dtype of final_state, memory for the result's states where impl is "torch" and every sequence
              speculative; as large as all states times the rows of a sequence, so that a caller of many steps keeps it
    Raises BadInput for a malformed call, an unknown name, or a route that cannot apply; Unsupported where impl has no kernel for the
    dtype, head_dim or device (bfloat16 under the interpreter).
    """
    if impl not in IMPLS:
        raise BadInput(f"impl: {impl!r} is not one of {IMPLS}")
    if isinstance(padding, Tensor) and impl != "torch":
        raise BadInput(f'padding: a tensor needs impl="torch", not {impl!r}')
    call.check()
    stages.check_padding(padding, call.num_sequences, call.q.shape[1])
    launches = []
    memory, o, final, states = states, None, None, None
    for kernel, sequences in plan(call, route):
        whole = len(sequences) == call.num_sequences
        part, rows = (call, torch.arange(call.q.shape[0], device=call.q.device)) if whole else call.select(sequences)
        fill = padding[torch.tensor(sequences, device=padding.device)] if isinstance(padding, Tensor) else padding
        all_speculative = whole and call.spec_mask is not None and bool(call.spec_mask.all())
        out = _launch(kernel, part, impl, fill, memory if all_speculative else None)
        launches.append(Launch(kernel, sequences, rows, part, out))
        if whole:
            o, final = out["o"], out["final_state"]
        elif o is None:
            o = torch.zeros(*call.v.shape, dtype=out["o"].dtype, device=call.v.device)
            final = call.state_vk().to(out["final_state"].dtype, copy=True)  # state_vk may be the call's own tensor
        if not whole:
            o[rows] = out["o"]
            final[torch.tensor(sequences, device=final.device)] = out["final_state"]
        if all_speculative:
            states = out["states"]
        elif "states" in out:
            states = torch.full((*o.shape, call.q.shape[-1]), float("nan"), dtype=final.dtype, device=o.device)
            states[rows] = out["states"]
            if part.spec_mask is not None:
                plain = (~part.spec_mask.bool()).repeat_interleave(part.cu_seqlens.long().diff())
                states[rows[plain]] = float("nan")
    if o is None:
        o, final = torch.zeros_like(call.v), call.state_vk().clone()
    y = None
    if call.output_gate is not None and call.norm_weight is not None:
        acc = torch.promote_types(o.dtype, torch.float32)
        y = reference.output_norm_gate(o.to(acc), call.norm_weight.to(acc), call.output_gate.to(acc), call.eps).to(o.dtype)
    return StepResult(o, y, final, states, launches)
