"""Execute notebooks/NN_name.py (jupytext percent) on the CPU; render or check the committed NN_name.ipynb.

    python .ci/notebooks.py run     executed notebooks to out/notebooks/, their figures and tables to out/
    python .ci/notebooks.py render  the same, and write the committed notebooks/NN_name.ipynb
    python .ci/notebooks.py check   execute once and compare with the committed notebook; exit 1 on any difference

Names (01_nan_decode_path, or just 01) narrow the set. Compared are cell sources, the kinds of output each cell has, and its
text: addresses, durations and versions blanked, integers and words exact, other numbers as `same_number` says. Pictures are
never compared by bytes, since fonts and compilers move them. What a cell writes to stderr is progress: it is forwarded
while the cell runs, and not kept.
"""

import argparse
import difflib
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parents[1]
CELL_TIMEOUT = 300  # seconds
SIZE_LIMIT = 3_000_000  # bytes; hosting pages stop rendering a notebook at a few megabytes
TEXT_KINDS = ("text/plain", "text/markdown")
FAILURES = (CellExecutionError, CellTimeoutError, DeadKernelError)

NOISE = [
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"0x[0-9a-f]{6,}"), "ADDRESS"),
    (re.compile(r"<Figure size [^>]*>"), "<Figure>"),
    (re.compile(r"\b(python|k3lab|torch|triton|numpy|pandas|matplotlib|fla-core)([ =v]+)\d+(\.\w+)+(\+\w+)?", re.I), r"\1\2VERSION"),
    (re.compile(r"\b\d+(\.\d+)?\s?(ns|µs|us|ms|s|min|seconds|minutes)\b"), "DURATION"),
    (re.compile(r"[-─]{4,}"), "----"),
    (re.compile(r"[ \t]+"), " "),
]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.]*\w)")


class Forwarding(NotebookClient):
    """A NotebookClient that shows a cell's stderr and its place in the notebook while it runs."""

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "stream" and msg["content"]["name"] == "stderr":
            print(msg["content"]["text"], end="", file=sys.stderr, flush=True)
            return None
        return super().process_message(msg, cell, cell_index)


def execute(source: Path) -> tuple[nbformat.NotebookNode, Exception | None]:
    """The notebook of a source with fresh outputs, and what stopped it, if anything did."""
    nb = jupytext.read(source)
    total = sum(cell.cell_type == "code" for cell in nb.cells)
    done = 0

    def progress(cell, **_):
        nonlocal done
        done += cell.cell_type == "code"
        print(f"{source.stem}: cell {done} of {total}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    began = time.monotonic()
    client = Forwarding(
        nb, timeout=CELL_TIMEOUT, kernel_name="python3", record_timing=False, on_cell_executed=progress,
        resources={"metadata": {"path": str(source.parent)}},
    )  # fmt: skip
    failure = None
    try:
        client.execute()
    except FAILURES as e:
        failure = e
    return tidy(nb, source.stem), failure


def tidy(nb: nbformat.NotebookNode, stem: str) -> nbformat.NotebookNode:
    """Drop what changes without the notebook changing: widget state, interpreter version, timings; number the cell ids."""
    nb.metadata = nbformat.from_dict({
        "kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"},
        "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
    })  # fmt: skip
    nb.nbformat, nb.nbformat_minor = 4, 5
    for i, cell in enumerate(nb.cells):
        cell["id"] = f"{stem}-{i:03d}"
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags"})
    return nb


def write(nb: nbformat.NotebookNode, path: Path) -> None:
    write_text(nbformat.writes(nb) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write to a temporary name, then rename, so that a killed run leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as f:
        f.write(text)
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)


