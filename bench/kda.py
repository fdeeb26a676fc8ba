"""Benchmark of the KDA kernels: python bench/kda.py [--cpu] [--sweep] [--out FILE.json]

On a GPU: the Triton chunk forward and the recurrent decode side by side with fla-core in one run (bfloat16, safe gate, L2
norm and gate in the kernels), after both were judged against float64. "call" is triton.testing.do_bench of the Python call
(median); "graph" replays it from a CUDA graph, so that launch overhead is out. The floor is the bytes an ideal kernel must
move, over the copy bandwidth measured in the same run. --sweep times every launch configuration of every stage: for
information, nothing picks one from it.

--cpu: one replay of the six torch stages at the Kimi-K3 TP8 shape (4,096 tokens, 12 heads, 128 decodes + one prefill) on
two threads, with its peak memory.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import torch

from k3lab.kda import reference, stages
from k3lab.kda.call import KdaCall
from k3lab.shapes import KIMI_K3_TP8
from k3lab.testing import error_budget, low_precision_reference, random_call

HEADS, DIM = KIMI_K3_TP8.num_heads, KIMI_K3_TP8.head_dim
PREFILLS = {"1 x 8192": (8192,), "8 x 1024": (1024,) * 8, "128 x 1 + 8064": (1,) * 128 + (8064,)}
DECODES = 128


def provenance() -> dict[str, str]:
    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.processor() or platform.machine()}"
    packages = {name: of(name) for name in ("torch", "triton", "fla-core")}
    return {"device": device, **packages, "python": platform.python_version()}


def peer_kwargs(call: KdaCall) -> dict:
    """The call in fla's names: batch axis of 1, state [N, H, V, K], everything fused that we fuse."""
    token = {n: getattr(call, m)[None] for n, m in (("q", "q"), ("k", "k"), ("v", "v"), ("g", "raw_g"), ("beta", "raw_beta"))}
    return token | {
        "A_log": call.A_log, "dt_bias": call.dt_bias.flatten(), "initial_state": call.state_vk(), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "lower_bound": call.lower_bound, "state_v_first": True, "cu_seqlens": call.cu_seqlens.long(),
    }  # fmt: skip


