"""The kernels of the lab on one GPU beside fla-core and the memory floor: python bench/h200.py [--sweep] [--out FILE.json]

In one run, in this order: errors against float64 (nothing is timed if one of ours is over its budget); the copy bandwidth; the times
of the chunk forward, a mixed batch by the split route, the recurrent decode and AttnRes (bench/attn_res.py); where the time of the
chunk forward goes, kernel by kernel; peak memory; how time grows from 64 to 131,072 tokens and from 1 to 4,096 decodes. Kimi-K3 at
tensor parallel 8: 12 heads, K = V = 128, bfloat16, safe gate, L2 norm and gate in the kernels. Milliseconds, median:

    call    triton.testing.do_bench of the Python call; its flush of the L2 hides some of the host's time
    wall    wall clock of back-to-back Python calls: the larger of host and device time, and as steady as the host is
    graph   a CUDA graph of many calls, divided by their number: no launch overhead

The floor is the bytes that any kernel must move (inputs read once, results written once, states read and written in fp32) over the
copy bandwidth measured in the same run. --sweep times every launch configuration as well: for information, nothing picks one.
--draw FILE.json measures nothing: it draws the curves of a result beside it and prints its summary, the table of the README.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import attn_res  # bench/attn_res.py
import pandas as pd
import torch
from kda import DIM, HEADS, copy_bandwidth, provenance  # bench/kda.py

import k3lab
from k3lab.capture import Capture
from k3lab.errors import BadInput
from k3lab.files import write_files
from k3lab.kda import reference
from k3lab.kda.call import KdaCall
from k3lab.provenance import sha256
from k3lab.testing import LENGTH_MIXES, error_budget, low_precision_reference, random_call, repeated_token

CAPTURES = sorted((Path(__file__).parents[1] / "data" / "captures").glob("mixed_*.safetensors"))
PREFILL, DECODES, LONG = 4096, 128, 8192
TOKENS = [64 * 2**i for i in range(12)]
SEQUENCES = [2**i for i in range(13)]
PACKAGE = Path(k3lab.__file__).parent
SOURCES = ("kda/triton_ops.py", "kda/triton_fused.py", "kda/triton_recurrent.py", "attn_res/triton_attn_res.py")
COLD_BYTES = 200e6  # states of one graph, several times the L2 of the device


def call_of(lengths: Iterable[int], dtype: torch.dtype = torch.bfloat16, decay: str = "mixed", lower_bound: float | None = -5.0) -> KdaCall:
    """A call on the GPU whose every sequence has a state, so that no mask copies it."""
    call = random_call(tuple(lengths), heads=HEADS, head_dim=DIM, dtype=dtype, decay=decay, lower_bound=lower_bound, seed=1)
    return replace(call, has_initial_state=None, output_gate=None, norm_weight=None).to("cuda")


def tiled(n: int, decodes: bool) -> KdaCall:
    """One sequence of n tokens, or n decodes; the draws repeat after 1,024 tokens (128 decodes), as drawing would outlast timing."""
    base = call_of((1,) * min(n, 128) if decodes else (min(n, 1024),))
    times = n // len(base.q)
    repeated = {name: getattr(base, name) for name in ("q", "k", "v", "raw_g", "raw_beta", *(("initial_state",) if decodes else ()))}
    cu = torch.arange(0, n + 1, 1 if decodes else n, dtype=torch.int32, device="cuda")
    return replace(base, cu_seqlens=cu, **{k: x.repeat(times, *[1] * (x.dim() - 1)) for k, x in repeated.items()})


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def fla_kwargs(call: KdaCall) -> dict:
    """The call in fla's names: batch axis of 1, state [N, H, V, K], everything fused that we fuse."""
    token = {n: getattr(call, m)[None] for n, m in (("q", "q"), ("k", "k"), ("v", "v"), ("g", "raw_g"), ("beta", "raw_beta"))}
    return token | {
        "A_log": call.A_log, "dt_bias": call.dt_bias.flatten(), "initial_state": call.state_vk(), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "lower_bound": call.lower_bound, "state_v_first": True, "cu_seqlens": call.cu_seqlens.long(),
    }  # fmt: skip


