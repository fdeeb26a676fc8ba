"""One way to declare a subcommand and to report: summary, details, exit status and example in its help; --json and --out everywhere."""

import argparse
import json
import math
from collections.abc import Callable, Iterable

from k3lab.files import write_files


def add_command(
    commands: argparse._SubParsersAction, name: str, run: Callable[[argparse.Namespace], int], summary: str, details: str, example: str,
    status: str,
) -> argparse.ArgumentParser:  # fmt: skip
    """Add `python -m k3lab NAME`; run(args) returns the exit status, args.parser is the subparser."""
    sub = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {details}",
        epilog=f"{status}\n\nexample:\n  python -m k3lab {example}", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    sub.add_argument("--out", metavar="DIR", help=f"also write k3lab-{name}.txt and k3lab-{name}.json there")
    sub.set_defaults(run=run, parser=sub)
    return sub


def report(args: argparse.Namespace, result: dict, lines: Iterable[str]) -> None:
    """Print the result of a command, as JSON with --json and else as lines; with --out both go to files as well.

    What is not finite is null: JSON has no NaN. Raises BadInput for a folder that cannot be written.
    """
    text = "\n".join(printable(line) for line in lines)
    as_json = json.dumps(_plain(result), indent=2, allow_nan=False)
    if args.out:
        write_files(args.out, {f"k3lab-{args.command}.txt": text + "\n", f"k3lab-{args.command}.json": as_json + "\n"})
    if args.json or text:
        print(as_json if args.json else text)


def printable(text: object) -> str:
    """Text of a file as it may go to a terminal: control characters and lone surrogates escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


def _plain(x: object) -> object:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
