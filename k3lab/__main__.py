"""python -m k3lab COMMAND: exit status 0 clean, 1 a finding, 2 bad input.

The parser imports nothing heavy, so that --help answers at once; each command imports what it needs.
"""

import argparse
import glob
import os
import shlex
import signal
import sys
from functools import partial
from pathlib import Path

from k3lab.drafter.cli import add_parsers as add_drafter_parsers
from k3lab.errors import BadInput, K3labError
from k3lab.races.cli import add_parsers
from k3lab.subcommand import add_command, printable, report

STATUS = "exit status: 0 clean, 1 a finding, 2 bad input"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m k3lab", description="Investigate Kimi-K3 serving faults.", epilog=STATUS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = partial(add_command, commands, status=STATUS)

    command(
        "doctor", _doctor, "look at this installation, and say how to mend it",
        "A finding is something needed that is missing;\nwhat only a part needs is listed as optional.", "doctor",
    )  # fmt: skip
    check = command(
        "check", _check, "look for what is wrong with captures before anything runs on them",
        "Errors and warnings are\nfindings (exit status 1), notes are not. Every file is looked at, also after one that cannot be read.",
        "check data/captures/mixed_split_layer1.safetensors",
    )  # fmt: skip
    check.add_argument("captures", nargs="+", metavar="CAPTURE", help=".safetensors files, folders of them, or patterns such as 'run1/*'")
    nan = command(
        "nan", _nan, "tell what a KDA capture OBSERVED from what padding would EXPOSE",
        "Observed: recorded\noutputs that are not finite, or away from the float64 recurrence of the recorded inputs (exit status 1).\n"
        "Exposed: sequences that only NaN in masked rows of the kernels' tiles would reach; no finding by itself.\n"
        "With --route the layer step is run again instead, and exit status 1 says that the replay is not finite.",
        "nan data/captures/mixed_split_layer1.safetensors --route chunk_all --padding nan",
    )  # fmt: skip
    nan.add_argument("capture", metavar="CAPTURE", help="one .safetensors file of kind kda")
    nan.add_argument("--route", choices=["chunk_all", "split", "gather_split"], help="replay the step by this route")
    nan.add_argument("--padding", choices=["undefined", "zero", "nan"], help="worth of masked rows (default: undefined; reference: zero)")
    nan.add_argument("--impl", choices=["torch", "triton", "reference"], help="what replays it (default: torch)")
    nan.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"], help="recast the token tensors before the replay")
    add_parsers(commands)
    add_drafter_parsers(commands)
    figures = command(
        "figures", _figures, "make the notebooks' figures outside a notebook, ready for a PR",
        "Each is NAME.png (2x),\nNAME.svg, NAME.csv and NAME.md, the snippet to paste. --out defaults to K3LAB_OUT, else out/.",
        "figures 01_routes --capture data/captures/mixed_split_layer8.safetensors --out out",
    )  # fmt: skip
    figures.add_argument("names", nargs="*", metavar="NAME", help="which (default: all, or all that are of the capture or log given)")
    figures.add_argument("--list", action="store_true", help="print the names and what they show, and make nothing")
    figures.add_argument("--capture", metavar="FILE", help="a capture instead of the shipped one: KDA for 01, AttnRes for 03")
    figures.add_argument("--log", metavar="FILE", help="an engine's log instead of the shipped one, for 03_log and 03_overlay")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status. Bad input, a full disk or Ctrl-C becomes one line on stderr and status 2 (130)."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        _take(args, rest)
    if "" in (sys.argv[1:] if argv is None else argv):
        parser.error("an argument is empty; is it a shell variable that is not set?")
    try:
        status = args.run(args)
        sys.stdout.flush()  # here, so that a full disk is reported
        return status
    except K3labError as e:
        return _complain(e)
    except OSError as e:
        return _complain(f"{e}; check the space and the permissions there")
    except MemoryError:
        return _complain("the input does not fit into memory; give a part of it")
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except ModuleNotFoundError as e:
        return _complain(f"{e.name} is not installed; python -m k3lab doctor says how to install what is missing")


def _take(args: argparse.Namespace, rest: list[str]) -> None:
    """Names after an option, as in `toolchain add --json 3.8.0`, which argparse leaves over; anything else is refused with the usage."""
    names = next((a for a in args.parser._get_positional_actions() if a.nargs in ("*", "+")), None)
    if names is None or any(x.startswith("-") for x in rest):
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    setattr(args, names.dest, [*getattr(args, names.dest), *rest])


def _complain(message: object) -> int:
    print("k3lab:", _one_line(message), file=sys.stderr)
    return 2


def _one_line(text: object) -> str:
    """Names of files may hold line ends, and must not look like a line of ours."""
    return " ".join(printable(text).split())


def _doctor(args: argparse.Namespace) -> int:
    from k3lab import doctor

    items = doctor.examine()
    missing = [i for i in items if i.status == "missing"]
    width = max(len(i.item) for i in items)
    lines = []
    for i in items:
        lines.append(f"{i.status:8}  {i.item:{width}}  {i.value}")
        if i.fix:
            lines.append(f"{'':8}  {'':{width}}  fix: {i.fix}")
    lines.append(f"{len(missing)} needed and missing" if missing else "nothing that is needed is missing")
    report(args, {"ok": not missing, "items": [i._asdict() for i in items]}, lines)
    return int(bool(missing))


def _files(arguments: list[str]) -> list[Path]:
    """The captures that files, folders and patterns stand for. A name without a match is kept: loading says what is wrong."""
    files: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        try:
            folder, found = path.is_dir(), path.exists()
        except OSError as e:
            raise BadInput(f"{argument}: cannot be read: {e.strerror}") from e
        if folder:
            inside = sorted(path.rglob("*.safetensors"))
            if not inside:
                raise BadInput(f"{path}: the folder holds no .safetensors file")
            files += inside
        elif found:
            files.append(path)
        else:
            files += [Path(p) for p in sorted(glob.glob(argument, recursive=True)) if Path(p).is_file()] or [path]
    return list(dict.fromkeys(files))


