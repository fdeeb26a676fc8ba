"""python -m k3lab acceptance | passport | evaldelta: exit status 0 nothing found, 1 a finding, 2 bad input.

Nothing heavy is imported before a command runs.
"""

import argparse
import shlex
from functools import partial
from typing import TYPE_CHECKING

from k3lab.errors import BadInput
from k3lab.subcommand import add_command, report

if TYPE_CHECKING:
    import pandas as pd

ACCEPTANCE_STATUS = "exit status: 0 nothing found, 1 the diagnosis names a problem, 2 bad input, or nothing understood"
PASSPORT_STATUS = "exit status: 0 match, or cannot tell and no warning; 1 a mismatch or a warning; 2 bad input"
EVALDELTA_STATUS = "exit status: 0 no row significantly worse, 1 a row is worse (or differs, where the table has no arrow), 2 bad input"


def add_parsers(commands: argparse._SubParsersAction) -> None:
    """Add the subcommands to `python -m k3lab`; each sets `run`, a function of the parsed arguments that returns the exit status."""
    command = partial(add_command, commands)

    acceptance = command(
        "acceptance", acceptance_main, "add up what engine logs and metrics say of speculative decoding, and say what it looks like",
        "Takes log\nlines of vLLM, SGLang and ATOM, Prometheus text, per-request and benchmark JSON, in any mix. Counts are summed, means "
        "never\naveraged. What is not understood is listed by file and line. "
        "--out also writes the figure\nacceptance.png, .svg, .csv and .md.",
        "acceptance server.log metrics.txt", status=ACCEPTANCE_STATUS,
    )  # fmt: skip
    acceptance.add_argument("logs", nargs="+", metavar="LOG", help="files, or - for standard input")

    passport = command(
        "passport", passport_main, "hold what an engine feeds a drafter against what its checkpoint expects",
        "Stream (prefix or\nmixture) and layers, each statement with its source. It is a table of what was read in public sources, no "
        "measurement;\nwhat it does not know it calls unknown.",
        "passport config.json --engine vllm --version 0.33.0 --platform rocm --env VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1",
        status=PASSPORT_STATUS,
    )  # fmt: skip
    passport.add_argument("config", metavar="CONFIG.json", help="the drafter's config.json, or - for standard input")
    passport.add_argument("--engine", required=True, metavar="NAME", help="vllm, vllm-ascend, sglang, tensorrt-llm, tokenspeed, atom")
    passport.add_argument("--version", required=True, metavar="V", help="the engine's version, or unknown")
    passport.add_argument("--platform", choices=["cuda", "rocm", "unknown"], default="unknown", help="what it runs on (default: unknown)")
    passport.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the server; repeat it")
    passport.add_argument("--checkpoint", metavar="ORG/NAME", help="the drafter's name, where its config does not tell")
    passport.add_argument("--pipeline", type=int, default=1, metavar="N", help="pipeline-parallel size (default: 1)")
    passport.add_argument("--log", metavar="LOG", help="a server log: what it says of layers and stream outweighs the table")

    delta = command(
        "evaldelta", evaldelta_main, "compare two lm_eval tables: z, p, and the change in wrong answers, with intervals",
        "Takes the printed\ntable (anywhere in a text), the results JSON, or a CSV; FILE.csv:RUN names one run of a CSV. Rows match by "
        "task, filter,\nn-shot and metric. n is taken from the JSON or --n, else inferred from values and standard errors.",
        "evaldelta data/published/vllm_pr_50649_gsm8k.csv:before data/published/vllm_pr_50649_gsm8k.csv:PR", status=EVALDELTA_STATUS,
    )  # fmt: skip
    delta.add_argument("before", metavar="BEFORE")
    delta.add_argument("after", metavar="AFTER", help="one of the two may be - for standard input")
    delta.add_argument("--n", type=int, metavar="N", help="questions per task, where the files do not say")


