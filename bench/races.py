"""Benchmark of the race analysis: python bench/races.py [--toolchain VERSION] [--out FILE.json]

1. The 9 configs x pointer_range on, off x 4 inputs of recompute_w_u_fwd_kernel for gfx950, compiled from nothing and analysed,
   on two processes: wall time and peak memory of any process.
2. Time of the analysis per (config, input), warm: median and worst.
3. Positive controls: every barrier and wait of every build that is ordered (9 configs x pointer_range on, and x other = 0 with
   pointer_range off) removed or weakened, one at a time: the share reported as a race, and a class for each silent one.

No GPU is used. Versions and device stand above the tables.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections import Counter
from importlib.metadata import version

import pandas as pd

from k3lab.figures import markdown_table
from k3lab.races.compiled import compile_builds
from k3lab.races.controls import REPORTED, mutation_sweep
from k3lab.races.kernel import load_kernel, standard_input
from k3lab.races.lds import analyse
from k3lab.races.matrix import INPUTS, matrix_builds, rows_of


def sweep_controls(kernels: dict, builds: list) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Outcome of every mutant by kind of change, and the builds that were left out because they are not ordered as built."""
    frames, skipped = [], Counter()
    for b in builds:
        kernel = kernels[id(b)]
        verdicts = {r.verdict for r in analyse(kernel, list(INPUTS))}
        if "race" in verdicts or "error" in verdicts:
            skipped[f"{'pointer_range' if b.pointer_range else 'no pointer_range'}"] += 1
            continue
        rows = mutation_sweep(kernel, INPUTS)
        frames.append(rows.assign(config=f"w{b.num_warps}s{b.num_stages}", pointer_range=b.pointer_range))
    rows = pd.concat(frames)
    table = rows.groupby(["pointer_range", "change", "outcome"]).size().unstack(fill_value=0)
    table["mutants"] = table.sum(axis=1)
    table["share reported"] = table[REPORTED] / table["mutants"]
    return table, pd.DataFrame(sorted(skipped.items()), columns=["specialisation", "builds left out, racy as built"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toolchain", default="installed")
    parser.add_argument("--out", help="write the numbers as JSON")
    args = parser.parse_args()
    versions = {"device": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
                "triton": args.toolchain if args.toolchain != "installed" else version("triton"), "numpy": version("numpy")}  # fmt: skip
    print(", ".join(f"{k} {v}" for k, v in versions.items()))

    with tempfile.TemporaryDirectory(prefix="k3lab-bench-") as scratch:
        os.environ["K3LAB_ARTEFACTS"] = scratch
        builds = matrix_builds([args.toolchain], ["hip:gfx950"], (True, False), (True,), ("undefined",))
        start = time.perf_counter()
        compiled = compile_builds(builds, jobs=2)
        compiling = time.perf_counter() - start
        rows = [row for c in compiled for row in rows_of(c, INPUTS)]
        total = time.perf_counter() - start
        zero = matrix_builds([args.toolchain], ["hip:gfx950"], (False,), (True,), ("zero",))
        kernels = {id(c.build): load_kernel(c.folder / "kernel.amdgcn") for c in [*compiled, *compile_builds(zero, jobs=2)]}

    seconds = []
    for c in compiled:
        kernel = kernels[id(c.build)]
        for given in INPUTS:
            start = time.perf_counter()
            analyse(kernel, [standard_input(kernel, given)])
            seconds.append(time.perf_counter() - start)
    memory = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20
    numbers = {
        "compile 18 builds, s": compiling,
        "compile and analyse 72 rows, s": total,
        "analysis per (config, input), median s": statistics.median(seconds),
        "analysis per (config, input), worst s": max(seconds),
        "peak memory of one process, GiB": memory,
    }
    print(markdown_table(pd.DataFrame(numbers.items(), columns=["what", "value"])))
    print(f"\nverdicts: {dict(Counter(r['verdict'] for r in rows))}")

    start = time.perf_counter()
    chosen = [b for b in builds if b.pointer_range] + zero
    table, skipped = sweep_controls(kernels, chosen)
    print(f"\ncontrols, {time.perf_counter() - start:.0f} s")
    print(markdown_table(table.reset_index()))
    if len(skipped):
        print("\n" + markdown_table(skipped))
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"versions": versions, "numbers": numbers, "controls": table.reset_index().to_dict("records")}, file, indent=1)


if __name__ == "__main__":
    main()
