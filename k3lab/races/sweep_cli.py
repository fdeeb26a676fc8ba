"""python -m k3lab sweep: exit status 0 no difference, 1 a finding, 2 bad input, no GPU, or a row that could not be run."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from k3lab.errors import BadInput, Unsupported
from k3lab.subcommand import report

STATUS = (
    "exit status: 0 no difference, 1 a race, a dependence on initial memory, a wrong result, a crash or a hang,\n"
    "             2 bad input, no GPU, or a row that could not be run"
)


def add_parser(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `sweep` with the function that makes subcommands."""
    sweep = command(
        "sweep", sweep_main, "run every config of a kernel many times on a GPU and compare bit by bit",
        "Outputs are\nfilled with NaN, then with zeros, before each run; every config is a process of its own. No difference in N runs is\n"
        "no proof: the rate that N excludes is printed.",
        "sweep --kernel recompute_w_u --capture data/captures/mixed_128_decodes.safetensors --runs 50 --journal sweep.jsonl",
        status=STATUS,
    )  # fmt: skip
    sweep.add_argument(
        "--kernel",
        default="recompute_w_u",
        help="a chunk stage, prepare, fused_recurrent_kda, fused_gate, fused_halves, fused_chunk, fused_state, attn_res, or planted",
    )
    sweep.add_argument("--capture", action="append", default=[], metavar="FILE", help="input from a capture of kind kda; may be repeated")
    sweep.add_argument("--ladder", action="store_true", help="also one sequence each of 1024, 4096 and 16384 tokens (not attn_res)")
    sweep.add_argument("--padding", default="undefined,zero", help="worth of masked rows, with commas (default: undefined,zero)")
    sweep.add_argument("--runs", type=int, default=50, help="launches per config, input and fill (default: 50)")
    sweep.add_argument("--journal", metavar="FILE", help="JSONL file to resume from and append to")
    sweep.add_argument("--load", action="store_true", help="matrix products and copies beside every launch")
    sweep.add_argument("--timeout", type=float, default=120.0, help="seconds before a row is a hang (default: 120)")
    sweep.add_argument("--jobs", type=int, default=1, help="configs at a time on the one GPU (default: 1)")
    own = sweep.add_argument_group(
        "your own kernel", "launch(config, inputs, outputs) and problem(kernel, input, device); see races.sweep_targets"
    )
    own.add_argument("--launch", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION; with --problem, --configs and --input")
    own.add_argument("--problem", metavar="MODULE:FUNCTION")
    own.add_argument("--configs", metavar="JSON", help='[{"num_warps": 4, "num_stages": 2}]; also for a kernel of this package')
    own.add_argument("--input", action="append", default=[], metavar="JSON", help='one input, {"name": "small"}; may be repeated')


def sweep_main(args: argparse.Namespace) -> int:
    """Sweep, print one line per (config, input), return the exit status."""
    from k3lab.races.sweep import run_sweep
    from k3lab.races.verdicts import judge

    cases = _cases(args)
    rows = run_sweep(cases, args.runs, args.journal, jobs=args.jobs, timeout=args.timeout, load=args.load)
    verdicts = judge(rows)
    where = rows[0]["where"]
    records = verdicts.astype(object).where(verdicts.notna(), None).to_dict("records")
    lines = [f"{where['device']}, Triton {where['triton']}, torch {where['torch']}: {args.runs} runs at each of 2 fills"]
    for r in records:
        mark = "FINDING " if r["finding"] else ""
        lines.append(f"{r['kernel']} {r['config']}, {r['input']}{', under load' if r['load'] else ''}: {mark}{r['sentence']}")
    report(args, {"where": where, "verdicts": records, "rows": rows}, lines)
    if verdicts["finding"].any():
        return 1
    return 2 if verdicts["excluded_rate"].isna().any() else 0


def _cases(args: argparse.Namespace) -> list:
    """The cases that the arguments mean. Raises BadInput, or Unsupported where there is no GPU for a kernel of this package."""
    from k3lab.races.sweep import Case, planted_cases, stage_cases

    configs = _json(args.configs, "--configs", list) if args.configs else None
    inputs = [_json(text, "--input", dict) for text in args.input]
    if args.launch or args.problem:
        if not (args.launch and args.problem and configs and inputs):
            raise BadInput("a kernel of your own needs --launch, --problem, --configs and at least one --input")
        return [Case(args.kernel, c, i, args.launch, args.problem) for c in configs for i in inputs]
    if inputs:
        raise BadInput("--input is for a kernel of your own; give --capture, or --ladder, to a kernel of this package")
    from k3lab.kda.stages import PADDINGS
    from k3lab.races.sweep_targets import ATTN_RES, KERNELS, call_of, capture_input, default_inputs, size_ladder

    if args.kernel not in (*KERNELS, "planted"):
        raise BadInput(f"--kernel {args.kernel!r} is not one of {', '.join(KERNELS)}, planted")
    if args.kernel == ATTN_RES and (args.capture or args.ladder):
        raise BadInput("--capture and --ladder are for the KDA kernels; attn_res runs on random sources, plain and as in serving")
    given = [capture_input(Path(p)) for p in args.capture]
    for spec in given:
        call_of(spec, "cpu")  # a capture that cannot be used is refused before anything runs
    padding = [p.strip() for p in args.padding.split(",") if p.strip()]
    if unknown := [p for p in padding if p not in PADDINGS]:
        raise BadInput(f"--padding {', '.join(unknown)}: not one of {', '.join(PADDINGS)}")
    _need_gpu()
    if args.kernel == "planted":
        return planted_cases()
    inputs = given or default_inputs(args.kernel)
    return stage_cases(args.kernel, inputs + (size_ladder(seed=2) if args.ladder else []), padding, configs)


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise Unsupported(
            "sweep needs a GPU, and torch sees none; with no GPU, python -m k3lab races MODULE:KERNEL looks for races in the compiled code"
        )


def _json(text: str, option: str, kind: type) -> object:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(f"{option}: not JSON: {error}") from None
    if not isinstance(value, kind) or (kind is list and not all(isinstance(c, dict) for c in value)):
        raise BadInput(f"{option}: expected {'a list of JSON objects' if kind is list else 'a JSON object'}, got {text[:60]}")
    return value