def acceptance_main(args: argparse.Namespace) -> int:
    """Totals, survival, mode, diagnosis, and what was not understood; with --out a figure too, where there are counts to draw."""
    from k3lab.drafter.logs import read

    found = read(args.logs)
    summary = found.summary()
    lines = _totals(summary) if found.recognised else ["nothing understood: no line of a known engine (vLLM, SGLang, ATOM, speculators)"]
    if summary["aux"]:
        lines.append(f"mode          {summary['mode'] or 'not stated'}")
        lines += [f"  {a['source']}:{a['line']}: layers {', '.join(map(str, a['layers']))} {a['mode']}" for a in summary["aux"][-5:]]
    else:
        lines.append("mode          not stated (only vLLM on CUDA prints which stream a Kimi-K3 drafter is fed)")
    if found.recognised:
        lines += [f"diagnosis     {d['text']}" for d in (summary["diagnosis"], *summary["also"])]
    lines += [f"flag          {name}: {'; '.join(where)}" for name, where in summary["flags"].items()]
    lines += [f"note          {n}" for n in summary["notes"]]
    for u in summary["not_understood"]:
        lines.append(
            f"{u['source']}: lines {u['lines']}, records {u['records']}, like acceptance and not understood {u['spec_like']}, "
            f"about other things {u['ordinary']}"
        )
        lines += [f"  {u['source']}:{x['line']}: {x['reason'] + ': ' if x['reason'] else ''}{x['text']}" for x in u["first"]]
    if args.out and found.totals and found.totals.drafts and found.totals.emitted is not None:
        lines += _figure(args, found.counted, summary["format"])
    report(args, summary, lines)
    return 2 if not found.recognised else int(found.finding)


def _figure(args: argparse.Namespace, counted: "pd.DataFrame", form: str) -> list[str]:
    """Draw what was summed into --out; counts that cannot be drawn cost the figure, not the report."""
    from k3lab import figures
    from k3lab.drafter_figures import log_figure

    again = f"python -m k3lab acceptance {shlex.join(args.logs)} --out {shlex.quote(args.out)}"
    try:
        fig, frame = log_figure(counted, f"{form}, {', '.join(map(str, args.logs))}"[:120])
    except BadInput as error:
        return [f"figure        not drawn: {error}"]
    figures.export(fig, frame, "acceptance", args.out, again)
    return []


def _totals(s: dict) -> list[str]:
    if s["mean_emitted"] is None:
        lines = ["mean emitted  not known"]
    else:
        interval = f" (95% {s['interval'][0]:.2f} to {s['interval'][1]:.2f})" if s["interval"][0] is not None else ""
        about = ", estimated from printed means" if s["estimated"] else ""
        lines = [f"mean emitted  {s['mean_emitted']:.3f}{interval}, bonus token included{about}"]
    counts = ", ".join(f"{name} {s[name]:,}" for name in ("drafts", "drafted", "accepted", "emitted") if s[name] is not None)
    lines.append(f"counts        {counts or 'none'} ({s['format'] or 'no format speaks for the input'}, {s['records']} records)")
    if s["survival"]:
        lines.append("position      " + " ".join(f"{j:>5}" for j in range(len(s["survival"]))))
        lines.append("survival      " + " ".join(f"{x:5.3f}" for x in s["survival"]))
        if s["k"] and len(s["survival"]) < s["k"]:
            lines.append(f"check         none: {len(s['survival'])} of {s['k']} positions are given")
        elif s["mean_emitted"] is not None:
            lines.append(f"check         1 + sum of survival = {1 + sum(s['survival']):.3f}, mean emitted = {s['mean_emitted']:.3f}")
    for g in s["groups"] if len(s["groups"]) > 1 else []:
        mean = "not known" if g["mean_emitted"] is None else f"{g['mean_emitted']:.3f}"
        counts = f"mean emitted {mean}, drafts {g['drafts']}, records {g['records']}"
        lines.append(f"  {g['engine']} {g['format']}, {', '.join(g['sources'])}: {counts}")
    return lines


