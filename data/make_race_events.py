"""Make data/race_events.jsonl and its card: the events of tile v in LDS for every config of the race matrix, no GPU involved.

python data/make_race_events.py            needs: python -m k3lab toolchain add 3.6.0 (and 3.8.0, 3.9.0); about 2 minutes on 2 cores
"""

import argparse
import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import joblib
from tqdm import tqdm

from k3lab.race_figures import timeline
from k3lab.races.compiled import Build, compile_builds
from k3lab.races.events import pack
from k3lab.races.matrix import CONFIGS, INPUTS, KEYS, matrix_builds, rows_of
from k3lab.races.toolchain import INSTALLED

HERE = Path(__file__).parent
KERNEL = HERE.parent / "k3lab" / "kda" / "triton_chunk.py"
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
TILE = "v"  # the tile of every hazard of the matrix


def events(builds: list[Build]) -> list[dict]:
    """One row per (build, input): keys and verdict as in the matrix, then the events."""
    out = []
    for compiled in compile_builds(builds):
        kernel = compiled.kernel()
        for row in rows_of(compiled, INPUTS):
            frame = timeline(kernel, row["input"], f"w{row['warps']}s{row['stages']}", TILE).frame
            out.append({k: row[k] for k in (*KEYS, "verdict")} | {"tile": TILE} | pack(frame))
    return out


def card(rows: list[dict], data: bytes) -> str:
    kernel = hashlib.sha256(KERNEL.read_bytes()).hexdigest()
    return f"""# race_events.jsonl

- What: copies, waits, barriers and reads of tile {TILE} in LDS for each wave of one workgroup of recompute_w_u_fwd_kernel, as
  race_figures.timeline reads them from compiled code; {len(rows)} rows, one per (build, input).
- Axes: Triton {", ".join(TRITONS)} x hip:gfx950 x async copy on x pointer_range on, off x padding undefined, zero x warps 2, 4, 8 x
  stages 2, 3, 4 x inputs {", ".join(INPUTS)}. Every race and uninitialised read of race_matrix.jsonl
  on this target touches tile {TILE}.
- Source: k3lab/kda/triton_chunk.py, sha256 {kernel[:16]}, cross-compiled. Nothing ran on an AMD card; the marks rest on the
  assumptions in k3lab.races.lds.ASSUMPTIONS.
- Made by: data/make_race_events.py; no randomness. Line numbers are lines of that build's assembly, as in race_matrix.jsonl.
- Versions: k3lab {version("k3lab")}, torch {version("torch")}, numpy {version("numpy")}, Python {platform.python_version()}.
- Licence: this repository's; no third-party data.
- Size: {len(data)} bytes; sha256 {hashlib.sha256(data).hexdigest()}

Keys of a row: {" ".join(KEYS)};
verdict, as in race_matrix.jsonl; tile; rows and events, as k3lab/races/events.py says.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "race_events.jsonl")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    chains = [INSTALLED if t == version("triton") else t for t in TRITONS]
    builds = matrix_builds(chains, ["hip:gfx950"], async_copy=(True,))
    groups = [builds[i : i + len(CONFIGS)] for i in range(0, len(builds), len(CONFIGS))]
    done = joblib.Parallel(n_jobs=args.jobs, return_as="generator_unordered")(joblib.delayed(events)(g) for g in groups)
    rows = [row for part in tqdm(done, total=len(groups), desc="race events", ascii=True) for row in part]
    # one order, whatever the order of arrival, so that two runs give the same bytes
    rows.sort(key=lambda r: [str(r[k]) for k in KEYS])
    data = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows).encode()
    for path, content in ((args.out, data), (args.out.with_suffix(".md"), card(rows, data).encode())):
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(content)
        os.replace(temporary, path)


if __name__ == "__main__":
    main()