def chunk(call: KdaCall, **kw) -> Callable[[], dict]:
    from k3lab.kda.triton_fused import chunk_kda

    return lambda: chunk_kda(call, check=False, **kw)


def fla_chunk(call: KdaCall) -> Callable[[], tuple]:
    from fla.ops.kda import chunk_kda

    kwargs = fla_kwargs(call)
    return lambda: chunk_kda(**kwargs, safe_gate=True)


def decode(call: KdaCall, pool: torch.Tensor, slots: torch.Tensor, config: dict | None = None) -> Callable[[], torch.Tensor]:
    from k3lab.kda.triton_recurrent import fused_recurrent_kda

    return lambda: fused_recurrent_kda(
        call.q, call.k, call.v, call.raw_g, call.raw_beta, call.A_log, call.dt_bias, pool, slots, call.cu_seqlens,
        call.lower_bound, config=config, check_values=False,
    )  # fmt: skip


def fla_decode(call: KdaCall, state: torch.Tensor) -> Callable[[], tuple]:
    from fla.ops.kda import fused_recurrent_kda

    kwargs = fla_kwargs(call) | {"initial_state": state}
    return lambda: fused_recurrent_kda(**kwargs)


def decodes(n: int, config: dict | None = None) -> tuple[KdaCall, list, list]:
    """n decodes over one pool of states, several times the L2: each call of ours and of fla's takes its own slots of it."""
    call = tiled(n, decodes=True)
    copies = max(1, math.ceil(COLD_BYTES / (2 * call.initial_state.nbytes)))
    pool = torch.cat([torch.zeros_like(call.initial_state[:1]), *[call.initial_state] * copies])
    first = [1 + i * n for i in range(copies)]
    ours = [decode(call, pool, torch.arange(i, i + n, device="cuda", dtype=torch.int32), config) for i in first]
    return call, ours, [fla_decode(call, pool[i : i + n]) for i in first]


def judge(name: str, got: dict | tuple, truth: dict, low: dict, dtype: torch.dtype, state_dtype: torch.dtype | None = None) -> list[dict]:
    got = got if isinstance(got, dict) else {"o": got[0][0], "final_state": got[1]}
    rows = []
    for part, x in got.items():
        b = error_budget(f"{name} {part}", x, truth[part], low[part], dtype if part == "o" else state_dtype or dtype)
        if not b.ok:
            print("OVER " + str(b))
        rows.append({"what": b.name} | {k: getattr(b, k) for k in ("error", "budget", "rms_error", "rms_budget", "ok")})
    return rows


def accuracy() -> list[dict]:
    """Outputs against the float64 recurrence, into buffers of NaN: every length mix and decay, captures, decodes, AttnRes."""
    from k3lab.kda.triton_recurrent import recurrent_kda

    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        mixes = product(LENGTH_MIXES.items(), ("mixed", "strong", "weak"))
        calls = [(f"{name}, {decay} decay", call_of(lengths, dtype, decay)) for (name, lengths), decay in mixes]
        calls += [("1000 and 65 tokens", call_of((1000, 65), dtype)), ("gate without a bound", call_of((65, 200), dtype, "weak", None))]
        calls += [(p.stem, Capture.load(p).kda_call().to("cuda", dtype)) for p in CAPTURES]
        if dtype == torch.bfloat16:  # the terms of a row of A k cancel; in float32 that may take more than the budget
            calls.append(("one key again and again, no decay", repeated_token(call_of((130,), dtype), 3.0)))
        for name, call in calls:
            print(f"\rchunk {dtype}, {name}".ljust(70), end="", file=sys.stderr)
            slots = call.state_indices
            live = call if slots is None else call.select((slots > 0).nonzero().flatten().tolist())[0]
            truth, low = reference.recurrent_kda(live), low_precision_reference(live, dtype)
            rows += judge(f"k3lab chunk {dtype}, {name}", chunk(live, empty=poisoned)(), truth, low, dtype)
            if dtype == torch.bfloat16 and live is call and live.lower_bound is not None:  # what is timed, in its shape
                rows += judge(f"fla chunk {dtype}, {name}", fla_chunk(live)(), truth, low, dtype)
        call = call_of((1,) * 64, dtype)
        truth, low = reference.recurrent_kda(call), reference.recurrent_kda(call, torch.float32)
        rows += judge(f"k3lab recurrent {dtype}, 64 decodes", recurrent_kda(call), truth, low, dtype, torch.float32)
        rows += judge(f"fla recurrent {dtype}, 64 decodes", fla_decode(call, call.state_vk())(), truth, low, dtype, torch.float32)
    print(file=sys.stderr)
    over = [r["what"] for r in rows if not r["ok"] and r["what"].startswith("k3lab")]
    if over:
        raise SystemExit("over the error budget, so no times are given: " + "; ".join(over))
    return rows


