"""Benchmark of the AttnRes kernel: python bench/attn_res.py [--sweep] [--out FILE.json]

On a GPU, hidden 7168, 8 blocks and the prefix, bfloat16, 1, 128 and 4,096 tokens, side by side with fla-core's fused_attnres in one
run, after both were judged against float64. "plain" is the mixture alone; "serving" adds the pending MLP output first (fla: a torch
add) and norms the mixture. Milliseconds, median:

    call    triton.testing.do_bench of the Python call (device time, L2 flushed; launch overhead shows where it is longer)
    wall    wall clock of back-to-back Python calls: the larger of host and device time
    graph   a CUDA graph of calls on different inputs, together larger than L2, divided by their number

The floor is the bytes an ideal kernel must move (every source read once, the result written once) over the copy bandwidth measured
in the same run. --sweep times every launch configuration: for information, nothing picks one from it.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from kda import copy_bandwidth, provenance  # bench/kda.py

from k3lab.attn_res.reference import attn_res_reference
from k3lab.shapes import KIMI_K3
from k3lab.testing import error_budget, random_sources

HIDDEN, BLOCKS, EPS = KIMI_K3.hidden, math.ceil(KIMI_K3.num_layers / KIMI_K3.attn_res_block), KIMI_K3.norm_eps
TOKENS = (1, 128, 4096)
COLD_BYTES = 200e6  # inputs of one graph, several times the L2 of the device
FORMS = ("plain", "serving")


def inputs(tokens: int, form: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict:
    serving = form == "serving"
    return random_sources(tokens, HIDDEN, BLOCKS, dtype, pending=serving, output_norm=serving, seed=seed, device="cuda")


def k3lab(x: dict, config: dict | None = None) -> Callable[[], torch.Tensor]:
    from k3lab.attn_res.triton_attn_res import attn_res_triton

    return lambda: attn_res_triton(**x, config=config).o


def fla(x: dict) -> Callable[[], torch.Tensor]:
    """fla's call on the same tensors; the list of its sources is made outside the call, but for the pending add."""
    from fla.ops.attnres import fused_attnres

    blocks, prefix, pending = list(x["bank"]), x["prefix"], x.get("pending")
    rest = (x["score_norm"], x.get("output_norm"), EPS)
    if pending is None:
        sources = [*blocks, prefix]
        return lambda: fused_attnres(x["score_proj"], sources, *rest)
    return lambda: fused_attnres(x["score_proj"], [*blocks, prefix + pending], *rest)


RUNS = {"k3lab": k3lab, "fla": fla, "fla gluon": fla}


def choose(name: str) -> Callable[[dict], Callable[[], torch.Tensor]]:
    """Switch fla-core's opt-in backend on or off, which it looks up in every call, and give what makes the call."""
    os.environ["FLA_ATTNRES_GLUON"] = str(int(name == "fla gluon"))
    return RUNS[name]


def accuracy() -> list[dict]:
    """All outputs against float64; ours must hold in the dtype that is timed: a fast wrong kernel is not a result."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1, 65, 128, 4096):
            for form in FORMS:
                x = inputs(tokens, form, dtype, seed=tokens)
                truth, low = attn_res_reference(**x).o, attn_res_reference(**x, dtype=torch.float32).o.to(dtype)
                for name in RUNS:
                    if name != "k3lab" and dtype != torch.bfloat16:
                        continue  # what is not timed against is not judged
                    b = error_budget(f"{name} {form} {tokens} {dtype}", choose(name)(x)(), truth, low, dtype)
                    print(("ok   " if b.ok else "OVER ") + str(b))
                    keep = ("error", "budget", "rms_error", "rms_budget", "ok")
                    rows.append({"what": b.name} | {k: getattr(b, k) for k in keep})
    if any(not r["ok"] for r in rows if r["what"].startswith("k3lab")):
        raise SystemExit("our own kernel is over the error budget; no times are given")
    return rows


def floor_bytes(x: dict) -> int:
    """Every source and weight read once; the result, and the new prefix where there is one, written once."""
    return sum(v.nbytes for v in x.values() if isinstance(v, torch.Tensor)) + x["prefix"].nbytes * (2 if "pending" in x else 1)


def graph_ms(calls: list[Callable[[], object]], replays: int = 20) -> float:
    """Median milliseconds of one of `calls` inside a graph of all of them; NaN where it cannot be captured."""
    for _ in range(3):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]
    except RuntimeError as e:
        print(f"not captured in a graph: {str(e).splitlines()[0]}", file=sys.stderr)
        return float("nan")
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(kept))
    return statistics.median(times)


def wall_ms(call: Callable[[], object], repeats: int = 200) -> float:
    """Milliseconds of wall clock per call, over `repeats` calls without a pause."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def copies(tokens: int, form: str) -> list[dict]:
    """As many input sets as are together larger than L2, at least 4 and at most 1,000; weights are shared, as in a model."""
    first = inputs(tokens, form)
    n = min(1000, max(4, math.ceil(COLD_BYTES / floor_bytes(first))))
    own = ("bank", "prefix", "pending")
    return [first, *({k: v.clone() if k in own else v for k, v in first.items()} for _ in range(n - 1))]


