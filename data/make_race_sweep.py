"""Make data/race_sweep.jsonl and its card: the planted race and recompute_w_u, run again and again on a GPU.

PYTHONPATH=. python3 data/make_race_sweep.py --out data --budget 150

In this order, until --budget seconds are over (what is left then is rows that say "skipped: budget"; run it again to fill them):
the planted copy and its twin over the grid ladder; compute-sanitizer's racecheck on both, at the same time; recompute_w_u at 9
configs x padding undefined and zero x (4,096 tokens and 128 sequences of length 1; a capture); the same over a size ladder.
A run that was stopped goes on where it was; delete the journal to start again.
"""

import argparse
import hashlib
import inspect
import json
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from k3lab.figures import markdown_table
from k3lab.kda.triton_chunk import recompute_w_u_fwd_kernel
from k3lab.provenance import sha256
from k3lab.races.planted import racecheck, tile_copy_kernel
from k3lab.races.sweep import PLANTED_GRIDS, Case, append_row, here, planted_cases, read_journal, run_sweep, stage_cases
from k3lab.races.sweep_targets import capture_input, random_input, size_ladder
from k3lab.races.verdicts import RACECHECK, config_name, judge
from k3lab.tiny.cards import write_text

HERE = Path(__file__).parent
CAPTURE = HERE / "captures" / "mixed_128_decodes.safetensors"
RESERVE = 25.0  # seconds of the budget kept for a row in progress at its end, and for the card
PLANTED_RUNS, RUNS = 20, 50


def racecheck_rows(journal: Path, where: dict, timeout: float) -> None:
    """compute-sanitizer on both planted kernels at 8 workgroups, both at once, appended as they come."""

    def one(kernel: str) -> None:
        got = racecheck(kernel, 8, 4, timeout)
        row = {
            "key": f"racecheck {kernel} {where['device']} triton {where['triton']}", "kernel": kernel, "config": {"num_warps": 4},
            "input": "8 workgroups", "fill": RACECHECK, "runs": 1, "load": False, "where": where, "error": "",
        }  # fmt: skip
        if got["status"] != "ok":
            got["error"] = got["text"]
        append_row(journal, row | got)

    threads = [threading.Thread(target=one, args=(k,)) for k in ("planted_faulty", "planted_correct")]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def source_sha(kernel: object) -> str:
    """sha256 of a kernel function's source, 16 digits: what ran, whatever else its file held."""
    return hashlib.sha256(inspect.getsource(kernel.fn).encode()).hexdigest()[:16]