def timed(calls: list[Callable[[], object]], most: int = 8) -> dict[str, float]:
    """call, wall and graph milliseconds of calls that do the same work."""
    from triton.testing import do_bench

    calls[0]()
    call_ms = do_bench(calls[0], warmup=10, rep=50, return_mode="median")
    repeats = max(1, min(most, math.ceil(3.0 / call_ms)))
    graph = calls if len(calls) > 1 else calls * repeats
    return {"call_ms": call_ms, "wall_ms": attn_res.wall_ms(calls[0], max(5, int(60 / call_ms))), "graph_ms": attn_res.graph_ms(graph)}


def floor_bytes(call: KdaCall) -> int:
    """What any kernel must move: token tensors read once, o written once, states read and written in fp32."""
    tokens = sum(x.nbytes for x in (call.q, call.k, call.v, call.raw_g, call.raw_beta)) + call.v.nbytes
    return tokens + 2 * call.num_sequences * call.q.shape[1] * call.q.shape[2] * call.v.shape[2] * 4


def row_of(what: dict, size: int, bandwidth: float, ours: list, theirs: list) -> dict:
    """Times of both and what they say; a call that runs out of memory has none."""
    row = what | {"floor_ms": size / bandwidth * 1e3}
    for who, calls in (("k3lab", ours), ("fla", theirs)):
        try:
            row |= {f"{who} {k}": v for k, v in timed(calls).items()}
        except torch.OutOfMemoryError:
            row |= {f"{who} {k}": float("nan") for k in ("call_ms", "wall_ms", "graph_ms")}
        torch.cuda.empty_cache()
    row |= {f"k3lab / fla {how}": row[f"k3lab {how}_ms"] / row[f"fla {how}_ms"] for how in ("call", "wall", "graph")}
    row["k3lab / floor"] = row["k3lab graph_ms"] / row["floor_ms"]
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def mixed() -> tuple[int, list, list]:
    """128 decodes and a prefill of 4,096 tokens by the split route: two calls of ours, two of fla's, on slices of one batch."""
    both = call_of((1,) * DECODES + (PREFILL,))
    first, _ = both.select(list(range(DECODES)))
    tail, _ = both.select([DECODES])
    pool = torch.cat([torch.zeros_like(both.initial_state[:1]), both.initial_state])
    slots = torch.arange(1, DECODES + 1, device="cuda", dtype=torch.int32)
    ours, theirs = (decode(first, pool, slots), chunk(tail)), (fla_decode(first, pool[1 : DECODES + 1]), fla_chunk(tail))
    return floor_bytes(both), [lambda: [f() for f in ours]], [lambda: [f() for f in theirs]]