def _check(args: argparse.Namespace) -> int:
    from k3lab.capture import Capture

    status, captures, lines = 0, [], []
    for path in _files(args.captures):
        try:
            capture = Capture.load(path)
            findings = capture.check().to_dict("records")
        except K3labError as e:
            status = _complain(e)
            captures.append({"path": str(path), "kind": None, "findings": [], "unreadable": str(e)})
            continue
        captures.append({"path": str(path), "kind": capture.kind, "findings": findings, "unreadable": None})
        if any(f["severity"] != "note" for f in findings):
            status = max(status, 1)
        lines.append(f"{_one_line(path)}: {capture.kind}, {_count(findings)}")
        for f in findings:
            f = {key: _one_line(value) for key, value in f.items()}
            lines.append(f"  {f['severity']}: {f['tensor']}{' ' * bool(f['where'])}{f['where']}: {f['finding']}")
            lines.append(f"    {f['what_to_do']}")
    report(args, {"clean": status == 0, "captures": captures}, lines)
    return status


def _count(findings: list[dict]) -> str:
    counts = [(n, s) for s in ("error", "warning", "note") if (n := sum(f["severity"] == s for f in findings))]
    return ", ".join(f"{n} {s}{'s' * (n > 1)}" for n, s in counts) or "nothing found"


def _nan(args: argparse.Namespace) -> int:
    if args.route is None and (args.padding or args.impl or args.dtype):
        args.parser.error("--padding, --impl and --dtype say how to replay: add --route")
    from k3lab.kda.runtime import interpret_without_gpu

    interpreted = interpret_without_gpu()
    from k3lab import nonfinite
    from k3lab.capture import Capture

    capture = Capture.load(args.capture)
    if args.route:
        impl = args.impl or "torch"
        padding = args.padding or ("zero" if impl == "reference" else "undefined")
        import torch

        result = nonfinite.replay(capture, args.route, padding, impl, args.dtype and getattr(torch, args.dtype))
        lines = [
            f"{_one_line(args.capture)}, route {args.route}, padding {padding}, impl {impl}" + (f", as {args.dtype}" if args.dtype else ""),
            f"REPLAYED  {result['text']}",
        ]
        if impl == "triton" and padding == "undefined" and interpreted:
            lines.append("          under the interpreter a masked load reads 0: undefined looks like zero here")
        lines += _error_text(result)
    else:
        result = nonfinite.investigate(capture)
        lines = [_one_line(args.capture), *_observed_text(result["observed"]), *_exposed_text(result["exposed"])]
    finding = result.pop("finding")
    report(args, result, lines)
    return int(finding)


def _figures(args: argparse.Namespace) -> int:
    from k3lab.kda.runtime import interpret_without_gpu

    interpret_without_gpu()  # before a kernel module is imported
    from k3lab import figure_pack, figures

    if args.list:
        listed = [{"name": n, "shows": what} for n, (what, _) in figure_pack.FIGURES.items()]
        report(args, {"figures": listed}, [f"{f['name']:22}  {f['shows']}" for f in listed])
        return 0
    folder = args.out or os.environ.get("K3LAB_OUT") or "out"
    given = "".join(f" --{key} {shlex.quote(Path(value).name)}" for key in ("capture", "log") if (value := getattr(args, key)))
    made = []
    for name, (fig, frame) in figure_pack.make(args.names, args.capture, args.log):
        files = figures.export(fig, frame, name, folder, f"python -m k3lab figures {name}{given}")
        made.append({"name": name, "finding": figures.finding_of(fig), "files": [str(f) for f in files]})
        print(f"{name}: {made[-1]['finding']}", file=sys.stderr)
    report(args, {"figures": made}, [f"{f['name']}: {f['finding']}\n    {f['files'][0]} and .svg, .csv, .md" for f in made])
    return 0


def _observed_text(seen: dict) -> list[str]:
    from k3lab.nonfinite import ranges

    if not seen["recorded"]:
        return ["OBSERVED  nothing: the capture holds no outputs"]
    names = ", ".join(seen["recorded"])
    if seen["finite"]:
        lines = [f"OBSERVED  {names} finite"]
    else:
        lines = [f"OBSERVED  {names} not finite in sequences {ranges(seen['nonfinite_sequences'])}", _place(seen["first"])]
    lines += _error_text(seen)
    if seen["away_sequences"]:
        lines.append(f"          further away than the error budget: sequences {ranges(seen['away_sequences'])}")
        lines += [f"          {b}" for b in seen["budget"]]
    return lines


def _exposed_text(exposed: dict) -> list[str]:
    from k3lab.nonfinite import ranges

    lines = []
    for route, reach in exposed.items():
        where = f"sequences {ranges(reach['sequences'])}" if reach["sequences"] else "no sequence"
        lines.append(f"EXPOSED   {route}: NaN in masked rows would reach {where}")
        if reach["first"]:
            lines.append(_place(reach["first"]))
    return lines


def _error_text(result: dict) -> list[str]:
    error = result["relative_error"]
    text = "no finite row" if error is None else f"relative error of finite rows {error:.2g} against the float64 recurrence"
    return [f"          {text}"]


def _place(first: dict) -> str:
    return (
        f"          first {first['value']}: stage {first['stage']}, tensor {first['tensor']}, sequence {first['sequence']} "
        f"(length {first['length']}), row {first['row']}, head {first['head']}, channel {first['channel']}"
    )


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command quietly
    sys.exit(main())
