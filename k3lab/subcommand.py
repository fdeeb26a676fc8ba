"""One way to declare a subcommand: summary, details, exit status and an example in its help; --json everywhere."""

import argparse
from collections.abc import Callable


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
    sub.set_defaults(run=run, parser=sub)
    return sub