def sanitise(text: str) -> list[str]:
    for pattern, replacement in NOISE:
        text = pattern.sub(replacement, text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def outputs(cell: nbformat.NotebookNode) -> list[str]:
    """The outputs of a cell as sanitised lines, a `<kinds>` line before each."""
    lines, stream = [], ""
    for o in cell.get("outputs", []):
        if o.output_type == "stream":
            if o.name == "stdout" and stream != "stdout":  # a kernel may deliver one print in several pieces
                lines.append("<stdout>")
            text, stream = o.text if o.name == "stdout" else "", o.name
        else:
            data, stream = o.get("data", {}), ""
            lines.append(f"<{o.output_type}: {', '.join(sorted(data))}>")
            text = "\n".join(data[k] for k in TEXT_KINDS if k in data)
        lines += sanitise(text)
    return lines


def same_number(a: str, b: str) -> bool:
    """Integers exactly; rounding errors (exponents of -4 and below) within a factor of 4; other numbers within 2%.

    Sums are ordered by the vector width of the processor, so the last digits of a measured error differ between machines.
    """
    if a == b:
        return True
    if not re.search(r"[.eE]", a + b):
        return False
    x, y = float(a), float(b)
    if "e-" in a.lower() and "e-" in b.lower() and max(abs(x), abs(y)) < 1e-3 and x * y > 0:
        return 0.25 <= x / y <= 4
    return math.isclose(x, y, rel_tol=0.02)


def same_line(a: str, b: str) -> bool:
    numbers_a, numbers_b = NUMBER.findall(a), NUMBER.findall(b)
    return NUMBER.sub("#", a) == NUMBER.sub("#", b) and all(map(same_number, numbers_a, numbers_b))


def same_lines(a: list[str], b: list[str]) -> bool:
    return len(a) == len(b) and all(map(same_line, a, b))


def unified(old: list[str], new: list[str], was: str, now: str) -> list[str]:
    return list(difflib.unified_diff(old, new, was, now, n=1, lineterm=""))


def stale(source: nbformat.NotebookNode, committed: nbformat.NotebookNode) -> list[str]:
    """How the cells of a committed notebook differ from its source, as a diff; empty if they agree."""

    def cells(nb):
        return [line for i, c in enumerate(nb.cells) for line in [f"[{i} {c.cell_type}]", *c.source.splitlines()]]

    return unified(cells(committed), cells(source), "committed .ipynb", "source .py")


def differences(committed: nbformat.NotebookNode, fresh: nbformat.NotebookNode) -> list[str]:
    """Why a committed notebook is not what its source now gives: readable lines, empty if it is."""
    found = stale(fresh, committed)
    if found:
        return found
    if "widgets" in committed.metadata:
        found.append("metadata holds widget state, which a hosting page cannot show")
    for i, (old, new) in enumerate(zip(committed.cells, fresh.cells, strict=True)):
        was, now = outputs(old), outputs(new)
        if not same_lines(was, now):
            title = next(iter(old.source.splitlines()), "empty")
            found += [f"cell {i} ({title}):", *unified(was, now, "committed", "executed now")]
    return found


def select(folder: Path, names: list[str]) -> list[Path]:
    """The sources named, all if none is; exits with a message for a name that is not there."""
    every = sorted(p for p in folder.glob("*.py") if p.stem[:1].isdigit())
    chosen = [p for p in every if not names or any(p.stem == n or p.stem.startswith(f"{n}_") for n in names)]
    unknown = [n for n in names if not any(p.stem == n or p.stem.startswith(f"{n}_") for p in every)]
    if unknown or not chosen:
        sys.exit(f"no notebook {', '.join(unknown) or 'at all'} in {folder}; there are: {', '.join(p.stem for p in every) or 'none'}")
    return chosen


def orphans(folder: Path) -> list[str]:
    """Sources without a rendered notebook, and rendered notebooks without a source."""
    sources, rendered = ({p.stem for p in folder.glob(f"*.{ext}")} for ext in ("py", "ipynb"))
    return [f"{s}.py has no {s}.ipynb: make render" for s in sorted(sources - rendered)] + [
        f"{s}.ipynb has no {s}.py" for s in sorted(rendered - sources)
    ]


def process(what: str, source: Path, out: Path) -> list[str]:
    """Run, render or check one notebook; return the complaints."""
    committed = source.with_suffix(".ipynb")
    if what == "check":
        if not committed.exists():
            return [f"{committed.name} is missing: make render"]
        old = nbformat.read(committed, as_version=4)
        if committed.stat().st_size > SIZE_LIMIT:
            return [f"{committed.name} has {committed.stat().st_size:,} bytes, more than {SIZE_LIMIT:,}: a hosting page may not show it"]
        if diff := stale(jupytext.read(source), old):  # no need to execute to know
            return [*diff, "to renew the committed notebook: make render"]
    nb, failure = execute(source)
    write(nb, out / "notebooks" / committed.name)
    if failure is not None:
        return complaint(failure)
    if what == "render":
        write(nb, committed)
    return differences(old, nb) if what == "check" else []


def complaint(failure: Exception) -> list[str]:
    """What the package says of an input, in its one line; of anything else the whole traceback, without colours."""
    if getattr(failure, "ename", "") in ("BadInput", "Unsupported"):
        return [f"{failure.ename}: {failure.evalue}"]
    return re.sub(r"\x1b\[[\d;]*m", "", str(failure)).splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "render", "check"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks", help="where the notebooks are (default: notebooks/)")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="where executed notebooks, figures and tables go (default: out/)")
    args = parser.parse_args()
    folder, out = args.folder.resolve(), args.out.resolve()
    # relative, so that no path of this machine gets into a committed output
    # notebooks run in their own folder; a path of the user's is meant from where make was called
    for name in ("K3LAB_CAPTURE", "K3LAB_LOG"):
        if name in os.environ:
            os.environ[name] = os.path.abspath(os.environ[name])
    os.environ |= {"K3LAB_STATIC": "1", "TRITON_INTERPRET": "1", "K3LAB_OUT": os.path.relpath(out, folder), "JUPYTER_PREFER_ENV_PATH": "1"}
    # on the CPU, also where there is a GPU: committed outputs must not depend on it
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    failed = 0
    chosen = select(folder, args.names)
    for source in chosen:
        for stale in out.glob(f"{source.stem.split('_')[0]}_*.*"):
            stale.unlink()
        began = time.monotonic()
        complaints = process(args.what, source, out)
        failed += bool(complaints)
        verdict = "DIFFERS" if complaints and args.what == "check" else "FAILED" if complaints else "ok"
        print(f"{source.stem}: {verdict}, {time.monotonic() - began:.0f} s", flush=True)
        print("\n".join(complaints), end="\n" if complaints else "", flush=True)
    lost = orphans(folder) if args.what == "check" and not args.names else []
    print("\n".join(lost), end="\n" if lost else "")
    if args.what != "check":
        print(f"executed notebooks in {os.path.relpath(out / 'notebooks')}, figures and tables in {os.path.relpath(out)}")
    print(f"notebooks: {len(chosen) - failed} passed, {failed + len(lost)} failed")
    return int(failed + len(lost) > 0)


if __name__ == "__main__":
    sys.exit(main())
