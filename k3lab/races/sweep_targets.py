"""What a sweep can run: a problem (inputs, outputs, float64 truth) and a launch, for every kernel of this package.

A target is two functions, named "module:function" or "file.py:function" so that a subprocess can find them:

    problem(kernel, spec, device) -> Problem      spec: the JSON object of one input
    launch(config, inputs, outputs)               runs the kernel once, into outputs

A stage is judged by itself: its inputs are the clean outputs of the torch stages before it, and its truth is the torch
stage in float64 on those same inputs, so an error of an earlier stage is not counted here. A kernel of the fused chunk forward
runs at its config between the others at their defaults, and is judged by what the three give together; the buffers between
them hold the fill too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3lab.errors import BadInput
from k3lab.kda import reference, stages
from k3lab.kda.call import KdaCall
from k3lab.kda.stages import STAGE_OUTPUTS, STAGES
from k3lab.races.compile_worker import import_place
from k3lab.shapes import KIMI_K3, KIMI_K3_TP8

RECURRENT = "fused_recurrent_kda"
# and what triton_fused's configs call them
FUSED = {"fused_gate": "gate", "fused_halves": "halves", "fused_chunk": "chunk", "fused_state": "state"}
ATTN_RES = "attn_res"
KERNELS = ("prepare", *STAGES, RECURRENT, *FUSED, ATTN_RES)
FORMS = ("plain", "serving")
BLOCKS = math.ceil(KIMI_K3.num_layers / KIMI_K3.attn_res_block)
ROWS = 512  # tokens of AttnRes judged at a time: a float64 copy of every source of 4,096 is 2 GB


@dataclass
class Problem:
    """inputs by name (tensors and plain values), outputs as tensors to be filled and written, and what they should be.

    truth is float64 (or exact in any dtype); low is a reference at the precision of dtype: k3lab.testing.error_budget.
    """

    inputs: dict[str, Any]
    outputs: dict[str, Tensor]
    truth: dict[str, Tensor]
    low: dict[str, Tensor]
    dtype: torch.dtype


def resolve(name: str) -> Callable:
    """The function that "module:function" or "file.py:function" names. Raises BadInput saying what is missing."""
    module, attribute = import_place(name, "target")
    if not callable(getattr(module, attribute, None)):
        raise BadInput(f"target {name}: it has no function {attribute!r}")
    return getattr(module, attribute)


def random_input(lengths: Sequence[int], heads: int = KIMI_K3_TP8.num_heads, head_dim: int = 128, name: str = "", **options: Any) -> dict:
    """Spec of an input from k3lab.testing.random_call; options are its arguments (dtype as a name, decay, lower_bound, seed)."""
    spec = {"kind": "random", "lengths": list(lengths), "heads": heads, "head_dim": head_dim, "dtype": "bfloat16", **options}
    return {"name": name or f"random {sum(lengths)} tokens in {len(lengths)} sequences", **spec}


def capture_input(path: str | Path) -> dict:
    """Spec of an input from a capture of kind kda; the file is named by its content as well, so an edited file is another input."""
    from k3lab.provenance import sha256

    path = Path(path)
    if not path.is_file():
        raise BadInput(f"{path}: no such capture")
    return {"name": path.name, "kind": "capture", "path": str(path.resolve()), "sha256": sha256(path)}


def size_ladder(tokens: Sequence[int] = (1024, 4096, 16384), **options: Any) -> list[dict]:
    """One sequence of each size: on both sides of 4,096 tokens, and at 12 heads of 1,024 workgroups."""
    return [random_input([t], name=f"ladder {t} tokens", **options) for t in tokens]


def sources_input(
    form: str, tokens: int = 4096, hidden: int = KIMI_K3.hidden, blocks: int = BLOCKS, name: str = "", **options: Any
) -> dict:
    """Spec of an input of attn_res from k3lab.testing.random_sources; options are dtype (as a name) and seed.

    form  "plain": the mixture alone; "serving": the pending MLP output is added first, the new prefix committed as a block, and the
          mixture normed
    """
    spec = {"kind": "sources", "form": form, "tokens": tokens, "hidden": hidden, "blocks": blocks, "dtype": "bfloat16", **options}
    return {"name": name or f"{tokens} tokens x {hidden}, {blocks} blocks, {form}", **spec}


def default_inputs(kernel: str) -> list[dict]:
    """What a kernel is swept on where nothing else is said: 128 decodes and a prefill of 4,096 tokens, or 4,096 tokens of AttnRes.

    fused_chunk runs at the gates that fused_halves leaves it; fused_state runs on a lone prefill as well, which it cuts into segments.
    """
    if kernel == ATTN_RES:
        return [sources_input(form, seed=1) for form in FORMS]
    if kernel == "fused_chunk":
        return [random_input([1] * 128 + [4096], name="128 x 1 + 4096 tokens, no bound", decay="weak", lower_bound=None, seed=1)]
    lone = [random_input([4096], name="4096 tokens", seed=1)] if kernel == "fused_state" else []
    return [random_input([1] * 128 + [4096], name="128 x 1 + 4096 tokens", seed=1), *lone]


def call_of(spec: Mapping, device: str) -> KdaCall:
    """The KdaCall of a spec on the device. Raises BadInput if the spec or the file is malformed."""
    if spec.get("kind") == "capture":
        from k3lab.capture import Capture

        return Capture.load(spec["path"]).kda_call(device)
    if spec.get("kind") != "random":
        raise BadInput(f"input {spec.get('name')}: kind {spec.get('kind')!r} is not random or capture")
    from k3lab.testing import random_call

    return _drawn(random_call, spec, device)


def _drawn(make: Callable, spec: Mapping, device: str, **more: Any) -> Any:
    """What a factory of k3lab.testing makes of a spec. Raises BadInput if it takes no such arguments."""
    options = {k: v for k, v in spec.items() if k not in ("name", "kind", "form")}
    dtype = getattr(torch, str(options.get("dtype")), None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"input {spec.get('name')}: dtype {options.get('dtype')!r} is not a torch dtype")
    try:
        return make(**options | {"dtype": dtype, "device": device} | more)
    except (TypeError, ValueError) as error:
        raise BadInput(f"input {spec.get('name')}: {error}") from None


def problem(kernel: str, spec: Mapping, device: str) -> Problem:
    """The problem of one kernel on one input."""
    if kernel not in KERNELS:
        raise BadInput(f"kernel {kernel!r} is not one of {', '.join(KERNELS)}")
    if kernel == ATTN_RES:
        return _attn_res(spec, device)
    call = call_of(spec, device)
    if kernel in FUSED:
        return _whole(kernel, call)
    return _recurrent(call) if kernel == RECURRENT else _stage(kernel, call)


def launch(config: Mapping, inputs: Mapping, outputs: Mapping[str, Tensor]) -> None:
    """Run the kernel of the problem at one config ("padding" beside the launch options) into outputs."""
    from k3lab.kda import triton_chunk as tc

    options = dict(config)
    padding = options.pop("padding", "undefined")
    x, supply = inputs, iter(outputs.values())
    other = {RECURRENT: _launch_recurrent, ATTN_RES: _launch_attn_res, **dict.fromkeys(FUSED, _launch_fused)}
    if x["kernel"] in other:
        other[x["kernel"]](options, x, outputs)
        return
    how = {"config": options, "empty": lambda *_, **__: next(supply)}
    call = x["call"]
    at = (x["cu"], x["ci"])
    match x["kernel"]:
        case "prepare":
            tc.prepare(call.q, call.k, call.raw_beta, **how)
        case "gate_cumsum":
            tc.gate_cumsum(call.raw_g, call.A_log, call.dt_bias, call.lower_bound, *at, padding, **how)
        case "intra":
            tc.intra(x["q_n"], x["k_n"], x["g"], x["beta"], call.lower_bound is not None, *at, padding, **how)
        case "inverse":
            tc.inverse(x["Akk"], call.q.dtype, *at, padding, **how)
        case "recompute_w_u":
            tc.recompute_w_u(x["k_n"], call.v, x["beta"], x["A"], x["g"], *at, padding, **how)
        case "state":
            tc.state_pass(x["w"], x["u"], x["kg"], x["g"], x["h0"], *at, padding, **how)
        case "output":
            tc.output(x["q_n"], x["g"], x["Aqk"], x["v_new"], x["h"], *at, padding, **how)


def _stage(kernel: str, call: KdaCall) -> Problem:
    """Clean inputs up to the stage, its truth in float64, and the torch stage in fp32 as the low-precision reference."""
    f32, f64, dtype = torch.float32, torch.float64, call.q.dtype
    tiles = stages.Tiles(call.cu_seqlens)  # masked rows are zero
    x: dict[str, Any] = {"kernel": kernel, "call": call, "cu": call.cu_seqlens.int(), "ci": stages.chunk_index(call.cu_seqlens)}
    bounded, h0 = call.lower_bound is not None, call.state_vk()
    steps: dict[str, Callable[[dict, KdaCall, torch.dtype], tuple]] = {
        "prepare": lambda s, c, acc: tuple(stages.prepare(c, acc).values()),
        "gate_cumsum": lambda s, c, acc: (stages.gate_cumsum(tiles, c, acc),),
        "intra": lambda s, c, acc: stages.intra(tiles, s["q_n"], s["k_n"], s["g"], s["beta"], bounded, acc),
        "inverse": lambda s, c, acc: (stages.inverse(tiles, s["Akk"], c.q.dtype, acc),),
        "recompute_w_u": lambda s, c, acc: stages.recompute_w_u(tiles, s["k_n"], c.v, s["beta"], s["A"], s["g"], acc),
        "state": lambda s, c, acc: stages.state(tiles, s["w"], s["u"], s["kg"], s["g"], h0, acc),
        "output": lambda s, c, acc: (stages.output(tiles, s["q_n"], s["g"], s["Aqk"], s["v_new"], s["h"], acc),),
    }
    names = {"prepare": ("q_n", "k_n", "beta"), **STAGE_OUTPUTS}
    for stage, step in steps.items():
        low = dict(zip(names[stage], step(x, call, f32), strict=True))
        if stage == kernel:
            break
        x |= low
    wide = {n: v.to(f64) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in x.items()}
    truth = dict(zip(names[kernel], steps[kernel](wide, call.to(dtype=f64), f64), strict=True))
    if kernel == "gate_cumsum":
        low = {"g": _sequential_scan(tiles, call)}
    outputs = {n: torch.empty_like(v, dtype=f32 if n in ("beta", "g", "Akk", "final_state") else dtype) for n, v in low.items()}
    if kernel == "state":
        x["h0"] = h0
    return Problem(x, outputs, truth, low, f32 if kernel == "gate_cumsum" else dtype)


def _sequential_scan(tiles: stages.Tiles, call: KdaCall) -> Tensor:
    """g as fp32 adds it row by row, exp(A_log) one rounding off: what no fp32 kernel avoids. torch.cumsum adds more exactly."""
    A_log = call.A_log + torch.finfo(torch.float32).eps
    step = reference.log_decay(call.raw_g.float(), A_log, call.dt_bias, call.lower_bound) * stages.RCP_LN2
    G = torch.stack(list(accumulate(tiles.load(step, torch.float32).unbind(2))), 2)
    out = torch.empty_like(step)
    tiles.store(out, G)
    return out


def _whole(kernel: str, call: KdaCall) -> Problem:
    """From the raw gate to o and final_state: truth in float64, the chunked twin with stored stages as the reference."""
    from k3lab.testing import low_precision_reference

    truth, low = reference.recurrent_kda(call), low_precision_reference(call, call.q.dtype)
    outputs = {"o": torch.empty_like(call.v), "final_state": torch.empty_like(truth["final_state"], dtype=torch.float32)}
    return Problem({"kernel": kernel, "call": call}, outputs, truth, low, call.q.dtype)


def _recurrent(call: KdaCall) -> Problem:
    """The whole recurrence from the gathered states, one slot of the pool to a sequence."""
    p = _whole(RECURRENT, call)
    p.inputs["call"] = replace(call, initial_state=call.state_vk(), has_initial_state=None, state_layout="vk")
    p.inputs["slots"] = torch.arange(1, call.num_sequences + 1, dtype=torch.int32, device=call.q.device)
    return p


def _launch_recurrent(config: Mapping, x: Mapping, outputs: Mapping[str, Tensor]) -> None:
    from k3lab.kda.triton_recurrent import fused_recurrent_kda

    c: KdaCall = x["call"]
    pool = torch.cat([torch.zeros_like(c.initial_state[:1]), c.initial_state])  # slot 0 is the null slot
    fused_recurrent_kda(
        c.q, c.k, c.v, c.raw_g, c.raw_beta, c.A_log, c.dt_bias, pool, x["slots"], c.cu_seqlens, c.lower_bound, "vk",
        config=dict(config), empty=lambda *_, **__: outputs["o"],
    )  # fmt: skip
    outputs["final_state"].copy_(pool[1:])


def _launch_fused(config: Mapping, x: Mapping, outputs: Mapping[str, Tensor]) -> None:
    from k3lab.kda import triton_fused

    supply, fill = iter(outputs.values()), float(outputs["o"].flatten()[0])

    def empty(shape: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
        out = next(supply, None)  # o and final_state come first
        return torch.full(shape, fill, dtype=dtype, device=device) if out is None else out

    triton_fused.chunk_kda(x["call"], {FUSED[x["kernel"]]: config}, check=False, empty=empty)


def _attn_res(spec: Mapping, device: str) -> Problem:
    """The mixture of one consumer; in the serving form also the new prefix, and that prefix as a block in the same bank."""
    from k3lab.attn_res.reference import attn_res_reference
    from k3lab.testing import random_sources

    if spec.get("kind") != "sources" or spec.get("form") not in FORMS:
        raise BadInput(f"input {spec.get('name')}: attn_res takes kind sources, form {' or '.join(FORMS)}; see sources_input")
    serving, n = spec["form"] == "serving", spec["blocks"]
    x = _drawn(random_sources, spec, device, pending=serving, output_norm=serving, spare=int(serving))
    per_token = {"prefix": x["prefix"], "pending": x.get("pending")}
    parts = []
    for rows in (slice(i, i + ROWS) for i in range(0, spec["tokens"], ROWS)):
        some = x | {k: None if v is None else v[rows] for k, v in per_token.items()} | {"bank": x["bank"][:, rows]}
        parts.append([attn_res_reference(**some, dtype=d) for d in (torch.float64, torch.float32)])
    dtype = x["prefix"].dtype
    truth, low = {"o": torch.cat([t.o for t, _ in parts])}, {"o": torch.cat([f.o.to(dtype) for _, f in parts])}
    outputs = {"o": torch.empty_like(x["prefix"])}
    if serving:
        truth["prefix"] = truth["block"] = low["prefix"] = low["block"] = torch.cat([t.prefix for t, _ in parts])
        outputs |= {"prefix": torch.empty_like(x["prefix"]), "block": x["bank"][n]}
    return Problem({**x, "kernel": ATTN_RES, "bank": x["bank"][:n]}, outputs, truth, low, dtype)


def _launch_attn_res(config: Mapping, x: Mapping, outputs: Mapping[str, Tensor]) -> None:
    from k3lab.attn_res.triton_attn_res import attn_res_triton

    commit, bank, supply = "block" in outputs, x["bank"], iter(outputs.values())
    # an input is the valid blocks alone, since the one behind them is written
    bank = bank.as_strided((len(bank) + commit, *bank.shape[1:]), bank.stride())
    given = {k: v for k, v in x.items() if k != "kernel"} | {"bank": bank}
    attn_res_triton(**given, commit=commit, config=dict(config), empty=lambda *_, **__: next(supply))


def configs_of(kernel: str) -> list[dict]:
    """The launch configurations worth trying, from the kernel's own module. Raises BadInput for an unknown kernel."""
    if kernel not in KERNELS:
        raise BadInput(f"kernel {kernel!r} is not one of {', '.join(KERNELS)}, planted")
    if kernel == RECURRENT:
        from k3lab.kda.triton_recurrent import CONFIGS as recurrent

        return [dict(c) for c in recurrent]
    if kernel in FUSED:
        from k3lab.kda.triton_fused import CONFIGS as fused

        return [dict(c) for c in fused[FUSED[kernel]]]
    if kernel == ATTN_RES:
        from k3lab.attn_res.triton_attn_res import CONFIGS as attn_res

        return [dict(c) for c in attn_res]
    from k3lab.kda.triton_chunk import CONFIGS

    return [dict(c) for c in CONFIGS[kernel]]
