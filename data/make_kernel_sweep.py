"""Make data/kernel_sweep.jsonl and its card: every KDA kernel of the package at every launch configuration, run again and again on a GPU.

PYTHONPATH=. python3 data/make_kernel_sweep.py --out data --budget 200

200 launches a case, 100 with outputs filled with NaN first and 100 with zeros, on 128 decodes and a prefill of 4,096 tokens at 12 heads in
bfloat16, masked rows undefined. A run that was stopped goes on where it was. The rows are those of `python -m k3lab sweep --kernel NAME
--runs 100 --padding undefined --journal FILE`; --merge takes such journals instead of running anything.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from pathlib import Path

from k3lab.figures import markdown_table
from k3lab.provenance import sha256
from k3lab.races.sweep import append_row, here, read_journal, run_sweep, stage_cases
from k3lab.races.sweep_targets import KERNELS, random_input
from k3lab.races.verdicts import config_name, judge
from k3lab.tiny.cards import write_text

HERE = Path(__file__).parent
SOURCES = ("triton_ops.py", "triton_chunk.py", "triton_recurrent.py")
RUNS = 100


def card(rows: list[dict], data: bytes, python: str, how: str) -> str:
    """The data card, every number out of the rows."""
    where, verdicts = rows[0]["where"], judge(rows)
    verdicts["rate excluded"] = [f"{r:.2%}" if r == r else "" for r in verdicts["excluded_rate"].astype(float)]
    counts = verdicts.groupby(["kernel", "verdict"], sort=False).size().reset_index(name="configs")
    columns = ["kernel", "config", "verdict", "runs", "distinct", "outside", "big", "nonfinite", "rate excluded"]
    hashes = "\n".join(f"  - k3lab/kda/{name}: `{sha256(HERE.parent / 'k3lab' / 'kda' / name)}`" for name in SOURCES)
    return f"""# kernel_sweep.jsonl: every KDA kernel, every launch configuration, again and again

- What: repeated launches on identical inputs (k3lab.races.sweep), {len(rows)} rows, one per (kernel, config, fill), {RUNS} runs each, so
  {2 * RUNS} a config: outputs were filled with NaN or with zeros first. Input: {rows[0]["input"]}, 12 heads, K = V = 128, bfloat16, masked
  rows undefined. Several configs ran at a time on the one GPU.
- Device: {where["device"]}; Triton {where["triton"]}, torch {where["torch"]}, k3lab {where["k3lab"]}, Python {python}.
  Nothing here ran on an AMD card.
- Made by: {how}; inputs from fixed seeds. sha256 of the sources that the card was written beside:
{hashes}
- Not in it: the fused chunk forward (k3lab/kda/triton_fused.py) and the AttnRes kernel (k3lab/attn_res/triton_attn_res.py).
- Licence: this repository's; no third-party data.
- Size: {len(data)} bytes; sha256 {hashlib.sha256(data).hexdigest()}

k3lab.races.verdicts.judge reads the rows. runs counts both fills, distinct the results at one of them; outside is the elements outside
the float64 budget, big those above 1e30, each in the worst run; rate excluded is the rate of deviation that so many equal runs rule out
with 95% confidence. "no difference" is no proof of absence.

## Verdicts

{markdown_table(counts)}

## Every case

{markdown_table(verdicts[columns])}
"""


def publish(journal: Path, python: str, how: str) -> None:
    """Put the rows into one order, whatever the order of arrival, and write the card beside them."""
    rows = read_journal(journal)
    rows.sort(key=lambda r: (KERNELS.index(r["kernel"]), config_name(r["config"]), r["fill"]))
    data = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows)
    write_text(journal, data)
    write_text(journal.with_suffix(".md"), card(rows, data.encode(), python, how).rstrip() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for everything (default: 200)")
    parser.add_argument("--jobs", type=int, default=12, help="configs at a time (default: 12)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JOURNAL", help="take the rows of these, and run nothing")
    parser.add_argument("--python", default=platform.python_version(), help="with --merge: the Python that made the journals")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    journal = args.out / "kernel_sweep.jsonl"
    if args.merge:
        for row in [r for path in args.merge for r in read_journal(path)]:
            append_row(journal, row)
        return publish(journal, args.python, "`python -m k3lab sweep`, one call a kernel, merged by data/make_kernel_sweep.py --merge")
    where = here()
    if where["device"] == "cpu":
        raise SystemExit("make_kernel_sweep: no GPU is visible; these rows can only be made on one")
    mixed = random_input([1] * 128 + [4096], name="128 x 1 + 4096 tokens", seed=1)
    cases = [c for kernel in KERNELS for c in stage_cases(kernel, [mixed], ("undefined",))]
    rows = run_sweep(cases, RUNS, journal, jobs=args.jobs, timeout=60, deadline=time.time() + args.budget - 25, where=where)
    print(json.dumps(judge(rows)["verdict"].value_counts().to_dict()), file=sys.stderr)
    return publish(journal, args.python, "data/make_kernel_sweep.py")


if __name__ == "__main__":
    main()