def kernel_times(calls: dict[str, Callable[[], object]], repeats: int = 10) -> list[dict]:
    """Milliseconds of every kernel of one call, from torch's profiler."""
    rows = []
    for who, call in calls.items():
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
        for e in sorted(profile.key_averages(), key=lambda e: -e.device_time_total):
            if e.device_time_total:
                rows.append({"of": who, "kernel": e.key[:70], "launches": e.count / repeats, "ms": e.device_time_total / repeats / 1e3})
    return rows


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes allocated at the peak of a call, results included, inputs not."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def sweep() -> list[dict]:
    """Graph milliseconds of the chunk forward and of 128 decodes with one configuration changed."""
    from triton.runtime.errors import OutOfResources

    from k3lab.kda import triton_fused, triton_recurrent

    call, rows = tiled(LONG, decodes=False), []
    unbounded = replace(call, lower_bound=None)  # what the kernel `chunk` is for
    jobs = [(name, c) for name, configs in triton_fused.CONFIGS.items() for c in configs]
    jobs += [("recurrent", c) for c in triton_recurrent.CONFIGS]
    for i, (name, config) in enumerate(jobs):
        print(f"\rsweep {i + 1}/{len(jobs)}   ", end="", file=sys.stderr)
        default = config == (triton_recurrent.DEFAULT if name == "recurrent" else triton_fused.DEFAULTS[name])
        whole = unbounded if name == "chunk" else call
        calls = decodes(DECODES, config)[1] if name == "recurrent" else [chunk(whole, configs={name: config})] * 8
        try:
            rows.append({"kernel": name, **config, "default": default, "graph_ms": attn_res.graph_ms(calls)})
        except OutOfResources:
            continue
    print(file=sys.stderr)
    return rows


def targets(r: dict) -> list[dict]:
    """What was to be reached, and the ratios of this run with launch overhead ("call") and without ("graph")."""
    rows = []
    for x in r["times"]:
        if "decodes, recurrent" in x["what"]:
            rows.append((x["what"], "floor", 1.3, x["k3lab call_ms"] / x["floor_ms"], x["k3lab / floor"]))
        else:
            rows.append((x["what"], "fla-core", 0.4, x["k3lab / fla call"], x["k3lab / fla graph"]))
    for x in r["attn_res"]:
        what = f"AttnRes {x['form']}, {x['tokens']} tokens"
        if x["tokens"] == 4096:
            rows.append((what, "floor", 1.2, x["k3lab call_ms"] / x["floor_ms"], x["k3lab / floor"]))
        else:
            rows.append((what, "fla-core", 0.5, x["k3lab / fla call"], x["k3lab / fla graph"]))
    memory = r["peak_bytes"]["k3lab"] / r["peak_bytes"]["fla"]
    rows.append((f"peak memory of the chunk forward, {LONG} tokens", "fla-core", 1.0, memory, memory))
    return [dict(zip(("what", "against", "at most", "call", "graph"), row, strict=True)) for row in rows]


def summary(r: dict) -> pd.DataFrame:
    """Milliseconds and what was aimed at, a row to a target: what the README shows. Bold: missed. Called is wall clock."""

    def ratio(x: float, most: float) -> str:
        return f"{x:.2f}" if x <= most else f"**{x:.2f}**"

    rows = []
    for t, row in zip(r["targets"], [*r["times"], *r["attn_res"]], strict=False):
        called = row["k3lab / fla wall"] if t["against"] == "fla-core" else row["k3lab wall_ms"] / row["floor_ms"]
        times = {
            f"{name}, graph / called": f"{row[f'{who} graph_ms']:.3g} / {row[f'{who} wall_ms']:.3g}"
            for who, name in (("k3lab", "k3lab"), ("fla", "fla-core"))
        }
        reached = {"in a graph": ratio(t["graph"], t["at most"]), "called": ratio(called, t["at most"])}
        rows.append(
            {
                "what": t["what"].replace(", 1 tokens", ", 1 token"),
                **times,
                "floor": f"{row['floor_ms']:.2g}",
                "aim": f"{t['at most']} of {t['against']}",
                **reached,
            }
        )
    return pd.DataFrame(rows)


