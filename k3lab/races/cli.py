"""python -m k3lab races | lds | lint | toolchain | sweep: exit status 0 clean, 1 a finding, 2 bad input or nothing but errors.

Nothing heavy is imported before a command runs.
"""

import argparse
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from k3lab.errors import BadInput, K3labError
from k3lab.races.sweep_cli import add_parser as add_sweep_parser
from k3lab.subcommand import add_command, report

STATUS = "exit status: 0 every row ordered, 1 a race or an uninitialised read, 2 bad input, or a row that could not be analysed"
LINT_STATUS = "exit status: 0 no racy winner, 1 a racy winner, conditional or not, 2 bad input, or records that could not be read"
SWITCH = {"on": (True,), "off": (False,), "both": (True, False), "default": (None,)}
INPUTS_HELP = "full, length1, lengthN, middle, tail, or JSON files, with commas (default: full,length1,middle,tail)"


def add_parsers(commands: argparse._SubParsersAction) -> None:
    """Add the subcommands to `python -m k3lab`; each sets `run`, a function of the parsed arguments that returns the exit status."""

    command = partial(add_command, commands, status=STATUS)

    races = command(
        "races", races_main, "compile a kernel per config and look for LDS races, with no GPU",
        "What is not in\n--signature is taken as in Kimi-K3 on one of eight ranks. The verdict is of compiled code, at the inputs named.",
        "races k3lab.kda.triton_chunk:recompute_w_u_fwd_kernel --pointer-range off --json",
    )  # fmt: skip
    races.add_argument("kernel", metavar="MODULE:KERNEL", help="or FILE.py:KERNEL")
    races.add_argument("--target", default="hip:gfx950", help="hip:gfx950 (default), hip:gfx942 or hip:gfx90a")
    races.add_argument("--toolchain", default="installed", help="Triton versions, with commas: installed (default) or added ones")
    races.add_argument(
        "--pointer-range", choices=["on", "off", "both"], default="both", help="tt.pointer_range=32 on pointers (default: both)"
    )
    races.add_argument(
        "--async",
        dest="async_copy",
        choices=["on", "off", "both", "default"],
        default="on",
        help="async copies (default: on; Triton's own default is on for gfx950 from 3.8 on, else off)",
    )
    races.add_argument("--padding", default="", help="the kernel's PADDING constexpr, with commas: undefined, zero, nan")
    races.add_argument("--configs", default="", help="such as w4s2,w4s4 (default: warps 2, 4, 8 x stages 2, 3, 4)")
    races.add_argument("--inputs", default="", help=INPUTS_HELP)
    races.add_argument(
        "--signature",
        help='JSON object or file: argument to type or value, {"x": "*bf16", "N": "i32", "stride": "i32:16", "BLOCK": 64}; '
        "i32:16 is a multiple of 16",
    )
    races.add_argument(
        "--capture", metavar="FILE",
        help="argument types of a recorded call: a KDA capture for recompute_w_u_fwd_kernel, or one of kind call; --signature goes on top",
    )  # fmt: skip
    races.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    lds = command(
        "lds", lds_main, "look for LDS races in assembly that you have",
        "Takes .amdgcn files, or a Triton cache\nfolder; .ttgir and .json beside a file give argument names, warps and LDS size.",
        "lds ~/.triton/cache",
    )  # fmt: skip
    lds.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER")
    lds.add_argument("--args", default="", help="argument names in order, with commas, where there is no .ttgir")
    lds.add_argument("--inputs", default="", help=INPUTS_HELP)
    lint = command(
        "lint", lint_main, "name the winners of autotuning that are known to race",
        "Takes what TRITON_PRINT_AUTOTUNING=1\nprinted, *.autotune.json, FLA's config cache, and folders of them. The records name neither "
        "target nor\nTriton version: without --target and --triton a finding is conditional, and is one all the same.",
        "lint ~/.triton/cache server.log --target hip:gfx950 --triton 3.6.0", status=LINT_STATUS,
    )  # fmt: skip
    lint.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER")
    lint.add_argument("--target", help="what the kernels were compiled for: hip:gfx950, cuda:90")
    lint.add_argument("--triton", metavar="VERSION", help="the Triton version that tuned them")
    lint.add_argument("--rules", metavar="FILE", help="more rules, in the form of k3lab/races/rules.toml")
    toolchain = command(
        "toolchain", toolchain_main, "install a Triton version beside the installed one, or list them",
        "They live in the\nuser's cache folder, or in K3LAB_TOOLCHAINS.", "toolchain add 3.8.0",
        status="exit status: 0 installed or listed, 2 bad input, or a version that cannot be installed",
    )  # fmt: skip
    toolchain.add_argument("action", choices=["add", "list"])
    toolchain.add_argument("versions", nargs="*", metavar="VERSION")
    add_sweep_parser(command)


