"""Benchmark of the torch stages on a CPU: python bench/kda.py --cpu [--repeats N] [--out FILE.json]

One replay of the six torch stages at the Kimi-K3 TP8 shape (4,096 tokens, 12 heads, 128 decodes + one prefill) on two threads, with
its peak memory. The Triton kernels on a GPU, beside fla-core: bench/h200.py.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import torch

from k3lab.kda import stages
from k3lab.shapes import KIMI_K3_TP8
from k3lab.testing import random_call

HEADS, DIM = KIMI_K3_TP8.num_heads, KIMI_K3_TP8.head_dim


def provenance() -> dict[str, str]:
    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.processor() or platform.machine()}"
    packages = {name: of(name) for name in ("torch", "triton", "fla-core")}
    return {"device": device, **packages, "python": platform.python_version()}


def copy_bandwidth() -> float:
    """Bytes per second moved (read + write) by a 1 GiB device copy."""
    from triton.testing import do_bench

    a = torch.empty(2**28, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / (do_bench(lambda: b.copy_(a), return_mode="median") * 1e-3)


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
    parser.add_argument("--cpu", action="store_true", required=True, help="time the torch stages on two CPU threads")
    parser.add_argument("--repeats", type=int, default=3, help="replays")
    parser.add_argument("--out", type=Path, help="write everything as JSON, and a card beside it")
    args = parser.parse_args()
    print(" · ".join(f"{k} {v}" for k, v in provenance().items()))
    result = cpu(args.repeats)
    if args.out:
        partial = args.out.with_name(args.out.name + ".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(partial, args.out)
        args.out.with_suffix(".md").write_text(card(args.out.name, result, f"python bench/kda.py --cpu --out {args.out.name}"))


if __name__ == "__main__":
    main()