def measure(with_sweep: bool) -> dict:
    start = time.perf_counter()

    def stage(name: str) -> None:
        print(f"[{time.perf_counter() - start:5.0f} s] {name}", file=sys.stderr, flush=True)

    stage("accuracy")
    r: dict = {"provenance": provenance(), "sources": {name: sha256(PACKAGE / name) for name in SOURCES}}
    r["accuracy"] = accuracy() + attn_res.accuracy()
    bandwidth = copy_bandwidth()
    r["copy_bandwidth_GB_s"] = bandwidth / 1e9
    stage("times")
    call = tiled(LONG, decodes=False)
    r["times"] = [row_of({"what": f"chunk forward, {LONG} tokens"}, floor_bytes(call), bandwidth, [chunk(call)], [fla_chunk(call)])]
    size, ours, theirs = mixed()
    r["times"].append(row_of({"what": f"{DECODES} decodes + {PREFILL} tokens, split route"}, size, bandwidth, ours, theirs))
    for n in (128, 1024):
        one, ours, theirs = decodes(n)
        r["times"].append(row_of({"what": f"{n} decodes, recurrent"}, floor_bytes(one), bandwidth, ours, theirs))
    r["attn_res"] = attn_res.compare(bandwidth)
    stage("kernels and memory")
    both = {"k3lab": chunk(call), "fla": fla_chunk(call)}
    r["kernels"] = kernel_times(both)
    r["peak_bytes"] = {who: peak_bytes(f) for who, f in both.items()}
    short = call_of((1,) * DECODES)  # each takes a whole tile
    r["peak_bytes_short"] = {who: peak_bytes(f) for who, f in {"k3lab": chunk(short), "fla": fla_chunk(short)}.items()}
    stage("growth")
    r["growth_tokens"], r["growth_decodes"] = [], []
    for n in TOKENS:
        call = tiled(n, decodes=False)
        r["growth_tokens"].append(row_of({"tokens": n}, floor_bytes(call), bandwidth, [chunk(call)], [fla_chunk(call)]))
    for n in SEQUENCES:
        call, ours, theirs = decodes(n)
        r["growth_decodes"].append(row_of({"decodes": n}, floor_bytes(call), bandwidth, ours, theirs))
        del call, ours, theirs
    if with_sweep:
        stage("sweep")
        r["configs"] = sweep()
    r["targets"] = targets(r)
    stage("done")
    return r


def card(name: str, r: dict, command: str) -> str:
    """The data card of a result, every number out of the record."""
    from k3lab.figures import markdown_table

    what = (
        f"k3lab's kernels beside fla-core on one GPU: {HEADS} heads of {DIM}, bfloat16, milliseconds, median; call: do_bench of the Python "
        f"call; wall: back-to-back calls; graph: CUDA graph; floor: bytes over the copy bandwidth of the run, "
        f"{r['copy_bandwidth_GB_s']:.0f} GB/s, and k3lab / floor is of the graph; AttnRes: hidden {attn_res.HIDDEN}, "
        f"{attn_res.BLOCKS} blocks and the prefix"
    )
    made_on = " · ".join(f"{k} {v}" for k, v in r["provenance"].items())
    rows = {"what": what, "made by": f"`{command}`", "made on": made_on, "licence": "this project's"}
    frames = {
        "Targets; ratios at most": "targets", "Times": "times", "AttnRes": "attn_res", "Kernels of the chunk forward, ms a call": "kernels",
        "Chunk forward, one sequence": "growth_tokens", "Recurrent decode": "growth_decodes", "Launch configurations": "configs",
        "Errors against float64, by the budget rule of k3lab/testing.py": "accuracy",
    }  # fmt: skip
    if "sources" in r:
        rows["sha256 of k3lab/"] = " · ".join(f"{k} `{v}`" for k, v in r["sources"].items())
    head = "\n".join(f"| {k} | {v} |" for k, v in rows.items())
    peak = {k: ", ".join(f"{who} {b / 1e6:.0f} MB" for who, b in r[k].items()) for k in ("peak_bytes", "peak_bytes_short") if k in r}
    memory = f"; of {DECODES} sequences of one token: ".join(peak.values())
    body = "\n\n".join(f"{title}:\n\n{markdown_table(pd.DataFrame(r[key]))}" for title, key in frames.items() if key in r)
    return f"# {name}\n\n| | |\n|---|---|\n{head}\n\nPeak memory of the chunk forward at {LONG} tokens: {memory}.\n\n{body}\n"


