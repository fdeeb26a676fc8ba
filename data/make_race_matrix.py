"""Make data/race_matrix.jsonl and its card: compile and analyse the whole matrix on this machine, no GPU involved.

python data/make_race_matrix.py            needs: python -m k3lab toolchain add 3.6.0 (and 3.8.0, 3.9.0); about 10 minutes on 2 cores
A run that was stopped goes on where it was; delete the journal to start again.
"""

import argparse
import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from k3lab.figures import markdown_table
from k3lab.races.matrix import INPUTS, KEYS, matrix_builds, read_journal, run_matrix, verdict_table
from k3lab.races.toolchain import INSTALLED

HERE = Path(__file__).parent
KERNEL = HERE.parent / "k3lab" / "kda" / "triton_chunk.py"
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")


ROW = """Keys of a row: kernel triton target pointer_range async padding warps stages input; verdict (ordered, race, uninitialised,
error); path (how tiles reach LDS); race (racing pairs of instructions), uninitialised (reads), unread_copy, missing_copy
(counts, absent where 0); waits (for a race: each wait blamed, what it allows, the racing pairs left at each value tried, and
`enough`, the largest value that orders its own pairs); first_hazard (the first finding in words)."""


def card(rows: pd.DataFrame, data: bytes) -> str:
    """The data card: source, how made, versions, sha256, and the verdicts in a table."""
    kernel = hashlib.sha256(KERNEL.read_bytes()).hexdigest()
    worst = verdict_table(rows, by=("triton", "target", "async", "pointer_range", "padding"))
    return f"""# race_matrix.jsonl

- What: verdicts of the LDS analysis (k3lab.races.lds) on recompute_w_u_fwd_kernel, {len(rows)} rows, one per (build, input).
- Axes: Triton {", ".join(TRITONS)} x hip:gfx950, hip:gfx942 x async copy on, off x pointer_range on, off x padding undefined, zero
  x warps 2, 4, 8 x stages 2, 3, 4 x inputs {", ".join(INPUTS)}. Shape: 12 heads, K = V = 128, BT = BK = BV = 64, bf16.
- Source: k3lab/kda/triton_chunk.py, sha256 {kernel[:16]}, cross-compiled. Nothing ran on an AMD card; the verdicts rest on the
  assumptions in k3lab.races.lds.ASSUMPTIONS. Async copy where nobody sets it, as read in each version's AMD backend: off on
  gfx942 in all four; on gfx950 off in 3.6.0 and 3.7.1, on from 3.8.0.
- Made by: data/make_race_matrix.py; no randomness. Line numbers in a row are lines of that build's assembly.
- Versions: k3lab {version("k3lab")}, torch {version("torch")}, numpy {version("numpy")}, Python {platform.python_version()}.
- Licence: this repository's; no third-party data.
- Size: {len(data)} bytes; sha256 {hashlib.sha256(data).hexdigest()}

{ROW}

## Worst verdict over the four inputs

{markdown_table(worst.reset_index())}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "race_matrix.jsonl")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    chains = [INSTALLED if t == version("triton") else t for t in TRITONS]
    run_matrix(matrix_builds(chains), args.out, jobs=args.jobs)
    # one order, whatever the order of arrival, so that two runs give the same bytes
    rows = sorted(read_journal(args.out), key=lambda r: [str(r[k]) for k in KEYS])
    data = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows).encode()
    for path, content in ((args.out, data), (args.out.with_suffix(".md"), card(pd.DataFrame(rows), data).rstrip().encode() + b"\n")):
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(content)
        os.replace(temporary, path)


if __name__ == "__main__":
    main()