def card(rows: list[dict], data: bytes, seconds: float, python: str) -> str:
    """The data card, every number out of the rows."""
    where, verdicts = rows[0]["where"], judge(rows)
    verdicts["rate excluded"] = [f"{r:.2%}" if r == r else "" for r in verdicts["excluded_rate"].astype(float)]
    planted = verdicts[verdicts["kernel"].str.startswith("planted")]
    rest = verdicts[~verdicts["kernel"].str.startswith("planted")]
    checks = [r for r in rows if r["fill"] == RACECHECK]
    said = [f"- racecheck of {r['kernel']} (8 workgroups, 4 warps): {r.get('text') or r['status']}" for r in checks]
    counts = verdicts.groupby(["kernel", "verdict"], sort=False).size().reset_index(name="cases")
    columns = ["config", "input", "verdict", "runs", "distinct", "outside", "big", "nonfinite"]
    return f"""# race_sweep.jsonl

- What: repeated launches on identical inputs (k3lab.races.sweep), {len(rows)} rows, one per (kernel, config, input, fill): outputs were
  filled with NaN or with zeros first. {PLANTED_RUNS} runs a row for the planted copies, {RUNS} for recompute_w_u; 12 heads, K = V = 128,
  bfloat16 (the capture: its one head). Several configs ran at a time on the one GPU.
- Device: {where["device"]}; Triton {where["triton"]}, torch {where["torch"]}, k3lab {where["k3lab"]}, Python {python}.
  Nothing here ran on an AMD card.
- Made by: data/make_race_sweep.py in {seconds:.0f} s; inputs from fixed seeds, and {CAPTURE.name}
  (sha256 {sha256(CAPTURE)[:16]}). Source of the kernel functions: recompute_w_u_fwd_kernel sha256 {source_sha(recompute_w_u_fwd_kernel)},
  tile_copy_kernel sha256 {source_sha(tile_copy_kernel)}.
- Licence: this repository's; no third-party data.
- Size: {len(data)} bytes; sha256 {hashlib.sha256(data).hexdigest()}

k3lab.races.verdicts.judge reads the rows. runs counts both fills, distinct the results at one of them; outside is the elements outside
the float64 budget, big those above 1e30, each in the worst run; rate excluded is the rate of deviation that so many equal runs rule out
with 95% confidence.

## Verdicts

{markdown_table(counts)}

## The planted copy and its twin

Their shared memory was filled with a fixed pattern before every launch (k3lab/races/planted.py says why).

{markdown_table(planted[["kernel", *columns, "racecheck"]]) if len(planted) else "not run"}

{chr(10).join(said) or "racecheck was not run"}

## recompute_w_u

{markdown_table(rest[[*columns, "rate excluded"]]) if len(rest) else "not run"}
"""


def publish(journal: Path, seconds: float, python: str = platform.python_version()) -> None:
    """Put the rows into one order, whatever the order of arrival, and write the card beside them."""
    rows = read_journal(journal)
    order = {name: n for n, name in enumerate(dict.fromkeys(r["input"] for r in rows))}
    rows.sort(key=lambda r: (r["kernel"], order[r["input"]], config_name(r["config"]), r["fill"]))
    data = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows)
    write_text(journal, data)
    write_text(journal.with_suffix(".md"), card(rows, data.encode(), seconds, python).rstrip() + "\n")


def main() -> None:
    start = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for everything (default: 150)")
    parser.add_argument("--jobs", type=int, default=5, help="configs at a time (default: 5)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    journal = args.out / "race_sweep.jsonl"
    where = here()
    if where["device"] == "cpu":
        raise SystemExit("make_race_sweep: no GPU is visible; these rows can only be made on one")
    deadline = start + args.budget - RESERVE

    def say(words: str) -> None:
        print(f"[{time.time() - start:6.1f} s] {words}", file=sys.stderr, flush=True)

    def part(name: str, cases: Callable[[], list[Case]], runs: int) -> None:
        say(f"{name}: begins")
        try:
            rows = run_sweep(cases(), runs, journal, jobs=args.jobs, timeout=45, deadline=deadline, where=where)
            say(f"{name}: {json.dumps(judge(rows)['verdict'].value_counts().to_dict())}")
        except Exception:  # whatever fails, the other parts still run: device time is short, and the traceback is printed
            say(f"{name}: failed\n{traceback.format_exc()}")

    checks = threading.Thread(target=racecheck_rows, args=(journal, where, max(10.0, min(60.0, args.budget - RESERVE - 20))))
    checks.start()
    mixed = random_input([1] * 128 + [4096], name="128 x 1 + 4096 tokens", seed=1)
    both = ("undefined", "zero")
    part("planted", lambda: planted_cases(PLANTED_GRIDS[:-1]) + planted_cases(PLANTED_GRIDS[-1:], (4,)), PLANTED_RUNS)
    part("recompute_w_u", lambda: stage_cases("recompute_w_u", [mixed, capture_input(CAPTURE)], both), RUNS)
    part("size ladder", lambda: stage_cases("recompute_w_u", size_ladder(seed=2)), RUNS)
    checks.join()
    publish(journal, time.time() - start)
    say(f"done: {journal} and its card")


if __name__ == "__main__":
    main()