def races_main(args: argparse.Namespace) -> int:
    """Compile and analyse; one row per (build, input)."""
    from k3lab.races.compiled import compile_builds
    from k3lab.races.matrix import CONFIGS, matrix_builds, rows_of

    if not args.target.startswith("hip:"):
        if args.target.startswith("gfx"):
            raise BadInput(f"--target {args.target}: write hip:{args.target}")
        raise BadInput(f"--target {args.target}: LDS analysis is for AMD targets, hip:gfx950; a CUDA kernel can be swept on a GPU")
    signature = {**_captured(args.capture), **_signature(args.signature)}
    configs = [_config(c) for c in args.configs.split(",")] if args.configs else CONFIGS
    padding = [p.strip() for p in args.padding.split(",")]
    chains = [t.strip() for t in args.toolchain.split(",")]
    builds = matrix_builds(chains, [args.target], SWITCH[args.pointer_range], SWITCH[args.async_copy], padding, configs, args.kernel)
    builds = [replace(b, signature={**signature, **b.signature}) for b in builds]
    inputs = _inputs(args.inputs)
    rows = [row for c in compile_builds(builds, jobs=args.jobs, progress=True) for row in rows_of(c, inputs, detail=True)]
    return _report(args, rows, ("triton", "target", "async", "pointer_range", "padding"))


def lds_main(args: argparse.Namespace) -> int:
    """Analyse assembly files; one row per (kernel, input)."""
    from tqdm import tqdm

    from k3lab.races.kernel import Input, copy_path, load_kernel
    from k3lab.races.lds import analyse

    files: list[Path] = []
    for p in map(Path, args.paths):
        found = sorted(p.rglob("*.amdgcn")) if p.is_dir() else [p]
        if not found:
            raise BadInput(
                f"{p}: the folder holds no .amdgcn file; Triton writes them for AMD targets into TRITON_CACHE_DIR (~/.triton/cache)"
            )
        files += found
    names = [n.strip() for n in args.args.split(",") if n.strip()]
    rows = []
    for file in tqdm(files, desc="lds", disable=len(files) < 8, ascii=True):
        try:
            kernel = load_kernel(file)
        except K3labError as error:
            if len(files) == 1:
                raise
            rows.append({"file": str(file), "kernel": file.stem, "input": "-", "verdict": "error", "error": str(error), "findings": []})
            continue
        if names:
            kernel = replace(kernel, args=tuple((n, "") for n in names))
        # a kernel that knows neither a length nor cu_seqlens is the same at every standard input
        known = {"T", "cu_seqlens"} & set(kernel.arg_names)
        inputs = _inputs(args.inputs) if known or args.inputs else [Input("any")]
        for r in analyse(kernel, inputs):
            rows.append(
                {"file": str(file), "kernel": kernel.program.name, "target": kernel.program.arch, "warps": kernel.warps,
                 "path": copy_path(kernel.program), "input": r.input, "verdict": r.verdict, "error": r.error,
                 "findings": [f.row() for f in r.findings]}
            )  # fmt: skip
    return _report(args, rows, ("file",))


def lint_main(args: argparse.Namespace) -> int:
    """Read records, match them with the rules; winners alone decide the exit status."""
    from k3lab.races.autotune import read_paths
    from k3lab.races.lint import lint_reading

    reading = read_paths(args.paths)
    findings, unread = lint_reading(reading, args.target, args.triton, args.rules)
    winners = findings[findings["role"] == "winner"]
    roles = [r.role for r in reading.records]
    counts = {"winners": roles.count("winner"), "candidates": roles.count("candidate"), **reading.counts}
    tables = {"findings": findings.to_dict("records"), "not_understood": unread.to_dict("records")}
    lines = []
    for (kernel, config, _), rows in winners.groupby(["kernel", "config", "rule"], sort=False):
        first, more = rows.iloc[0], f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        lines.append(f"{first['file']}:{first['line']}{more}: {kernel} won with {config}")
        lines.append(f"    {'conditional' if first['conditional'] else 'matches'}: {first['rule']}")
        for label, text in (("if", first["holds_if"]), ("evidence", first["evidence"]), ("source", first["citation"]),
                            ("fix", first["fix"]), ("note", first["note"])):  # fmt: skip
            if text:
                lines.append(f"    {label + ':':9} {text}")
    tried = findings[findings["role"] == "candidate"].drop_duplicates(["kernel", "config", "rule"])
    for r in tried.itertuples():
        lines.append(f"{r.file}:{r.line}: {r.kernel} was timed with {r.config} and may pick it another time: {r.rule}")
    lines += [f"{r.file}:{r.line}: not understood: {r.reason}" for r in unread.itertuples()]
    racy = len(winners.drop_duplicates(["file", "line", "kernel", "key", "config"]))
    lines.append(f"winners known to race: {racy}; read: " + ", ".join(f"{what} {n}" for what, n in counts.items()))
    report(args, {**tables, "counts": counts}, lines)
    return 1 if len(winners) else 2 if len(unread) else 0