def call_of(lengths: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> KdaCall:
    """A call on the GPU whose every sequence has a state, so that no mask copies it."""
    return replace(random_call(lengths, heads=HEADS, head_dim=DIM, dtype=dtype, seed=1), has_initial_state=None).to("cuda")


def judge(name: str, call: KdaCall, o: torch.Tensor, state: torch.Tensor, truth: dict, low: dict) -> list[dict]:
    rows = []
    for part, got in (("o", o), ("final_state", state)):
        b = error_budget(f"{name} {part}", got, truth[part], low[part], call.q.dtype)
        print(("ok   " if b.ok else "OVER ") + str(b))
        rows.append(
            {"what": b.name, "error": b.error, "budget": b.budget, "rms_error": b.rms_error, "rms_budget": b.rms_budget, "ok": b.ok}
        )
    return rows


def accuracy() -> list[dict]:
    """Ours and fla's outputs against float64; ours in the dtype that is timed must hold: a fast wrong kernel is not a result."""
    from fla.ops.kda import chunk_kda as fla_chunk
    from fla.ops.kda import fused_recurrent_kda as fla_recurrent

    from k3lab.kda import triton_chunk, triton_recurrent

    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        call = call_of((1,) * 16 + (1000, 65), dtype)
        truth, low = reference.recurrent_kda(call), low_precision_reference(call, dtype)
        ours = triton_chunk.chunk_kda(call)
        mine = judge(f"chunk {dtype}", call, ours["o"], ours["final_state"], truth, low)
        o, state = fla_chunk(**peer_kwargs(call), safe_gate=True)
        rows += mine + judge(f"fla chunk {dtype}", call, o[0], state, truth, low)

        call = call_of((1,) * 16, dtype)
        truth, low = reference.recurrent_kda(call), reference.recurrent_kda(call, torch.float32)
        ours = triton_recurrent.recurrent_kda(call)
        decode = judge(f"recurrent {dtype}", call, ours["o"], ours["final_state"], truth, low)
        o, state = fla_recurrent(**peer_kwargs(call))
        rows += decode + judge(f"fla recurrent {dtype}", call, o[0], state, truth, low)
        if dtype == torch.bfloat16 and not all(r["ok"] for r in mine + decode):
            raise SystemExit(f"{dtype}: our own kernels are over the error budget; no times are given")
    return rows


def timed(fn: Callable[[], object]) -> dict[str, float]:
    """Median milliseconds of the call, and of its replay from a CUDA graph (NaN where the call cannot be captured)."""
    from triton.testing import do_bench, do_bench_cudagraph

    fn()
    call_ms = do_bench(fn, return_mode="median")
    try:
        graph_ms = do_bench_cudagraph(fn, return_mode="median")
    except RuntimeError as e:
        print(f"not captured in a graph: {str(e).splitlines()[0]}", file=sys.stderr)
        torch.cuda.synchronize()
        graph_ms = float("nan")
    return {"call_ms": call_ms, "graph_ms": graph_ms}


def copy_bandwidth() -> float:
    """Bytes per second moved (read + write) by a 1 GiB device copy."""
    from triton.testing import do_bench

    a = torch.empty(2**28, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / (do_bench(lambda: b.copy_(a), return_mode="median") * 1e-3)


def floor_bytes(call: KdaCall) -> int:
    """What any kernel must move: token tensors read once, o written once, states read and written in fp32."""
    tokens = sum(x.nbytes for x in (call.q, call.k, call.v, call.raw_g, call.raw_beta)) + call.v.nbytes
    return tokens + 2 * call.num_sequences * call.q.shape[1] * call.q.shape[2] * call.v.shape[2] * 4


def stage_times(call: KdaCall, sweep: bool) -> list[dict]:
    """Graph milliseconds of each stage alone, in its default configuration or in each of CONFIGS."""
    from k3lab.kda import triton_chunk as tc

    x = tc.chunk_kda(call)
    at = (call.cu_seqlens.int(), stages.chunk_index(call.cu_seqlens))
    S = call.state_vk()
    run = {
        "prepare": lambda c: tc.prepare(call.q, call.k, call.raw_beta, c),
        "gate_cumsum": lambda c: tc.gate_cumsum(call.raw_g, call.A_log, call.dt_bias, call.lower_bound, *at, config=c),
        "intra": lambda c: tc.intra(x["q_n"], x["k_n"], x["g"], x["beta"], True, *at, config=c),
        "inverse": lambda c: tc.inverse(x["Akk"], call.q.dtype, *at, config=c),
        "recompute_w_u": lambda c: tc.recompute_w_u(x["k_n"], call.v, x["beta"], x["A"], x["g"], *at, config=c),
        "state": lambda c: tc.state_pass(x["w"], x["u"], x["kg"], x["g"], S, *at, config=c),
        "output": lambda c: tc.output(x["q_n"], x["g"], x["Aqk"], x["v_new"], x["h"], *at, config=c),
    }
    rows = []
    for stage, launch in run.items():
        configs = tc.CONFIGS[stage] if sweep else [tc.DEFAULTS[stage]]
        for i, config in enumerate(configs):
            print(f"\r{stage} {i + 1}/{len(configs)}   ", end="", file=sys.stderr)
            rows.append({"stage": stage, **config, "default": config == tc.DEFAULTS[stage], **timed(lambda f=launch, c=config: f(c))})
    print(file=sys.stderr)
    return rows


def recurrent_configs(call: KdaCall, pool: torch.Tensor, slots: torch.Tensor) -> list[dict]:
    from k3lab.kda import triton_recurrent as tr

    return [
        {**config, "default": config == tr.DEFAULT, **timed(lambda c=config: decode(call, pool, slots, config=c))} for config in tr.CONFIGS
    ]


def decode(call: KdaCall, pool: torch.Tensor, slots: torch.Tensor, layout: str = "vk", config: dict | None = None) -> torch.Tensor:
    from k3lab.kda.triton_recurrent import fused_recurrent_kda

    return fused_recurrent_kda(
        call.q, call.k, call.v, call.raw_g, call.raw_beta, call.A_log, call.dt_bias, pool, slots, call.cu_seqlens,
        call.lower_bound, layout, config=config, check_values=False,
    )  # fmt: skip


def gpu(sweep: bool) -> dict:
    from fla.ops.kda import chunk_kda as fla_chunk
    from fla.ops.kda import fused_recurrent_kda as fla_recurrent

    from k3lab.kda import triton_chunk

    result: dict = {"provenance": provenance(), "accuracy": accuracy()}
    bandwidth = copy_bandwidth()
    result["copy_bandwidth_GB_s"] = bandwidth / 1e9
    rows = []

    def compare(what: str, call: KdaCall, ours: Callable, theirs: Callable) -> None:
        a, b = timed(ours), timed(theirs)
        row = {"what": what, "floor_ms": floor_bytes(call) / bandwidth * 1e3}
        rows.append(row | {f"{k3}_{k}": x[k] for k3, x in (("k3lab", a), ("fla", b)) for k in x})
        print(what, a, b, flush=True)

    with torch.no_grad():
        for name, lengths in PREFILLS.items():
            call = call_of(lengths)
            index, peer = stages.chunk_index(call.cu_seqlens), peer_kwargs(call)
            compare(
                f"chunk {name}", call,
                lambda c=call, i=index: triton_chunk.chunk_kda(c, chunk_indices=i), lambda p=peer: fla_chunk(**p, safe_gate=True),
            )  # fmt: skip
        call = call_of((1,) * DECODES)
        slots = torch.arange(1, DECODES + 1, device="cuda", dtype=torch.int32)
        pool = torch.cat([torch.zeros_like(call.initial_state[:1]), call.initial_state])
        peer = peer_kwargs(call)
        for layout in ("vk", "kv"):
            compare(
                f"recurrent {DECODES} decodes, {layout}", call,
                lambda lay=layout: decode(call, pool, slots, lay), lambda p=peer | {"state_v_first": layout == "vk"}: fla_recurrent(**p),
            )  # fmt: skip
        result["times"] = rows
        result["stages"] = stage_times(call_of(PREFILLS["1 x 8192"]), sweep)
        if sweep:
            result["recurrent_configs"] = recurrent_configs(call, pool, slots)

    print(f"\n{'':32s}{'floor':>8s}{'k3lab':>9s}{'fla':>9s}{'fla/k3lab':>11s}{'k3lab':>9s}{'fla':>9s}{'fla/k3lab':>11s}")
    print(f"{'milliseconds, median':32s}{'':8s}{'graph':>9s}{'graph':>9s}{'graph':>11s}{'call':>9s}{'call':>9s}{'call':>11s}")
    for r in rows:
        cells = "".join(
            f"{r[f'k3lab_{k}']:9.3f}{r[f'fla_{k}']:9.3f}{r[f'fla_{k}'] / r[f'k3lab_{k}']:11.2f}" for k in ("graph_ms", "call_ms")
        )
        print(f"{r['what']:32s}{r['floor_ms']:8.3f}{cells}")
    print("\nstages, 1 x 8192, graph milliseconds:")
    best: dict[str, dict] = {}
    for r in result["stages"]:
        if r["default"]:
            print(f"  {r['stage']:15s}{r['graph_ms']:8.3f}   default")
        if r["stage"] not in best or r["graph_ms"] < best[r["stage"]]["graph_ms"]:
            best[r["stage"]] = r
    if sweep:
        print("fastest of each stage:")
        for r in best.values():
            print("  ", {k: v for k, v in r.items() if k not in ("call_ms", "default")})
        print("   recurrent", min(result["recurrent_configs"], key=lambda r: r["graph_ms"]))
    return result


def cpu(repeats: int) -> dict:
    """Seconds of stages.chunk_kda at the K3 TP8 shape, stage by stage, and the peak resident set of the process."""
    torch.set_num_threads(2)
    lengths = (1,) * 128 + (4096 - 128,)
    call = random_call(lengths, heads=HEADS, head_dim=DIM, dtype=torch.bfloat16, seed=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    totals, by_stage = [], {}
    for _ in range(repeats):
        marks: list[tuple[str, float]] = [("prepare", time.perf_counter())]
        stages.chunk_kda(call, "zero", progress=lambda s, marks=marks: marks.append((s, time.perf_counter())))
        marks.append(("", time.perf_counter()))
        totals.append(marks[-1][1] - marks[0][1])
        for (name, t0), (_, t1) in pairwise(marks):
            by_stage.setdefault(name, []).append(t1 - t0)
        print(f"replay {len(totals)}/{repeats}: {totals[-1]:.2f} s", file=sys.stderr)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = {name: statistics.median(ts) for name, ts in by_stage.items()}
    result = {
        "provenance": provenance(), "threads": 2, "tokens": 4096, "decodes": 128, "heads": HEADS, "head_dim": DIM, "dtype": "bfloat16",
        "seconds": totals, "median_s": statistics.median(totals), "stage_s": seconds, "peak_rss_GiB": peak, "inputs_rss_GiB": before,
    }  # fmt: skip
    for name, s in seconds.items():
        print(f"  {name:15s}{s:8.3f} s")
    print(f"  {'all':15s}{result['median_s']:8.3f} s, peak RSS {peak:.2f} GiB ({before:.2f} before the first replay)")
    return result


def card(name: str, r: dict, command: str) -> str:
    """The data card of a result, every number out of the record."""
    import pandas as pd

    from k3lab.figures import markdown_table

    rows = {"made by": f"`{command}`", "made on": " · ".join(f"{k} {v}" for k, v in r["provenance"].items()), "licence": "this project's"}
    if "times" in r:
        rows["what"] = (
            f"k3lab's Triton kernels beside fla-core, {HEADS} heads of {DIM}, bfloat16, milliseconds, median; call: the Python call; "
            f"graph: replayed from a CUDA graph; floor: bytes over the copy bandwidth of the same run, {r['copy_bandwidth_GB_s']:.0f} GB/s"
        )
        times = pd.DataFrame(r["times"])
        for how in ("call", "graph"):
            times[f"k3lab / fla, {how}"] = times[f"k3lab_{how}_ms"] / times[f"fla_{how}_ms"]
        errors = "Errors against the float64 recurrence, by the budget rule of k3lab/testing.py"
        tables = {"Times": times, errors: pd.DataFrame(r["accuracy"])}
    else:
        rows["what"] = (
            f"replay of the six torch stages: {r['tokens']:,} tokens, {r['heads']} heads of {r['head_dim']}, {r['decodes']} decodes + one "
            f"prefill, {r['dtype']}, {r['threads']} threads; peak resident memory {r['peak_rss_GiB']:.2f} GiB"
        )
        stage = pd.Series({**r["stage_s"], "all": r["median_s"]}, name="seconds, median").rename_axis("stage")
        tables = {f"Median of {len(r['seconds'])} replays": stage.reset_index()}
    head = "\n".join(f"| {k} | {v} |" for k, v in rows.items())
    body = "\n\n".join(f"{title}:\n\n{markdown_table(frame)}" for title, frame in tables.items())
    return f"# {name}\n\n| | |\n|---|---|\n{head}\n\n{body}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="time the torch stages on two CPU threads instead")
    parser.add_argument("--repeats", type=int, default=3, help="replays of the CPU half")
    parser.add_argument("--sweep", action="store_true", help="time every launch configuration of every stage as well")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        parser.error("no CUDA or ROCm device is visible; use --cpu")
    print(" · ".join(f"{k} {v}" for k, v in provenance().items()))
    result = cpu(args.repeats) if args.cpu else gpu(args.sweep)
    if args.out:
        partial = args.out.with_name(args.out.name + ".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(partial, args.out)
        flags = (" --cpu" if args.cpu else "") + (" --sweep" if args.sweep else "")
        args.out.with_suffix(".md").write_text(card(args.out.name, result, f"python bench/kda.py{flags} --out {args.out.name}"))
    over = [r["what"] for r in result.get("accuracy", []) if not r["ok"] and not r["what"].startswith("fla")]
    if over:
        raise SystemExit("over the error budget: " + ", ".join(over))


if __name__ == "__main__":
    main()