def passport_main(args: argparse.Namespace) -> int:
    """One table of statements, then the verdict and why."""
    from k3lab.drafter.passport import from_log, passport, read_config

    env = dict(_variable(text) for text in args.env)
    config = read_config(args.config)
    seen = None
    if args.log:
        from k3lab.drafter.logs import read

        seen = from_log(read([args.log]).aux, args.log)
    result = passport(config, args.engine, args.version, args.platform, env, args.checkpoint, args.pipeline, seen)
    lines = _columns(result.statements[["what", "value", "status", "source"]].values.tolist())
    lines += ["", f"verdict: {result.verdict}", *(f"  {r}" for r in result.reasons), *(f"warning: {w}" for w in result.warnings)]
    report(args, {"config": args.config, **result.summary()}, lines)
    return int(result.finding)


def evaldelta_main(args: argparse.Namespace) -> int:
    """One block per compared row."""
    from k3lab.drafter.evaldelta import compare, read_table

    if args.before == args.after == "-":
        raise BadInput("BEFORE and AFTER are both standard input: only one of them can be")
    result = compare(read_table(args.before), read_table(args.after), args.n)
    lines = []
    for r in result.rows.to_dict("records"):
        shots = "" if r["n_shot"] is None else f", {r['n_shot']}-shot"
        lines.append(f"{r['task'] or 'task not named'}, {r['filter']}{shots}, {r['metric']}: {r['verdict']}")
        lines += [f"  {line}" for line in _change(r)]
    lines += [f"only in {side}: {key}" for side, key in result.unmatched]
    lines += [f"{name}:{line}: not understood: {text}" for name, line, text in result.not_understood]
    lines += [f"note: {n}" for n in result.notes]
    tables = {
        "rows": [{k: _json_value(v) for k, v in r.items()} for r in result.rows.to_dict("records")],
        "unmatched": [{"side": side, "row": key} for side, key in result.unmatched],
        "not_understood": [{"file": name, "line": line, "text": text} for name, line, text in result.not_understood],
        "notes": result.notes, "finding": result.finding,
    }  # fmt: skip
    report(args, tables, lines)
    return int(result.finding)


def _change(r: dict) -> list[str]:
    known = {k: v for k, v in r.items() if v is not None and v == v}
    lines = [f"value         {r['before']:.4g} to {r['after']:.4g}, change {r['change']:+.4f}"]
    if "change_low" in known:
        lines[0] += f" (95% {r['change_low']:+.4f} to {r['change_high']:+.4f})"
        lines.append(f"test          z {r['z']:.2f}, p {r['p']:.2g}, from {r['basis']}")
    if "p_exact" in known:
        lines[-1] += f"; Fisher's exact p {r['p_exact']:.2g}"
    if "wrong_before" in known:
        n = f"{r['n_before']:.0f}" if r["n_before"] == r["n_after"] else f"{r['n_before']:.0f} and {r['n_after']:.0f}"
        text = f"wrong answers {r['wrong_before']:.0f} to {r['wrong_after']:.0f} of {n} ({r['n_source']})"
        if "wrong_ratio" in known:
            text += f", times {r['wrong_ratio']:.2f}"
        if "wrong_ratio_low" in known:
            text += f" (95% {r['wrong_ratio_low']:.2f} to {r['wrong_ratio_high']:.2f})"
        lines.append(text)
    return lines


def _json_value(x: object) -> object:
    """numpy scalars as Python's; a missing number as null."""
    x = x.item() if hasattr(x, "item") else x
    return None if x != x else int(x) if isinstance(x, float) and x.is_integer() and abs(x) > 1 else x


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise BadInput(f"--env {text}: expected NAME=VALUE")
    return name, value


def _columns(rows: list[list[str]]) -> list[str]:
    """A table whose last column may be long: widths by content, the widest value on a line of its own."""
    width = max(len(r[0]) for r in rows)
    lines = []
    for what, value, status, source in rows:
        lines.append(f"{what:{width}}  {value}")
        lines.append(f"{'':{width}}  [{status}] {source}")
    return lines
