"""Make data/race_controls.csv and its card: the mutation sweep over every ordered build of recompute_w_u_fwd_kernel, no GPU involved.

python data/make_race_controls.py            about 2 minutes
"""

import argparse
import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import joblib
import pandas as pd

from k3lab.figures import markdown_table
from k3lab.race_figures import controls_counts
from k3lab.races.compiled import Compiled, compile_builds
from k3lab.races.controls import REPORTED, mutation_sweep
from k3lab.races.lds import analyse
from k3lab.races.matrix import INPUTS, matrix_builds

HERE = Path(__file__).parent
KERNEL = HERE.parent / "k3lab" / "kda" / "triton_chunk.py"


def sweep(compiled: Compiled) -> pd.DataFrame | None:
    """Outcomes of one build's mutants by change; None if the build races as it is."""
    kernel, b = compiled.kernel(), compiled.build
    if {r.verdict for r in analyse(kernel, list(INPUTS))} & {"race", "error"}:
        return None
    label = f"w{b.num_warps}s{b.num_stages}, pointer_range {'on' if b.pointer_range else 'off'}, {b.signature['PADDING']}"
    return controls_counts({label: mutation_sweep(kernel)})


def card(counts: pd.DataFrame, left_out: int, data: bytes) -> str:
    """The data card: source, how made, versions, sha256, and the totals by change."""
    table = counts.pivot_table(index="change", columns="outcome", values="mutants", aggfunc="sum", fill_value=0)
    table["mutants"] = table.sum(axis=1)
    table["share reported"] = table[REPORTED] / table["mutants"]
    kernel, mutants, built = hashlib.sha256(KERNEL.read_bytes()).hexdigest(), int(table["mutants"].sum()), counts["build"].nunique()
    return f"""# race_controls.csv

- What: positive controls of the LDS analysis. Every s_barrier of a build removed, every counter of every s_waitcnt removed or
  raised by one, one at a time, at the inputs {", ".join(INPUTS)}; {mutants} mutants of {built} builds.
- Builds: recompute_w_u_fwd_kernel, Triton {version("triton")}, gfx950, async copy on: 9 configs with pointer_range and undefined
  masked rows, 9 without pointer_range and with masked rows zero. {left_out} of the 18 race as built and are left out.
- Columns: build; change; outcome (reported: the analysis finds a race that the build does not have; else why it is silent:
  redundant barrier; guards registers: a register would be used before its load is back, which is no LDS hazard; nothing in
  flight: the wait finds nothing to wait for; redundant wait: no LDS access and no register comes out of order); mutants.
- Source: k3lab/kda/triton_chunk.py, sha256 {kernel[:16]}, cross-compiled. Nothing ran on an AMD card.
- Made by: data/make_race_controls.py; no randomness.
- Versions: k3lab {version("k3lab")}, torch {version("torch")}, numpy {version("numpy")}, Python {platform.python_version()}.
- Licence: this repository's; no third-party data.
- Size: {len(data)} bytes; sha256 {hashlib.sha256(data).hexdigest()}

## Over all builds

{markdown_table(table.reset_index())}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "race_controls.csv")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    builds = [
        *matrix_builds(["installed"], ["hip:gfx950"], (True,), (True,), ("undefined",)),
        *matrix_builds(["installed"], ["hip:gfx950"], (False,), (True,), ("zero",)),
    ]
    done = joblib.Parallel(n_jobs=args.jobs)(joblib.delayed(sweep)(c) for c in compile_builds(builds, args.jobs, progress=True))
    counts = pd.concat([d for d in done if d is not None], ignore_index=True)
    data = counts.to_csv(index=False, lineterminator="\n").encode()
    text = card(counts, sum(d is None for d in done), data)
    for path, content in ((args.out, data), (args.out.with_suffix(".md"), text.encode())):
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(content)
        os.replace(temporary, path)


if __name__ == "__main__":
    main()