def toolchain_main(args: argparse.Namespace) -> int:
    """Add or list Triton versions."""
    from k3lab.races.toolchain import add_toolchain, toolchain_path, toolchains

    if (args.action == "add") != bool(args.versions):
        raise BadInput("toolchain add needs at least one VERSION" if args.action == "add" else "toolchain list takes no VERSION")
    for version in args.versions:
        print(f"Triton {version}: installing", file=sys.stderr)
        add_toolchain(version)
    have = {v: str(toolchain_path(v)) for v in toolchains()}
    report(args, {"toolchains": have}, [f"{v:10} {path}" for v, path in have.items()] or ["no toolchain added"])
    return 0


def _inputs(text: str) -> list:
    from k3lab.races.kernel import read_input
    from k3lab.races.matrix import INPUTS

    names = [n.strip() for n in text.split(",") if n.strip()] or list(INPUTS)
    if unknown := [n for n in names if not re.fullmatch(r"full|middle|tail|length[1-9]\d*|.*\.json", n)]:
        raise BadInput(f"--inputs {', '.join(unknown)}: neither full, length1, lengthN, middle, tail nor a JSON file")
    return [read_input(n) if n.endswith(".json") else n for n in names]


def _config(text: str) -> tuple[int, int]:
    m = re.fullmatch(r"w(\d+)s(\d+)", text.strip())
    if not m:
        raise BadInput(f"--configs: {text!r} is not a config like w4s2 (num_warps 4, num_stages 2)")
    return int(m[1]), int(m[2])


def _captured(path: str | None) -> dict:
    """The signature of a recorded call: by the launch of the chunk forward for a KDA capture, else argument by argument."""
    if not path:
        return {}
    from k3lab.capture import Capture
    from k3lab.races.compiled import recompute_w_u_signature, signature_of

    capture = Capture.load(path)
    if capture.kind == "kda":
        return recompute_w_u_signature(capture.kda_call())
    return signature_of({name.removeprefix("arg."): x for name, x in capture.tensors.items() if not name.startswith("result.")})


def _signature(text: str | None) -> dict:
    if not text:
        return {}
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"--signature {text[:200]}: neither a JSON object nor a file with one: {error}") from None
    if not isinstance(value, dict):
        raise BadInput(f"--signature {text}: expected a JSON object of argument names")
    return value


def _report(args: argparse.Namespace, rows: list[dict], group: tuple) -> int:
    from k3lab.races.kernel import COPY_PATHS
    from k3lab.races.lds import ASSUMPTIONS

    verdicts = {r["verdict"] for r in rows}
    heading, lines = None, []
    for r in rows:
        if (here := [r.get(k) for k in group]) != heading:
            heading = here
            words = [f"{k} {_word(r.get(k))}" if k != "file" else str(r["file"]) for k in group if r.get(k) not in ("", None)]
            lines.append("\n" + ", ".join(words) + (f"\n  {COPY_PATHS[r['path']]}" if r.get("path") else ""))
        config = f"w{r['warps']}s{r['stages']}" if "stages" in r else r["kernel"]
        lines.append(f"  {config:6} {r['input']:9} {r['verdict']}" + (f": {r['error']}" if r.get("error") else ""))
        hazards = [f["message"] for f in r["findings"] if f["kind"] in ("race", "uninitialised", "barrier count")]
        notes = [f["message"] for f in r["findings"] if f["kind"] == "missing copy"]
        lines += [f"         {message}" for message in (*hazards[:1], *notes)]
        if len(hazards) > 1:
            lines.append(f"         and {len(hazards) - 1} more like it (--json lists them all)")
        for w in r.get("waits", []):
            left = ", ".join(f"{v}: {n}" for v, n in w["pairs"].items())
            lines.append(f"         {w['counter']} at line {w['line']}: {w['enough']} is enough; racing pairs left by value: {left}")
    lines.append("\nassumed: " + ";\n  ".join(ASSUMPTIONS))
    report(args, {"rows": rows, "assumptions": list(ASSUMPTIONS)}, lines)
    return 1 if verdicts & {"race", "uninitialised"} else 2 if "error" in verdicts else 0


def _word(x: object) -> str:
    return {True: "on", False: "off"}.get(x, str(x)) if isinstance(x, bool) else str(x)
