"""Make data/race_sweep.jsonl and its card: the planted race and recompute_w_u, run again and again on a GPU.

PYTHONPATH=. python3 data/make_race_sweep.py --out data --budget 150

In this order, until --budget seconds are over (what is left then is rows that say "skipped: budget"; run it again to fill them):
the planted copy and its twin over the grid ladder; compute-sanitizer's racecheck on both, at the same time; recompute_w_u at 9
configs x padding undefined and zero x (4,096 tokens and 128 sequences of length 1; a capture); the same over a size ladder.
A run that was stopped goes on where it was; delete the journal to start again.
"""

import argparse
import json
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from k3lab.provenance import commit, sha256
from k3lab.races.planted import racecheck
from k3lab.races.sweep import PLANTED_GRIDS, Case, append_row, here, planted_cases, read_journal, run_sweep, stage_cases
from k3lab.races.sweep_targets import capture_input, random_input, size_ladder
from k3lab.races.verdicts import RACECHECK, judge
from k3lab.tiny.cards import write_text

HERE = Path(__file__).parent
CAPTURE = HERE / "captures" / "mixed_128_decodes.safetensors"
KERNEL_FILES = ("k3lab/kda/triton_chunk.py", "k3lab/races/planted.py")
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


def table(frame, columns: list[str]) -> str:
    """A Markdown table of some columns."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join("" if r[c] is None else str(r[c]).replace("|", "/") for c in columns) + " |" for _, r in frame.iterrows()]
    return "\n".join(lines)


def card(journal: Path, where: dict, seconds: float) -> str:
    """The data card, every number out of the rows."""
    rows = read_journal(journal)
    verdicts = judge(rows)
    planted = verdicts[verdicts["kernel"].str.startswith("planted")]
    rest = verdicts[~verdicts["kernel"].str.startswith("planted")]
    checks = [
        f"- racecheck of {r['kernel']} (8 workgroups, 4 warps): {r.get('text') or r['status']}" for r in rows if r["fill"] == RACECHECK
    ]
    files = "\n".join(f"- {f} sha256 {sha256(HERE.parent / f)[:16]}" for f in KERNEL_FILES)
    counts = verdicts.groupby(["kernel", "verdict"], sort=False).size().reset_index(name="cases")
    short = ["kernel", "config", "input", "verdict", "runs", "distinct", "outside", "big", "nonfinite"]
    return f"""# race_sweep.jsonl

- What: repeated launches on identical inputs (k3lab.races.sweep), {len(rows)} rows, one per (kernel, config, input, fill): outputs were
  filled with NaN or with zeros first. {PLANTED_RUNS} runs a row for the planted copies, {RUNS} for recompute_w_u; 12 heads, K = V = 128,
  bfloat16 (the capture: its one head). Several configs ran at a time on the one GPU.
- Device: {where["device"]}; Triton {where["triton"]}, torch {where["torch"]}, k3lab {where["k3lab"]} at {commit()},
  Python {platform.python_version()}. Nothing here ran on an AMD card.
- Made by: data/make_race_sweep.py in {seconds:.0f} s (this run of it); inputs from fixed seeds, and {CAPTURE.name}
  (sha256 {sha256(CAPTURE)[:16]}).
{files}
- Licence: this repository's; no third-party data.
- Size: {journal.stat().st_size} bytes; sha256 {sha256(journal)}

The planted kernels' shared memory was filled with a fixed pattern before every launch (see k3lab/races/planted.py).

## Verdicts

{table(counts, ["kernel", "verdict", "cases"])}

## The planted copy and its twin

{table(planted, [*short, "racecheck"]) if len(planted) else "not run"}

{chr(10).join(checks) or "racecheck was not run"}

## recompute_w_u

{table(rest, [*short, "excluded_rate"]) if len(rest) else "not run"}
"""


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
        try:  # one part that fails must not take the others with it
            rows = run_sweep(cases(), runs, journal, jobs=args.jobs, timeout=45, deadline=deadline, where=where)
            say(f"{name}: {json.dumps(judge(rows)['verdict'].value_counts().to_dict())}")
        except Exception:
            say(f"{name}: failed\n{traceback.format_exc()}")

    checks = threading.Thread(target=racecheck_rows, args=(journal, where, max(10.0, min(60.0, args.budget - RESERVE - 20))))
    checks.start()
    mixed = random_input([1] * 128 + [4096], name="128 x 1 + 4096 tokens", seed=1)
    both = ("undefined", "zero")
    part("planted", lambda: planted_cases(PLANTED_GRIDS[:-1]) + planted_cases(PLANTED_GRIDS[-1:], (4,)), PLANTED_RUNS)
    part("recompute_w_u", lambda: stage_cases("recompute_w_u", [mixed, capture_input(CAPTURE)], both), RUNS)
    part("size ladder", lambda: stage_cases("recompute_w_u", size_ladder(seed=2)), RUNS)
    checks.join()
    write_text(args.out / "race_sweep.md", card(journal, where, time.time() - start).rstrip() + "\n")
    say(f"done: {journal} and its card")


if __name__ == "__main__":
    main()