def figure(r: dict) -> tuple:
    """How time grows with tokens and with decodes, beside fla-core and the floor; and its numbers."""
    from k3lab import figures

    of = r["provenance"]
    tokens, many = pd.DataFrame(r["growth_tokens"]), pd.DataFrame(r["growth_decodes"])
    chunks, steps = (f"{x.min():.2f} to {x.max():.2f}" for x in (tokens["k3lab / fla graph"], many["k3lab / fla graph"]))
    finding = (
        f"In a graph, {tokens['tokens'].min()} to {tokens['tokens'].max():,} tokens take {chunks} of fla-core's time, "
        f"{many['decodes'].min()} to {many['decodes'].max():,} decodes {steps}"
    )
    ran = (
        f"{HEADS} heads of {DIM}, bfloat16; measured on one {of['device']}, torch {of['torch']}, Triton {of['triton']}, "
        f"fla-core {of['fla-core']}; floor: bytes over {r['copy_bandwidth_GB_s']:.0f} GB/s"
    )
    fig, axes = figures.new(finding, ran, size=(7.5, 3.6), ncols=2)
    lines = {
        "k3lab wall_ms": "k3lab, called",
        "k3lab graph_ms": "k3lab, graph",
        "fla wall_ms": "fla-core, called",
        "fla graph_ms": "fla-core, graph",
    }
    for ax, frame, name, kernel in ((axes[0], tokens, "tokens", "chunk forward"), (axes[1], many, "decodes", "recurrent decode")):
        for i, (column, label) in enumerate(lines.items()):
            figures.plot(ax, i, frame[name], frame[column], label=label)
        figures.plot(ax, 7, frame[name], frame["floor_ms"], label="memory floor")
        ax.set_xscale("log", base=2)
        ax.set(yscale="log", xlabel="tokens of one sequence" if name == "tokens" else "sequences of one token", ylabel="milliseconds")
        ax.set_title(kernel, loc="left")
    axes[0].legend()
    for text in fig.texts:
        if text.get_gid() == "provenance":
            text.set_text(f"drawn with {text.get_text()}")
    return fig, pd.concat([tokens.assign(kernel="chunk"), many.assign(kernel="recurrent")], ignore_index=True)


def draw(path: Path) -> None:
    """The curves of a result beside it, its summary printed. Raises BadInput for another file; then nothing is written."""
    from k3lab import figures

    try:
        r = json.loads(path.read_text())
        (fig, frame), table = figure(r), figures.markdown_table(summary(r))
    except (OSError, ValueError, LookupError, TypeError) as e:
        why = f"it lacks {e}" if isinstance(e, KeyError) else str(e)
        raise BadInput(f"--draw {path}: is not a result of this script: {why}; give a file that --out wrote") from e
    made = figures.export(fig, frame, "h200_growth", reproduce=f"python bench/h200.py --draw {path}")
    picture = next(p for p in made if p.suffix == ".png").read_bytes()
    print(*made, *write_files(path.parent, {path.with_suffix(".png").name: picture}), sep="\n")
    print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time every launch configuration as well")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write everything as JSON, and a card beside it")
    parser.add_argument("--draw", type=Path, metavar="FILE.json", help="draw the curves of a result beside it and print its summary")
    args = parser.parse_args()
    if args.draw:
        if args.sweep or args.out:
            parser.error("--draw measures nothing: leave out --sweep and --out")
        try:
            draw(args.draw)
        except BadInput as e:
            parser.error(str(e))
        return
    # before minutes of measuring, not after them
    if args.out and (args.out.suffix != ".json" or not args.out.parent.is_dir()):
        parser.error(f"--out {args.out}: expected a name that ends in .json in a folder that exists")
    if not torch.cuda.is_available():
        parser.error("no CUDA or ROCm device is visible")
    if provenance()["fla-core"] == "not installed":
        parser.error("fla-core, which is timed beside ours, is not installed: pip install fla-core")
    print(" · ".join(f"{k} {v}" for k, v in provenance().items()))
    with torch.no_grad():
        r = measure(args.sweep)
    print(pd.DataFrame(r["kernels"]).to_string(index=False))
    print(pd.DataFrame(r["targets"]).round(3).to_string(index=False))
    if args.out:
        command = f"python bench/h200.py{' --sweep' if args.sweep else ''} --out {args.out.name}"
        files = {args.out.name: json.dumps(r, indent=1) + "\n", args.out.with_suffix(".md").name: card(args.out.name, r, command)}
        write_files(args.out.parent, files)


if __name__ == "__main__":
    main()