def compare(bandwidth: float) -> list[dict]:
    from triton.testing import do_bench

    rows = []
    for form in FORMS:
        for tokens in TOKENS:
            xs = copies(tokens, form)
            row = {"form": form, "tokens": tokens, "bytes": floor_bytes(xs[0]), "floor_ms": floor_bytes(xs[0]) / bandwidth * 1e3}
            for name in RUNS:
                calls = [choose(name)(x) for x in xs]
                row[f"{name} graph_ms"] = graph_ms(calls)
                row[f"{name} wall_ms"] = wall_ms(calls[0])
                row[f"{name} call_ms"] = do_bench(calls[0], return_mode="median")
            row["k3lab / floor"] = row["k3lab graph_ms"] / row["floor_ms"]
            row |= {f"k3lab / fla {how}": row[f"k3lab {how}_ms"] / row[f"fla {how}_ms"] for how in ("graph", "wall", "call")}
            rows.append(row)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


def sweep() -> Iterator[dict]:
    """Graph milliseconds of every configuration; those that do not fit the device are left out."""
    from triton.runtime.errors import OutOfResources

    from k3lab.attn_res.triton_attn_res import CONFIGS, default_config

    for form in FORMS:
        for tokens in TOKENS:
            xs = copies(tokens, form)
            default = default_config(tokens, HIDDEN, 2, BLOCKS)
            for i, config in enumerate(CONFIGS):
                print(f"\r{form} {tokens} tokens, config {i + 1}/{len(CONFIGS)}   ", end="", file=sys.stderr)
                try:
                    ms = graph_ms([k3lab(x, config) for x in xs])
                except OutOfResources:
                    continue
                yield {"form": form, "tokens": tokens, **config, "default": config == default, "graph_ms": ms}
    print(file=sys.stderr)


def card(name: str, r: dict, command: str) -> str:
    """The data card of a result, every number out of the record."""
    import pandas as pd

    from k3lab.figures import markdown_table

    what = (
        f"k3lab's AttnRes kernel beside fla-core's fused_attnres, hidden {HIDDEN}, {BLOCKS} blocks and the prefix, bfloat16, "
        "milliseconds, median; graph: a CUDA graph over inputs larger than L2; wall: wall clock of back-to-back Python calls; call: "
        f"do_bench of the Python call; floor: bytes over the copy bandwidth of the same run, {r['copy_bandwidth_GB_s']:.0f} GB/s"
    )
    made_on = " · ".join(f"{k} {v}" for k, v in r["provenance"].items())
    rows = {"what": what, "made by": f"`{command}`", "made on": made_on, "note": r.get("note"), "licence": "this project's"}
    errors = "Errors against float64, by the budget rule of k3lab/testing.py"
    tables = {"Times": pd.DataFrame(r["times"]), errors: pd.DataFrame(r["accuracy"])}
    if "configs" in r:
        best = pd.DataFrame(r["configs"]).sort_values(["form", "tokens", "graph_ms"]).groupby(["form", "tokens"]).head(5)
        tables["The five fastest launch configurations of each shape"] = best
    head = "\n".join(f"| {k} | {v} |" for k, v in rows.items() if v)
    body = "\n\n".join(f"{title}:\n\n{markdown_table(frame)}" for title, frame in tables.items())
    return f"# {name}\n\n| | |\n|---|---|\n{head}\n\n{body}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time every launch configuration as well")
    parser.add_argument("--out", type=Path, help="write everything as JSON, and a card beside it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA or ROCm device is visible")
    print(" · ".join(f"{k} {v}" for k, v in provenance().items()))
    command = f"python bench/attn_res.py{' --sweep' if args.sweep else ''}" + (f" --out {args.out.name}" if args.out else "")
    with torch.no_grad():
        result = {"provenance": provenance(), "accuracy": accuracy()}
        bandwidth = copy_bandwidth()
        result |= {"copy_bandwidth_GB_s": bandwidth / 1e9, "times": compare(bandwidth)}
        write(args.out, result, command)  # a sweep is long, and may be cut short
        if args.sweep:
            result["configs"] = list(sweep())
            for row in sorted(result["configs"], key=lambda r: (r["form"], r["tokens"], r["graph_ms"])):
                print(row)
            write(args.out, result, command)


def write(out: Path | None, result: dict, command: str) -> None:
    if out:
        partial = out.with_name(out.name + ".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(partial, out)
        out.with_suffix(".md").write_text(card(out.name, result, command))


if __name__ == "__main__":
    main()
