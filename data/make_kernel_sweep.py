"""Make data/kernel_sweep.jsonl and its card: every kernel of the package at every launch configuration, run again and again on a GPU.

PYTHONPATH=. python3 data/make_kernel_sweep.py --out data --budget 200

200 launches a case, 100 with outputs filled with NaN first and 100 with zeros: the KDA kernels on 128 decodes and a prefill of 4,096
tokens at 12 heads, AttnRes on 4,096 tokens of hidden 7168 and 8 blocks, bfloat16. In this order, until --budget seconds are over (what
is left then is rows that say "skipped: budget"): the stages and the recurrent kernel with masked rows undefined, the kernels of the fused
chunk forward, AttnRes plain and as in serving, and the stages with masked rows zero. A config that is begun runs all its rows in one
process. A run that was stopped goes on where it was: give it the folder that has the journal. The rows are those of `python -m k3lab
sweep --kernel NAME --runs 100 --journal FILE`; --merge takes such journals instead of running anything.
"""

import argparse
import json
import platform
import sys
import time
from hashlib import sha256 as sha256_of
from pathlib import Path

from k3lab.errors import BadInput
from k3lab.figures import markdown_table
from k3lab.provenance import sha256
from k3lab.races.sweep import SKIPPED, Case, append_row, here, read_journal, run_sweep, stage_cases
from k3lab.races.sweep_targets import ATTN_RES, FUSED, KERNELS, default_inputs
from k3lab.races.verdicts import FAILED, config_name, judge
from k3lab.tiny.cards import write_text

HERE = Path(__file__).parent
SOURCES = ("kda/triton_ops.py", "kda/triton_chunk.py", "kda/triton_recurrent.py", "kda/triton_fused.py", "attn_res/triton_attn_res.py")
RUNS = 100
AFTER = """

Such a case has no result: 0 runs below, at both fills. Every config runs in a process of its own, so no other row is touched. An illegal
access is a read or write outside every buffer, upon which CUDA ends the process. To see whether your build has it too:
python -m k3lab sweep --kernel NAME --configs '[{"BK": 32, "num_warps": 4, "num_stages": 1}]', with the options of the config above."""
RESERVE = 25.0  # seconds of the budget kept for rows in progress at its end, and for the card


def cases() -> list[Case]:
    """What there is to run, what is most wanted first."""
    late = (*FUSED, ATTN_RES)
    kernels = [*(k for k in KERNELS if k not in late), *late]
    out = [c for k in kernels for c in stage_cases(k, default_inputs(k), ("undefined",))]
    return out + [c for k in kernels for c in stage_cases(k, default_inputs(k), ("zero",)) if "padding" in c.config]


def missing(rows: list[dict]) -> str:
    """What of cases() has no finished row, by kernel."""
    have = {(r["kernel"], config_name(r["config"]), r["input"]) for r in rows if r["status"] != SKIPPED}
    lacks: dict[str, int] = {}
    for c in cases():
        name = f"{c.kernel} with masked rows zero" if c.config.get("padding") == "zero" else c.kernel
        lacks[name] = lacks.get(name, 0) + ((c.kernel, config_name(c.config), c.input["name"]) not in have)
    return ", ".join(f"{name} ({n} cases)" for name, n in lacks.items() if n) or "nothing"


def card(rows: list[dict], data: bytes, python: str, how: str) -> str:
    """The data card, every number out of the rows."""
    where, verdicts, inputs = rows[0]["where"], judge(rows), "; ".join(dict.fromkeys(r["input"] for r in rows))
    verdicts["rate excluded"] = [f"{r:.2%}" if r == r else "" for r in verdicts["excluded_rate"].astype(float)]
    counts = verdicts.groupby(["kernel", "verdict"], sort=False).size().reset_index(name="cases")
    columns = ["kernel", "config", "input", "verdict", "runs", "distinct", "outside", "big", "nonfinite", "rate excluded"]
    hashes = "\n".join(f"  - k3lab/{name}: `{sha256(HERE.parent / 'k3lab' / name)}`" for name in SOURCES)
    failed = verdicts[verdicts["verdict"].isin(FAILED)][["kernel", "config", "input", "verdict", "detail"]]
    return f"""# kernel_sweep.jsonl: the kernels of the package, launch configuration by launch configuration, again and again

- What: repeated launches on identical inputs (k3lab.races.sweep), {len(rows)} rows, one per (kernel, config, input, fill), {RUNS} runs
  each, so {2 * RUNS} a case that ran: outputs were filled with NaN or with zeros first. Inputs: {inputs}.
  KDA: 12 heads, K = V = 128; all in bfloat16. Several configs ran at a time on the one GPU.
- Device: {where["device"]}; Triton {where["triton"]}, torch {where["torch"]}, k3lab {where["k3lab"]}, Python {python}.
  Nothing here ran on an AMD card.
- Made by: {how}; inputs from fixed seeds. sha256 of the sources that ran; what they became since is in the history:
{hashes}
- Not in it, of what data/make_kernel_sweep.py runs: {missing(rows)}.
- Licence: this repository's; no third-party data.
- Size: {len(data)} bytes; sha256 {sha256_of(data).hexdigest()}

k3lab.races.verdicts.judge reads the rows. runs counts both fills, distinct the results at one of them; outside is the elements outside
the float64 budget, big those above 1e30, each in the worst run; rate excluded is the rate of deviation that so many equal runs rule out
with 95% confidence. "no difference" is no proof of absence.

## Verdicts

{markdown_table(counts)}

## What crashed or could not be run

{markdown_table(failed) + AFTER if len(failed) else "Nothing: every case that was begun ran to its end."}

## Every case

{markdown_table(verdicts[columns])}
"""


def publish(journal: Path, python: str, how: str) -> None:
    """Put the rows into one order, whatever the order of arrival, and write the card beside them."""
    rows = read_journal(journal)
    rows.sort(key=lambda r: (KERNELS.index(r["kernel"]), r["input"], config_name(r["config"]), r["fill"]))
    data = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows)
    write_text(journal, data)
    write_text(journal.with_suffix(".md"), card(rows, data.encode(), python, how).rstrip() + "\n")


def one_machine(rows: list[dict], where: dict | None = None) -> None:
    """Raise BadInput unless the rows are of one device and one set of versions: a card that mixed them would be of none."""
    for r in rows:
        where = where or r["where"]
        if r["where"] != where:
            raise BadInput(f"the journal has rows of {r['where']}, these are of {where}; write to another folder with --out")


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
    had = read_journal(journal) if journal.exists() else []
    if args.merge:
        rows = [r for path in args.merge for r in read_journal(path)]
        one_machine([*had, *rows])
        for row in rows:
            append_row(journal, row)
        return publish(journal, args.python, "`python -m k3lab sweep`, one call a kernel, merged by data/make_kernel_sweep.py --merge")
    where = here()
    if where["device"] == "cpu":
        parser.error("no GPU is visible; these rows can only be made on one")
    one_machine(had, where)
    rows = run_sweep(cases(), RUNS, journal, jobs=args.jobs, timeout=60, deadline=time.time() + args.budget - RESERVE, where=where)
    print(json.dumps(judge(rows)["verdict"].value_counts().to_dict()), file=sys.stderr)
    done = sum(r["status"] != SKIPPED for r in had)
    return publish(journal, args.python, "data/make_kernel_sweep.py" + (f", {done} rows of them in earlier runs" if done else ""))


if __name__ == "__main__":
    main()
