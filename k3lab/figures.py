"""Figures that can leave the lab: a finding as title, what ran below it, provenance at the foot, the same numbers as a table.

    fig, ax = figures.new("Every length that is no multiple of 64 is hit", "chunk_kda, torch stages, fp32, padding nan, CPU")
    figures.plot(ax, 0, x, y, label="chunk_all")
    figures.export(fig, frame, "nan_by_length")

Series differ by colour AND by marker, dash or hatch, so that grey-scale prints and colour-blind readers keep them apart.
"""

import io
import os
import re
import shlex
import textwrap
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from k3lab import provenance
from k3lab.errors import BadInput
from k3lab.files import write_files


@dataclass(frozen=True)
class Style:
    """Colour, and a second channel for each kind of mark."""

    color: str
    marker: str
    dash: str | tuple
    hatch: str


# Okabe and Ito's palette, black last: https://jfly.uni-koeln.de/color/
SERIES = (
    Style("#0072B2", "o", "solid", ""),
    Style("#D55E00", "s", "dashed", "///"),
    Style("#009E73", "^", "dashdot", "..."),
    Style("#CC79A7", "D", "dotted", "xxx"),
    Style("#E69F00", "v", (0, (5, 1, 1, 1, 1, 1)), "\\\\\\"),
    Style("#56B4E9", "P", (0, (8, 3)), "+++"),
    Style("#F0E442", "X", (0, (1, 3)), "ooo"),
    Style("#000000", "*", (0, (3, 1)), "---"),
)
DPI = 200  # twice the 100 that a page shows, so that a zoomed picture stays sharp
SMALLEST = 6.5  # points; 9 pixels at half size
INPUTS = ("K3LAB_CAPTURE", "K3LAB_LOG")
FOLD_AFTER = 12  # table rows that a PR comment shows unfolded
RC = {
    "figure.dpi": DPI, "savefig.dpi": DPI, "figure.facecolor": "white", "savefig.facecolor": "white", "axes.facecolor": "white",
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#e5e5e5", "axes.axisbelow": True, "legend.frameon": False, "lines.markersize": 4,
    "svg.hashsalt": "k3lab", "svg.fonttype": "path",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def new(finding: str, ran: str, size: tuple[float, float] = (7.5, 4.2), nrows: int = 1, ncols: int = 1, **subplots) -> tuple:
    """A figure and its axes, captioned: finding (what the picture shows) as title, ran (op, shape, dtype, N) as subtitle.

    size in inches without the caption, which is added; further keywords go to matplotlib's Figure.subplots. The figure is
    closed for pyplot, so a notebook shows it once, where a cell ends in it or display(fig) is called.
    """
    matplotlib.rcParams.update(RC)  # not a context: legends and annotations read it when they are added, after this returns
    fig = plt.figure(figsize=size, layout="constrained")
    axes = fig.subplots(nrows, ncols, **subplots)
    plt.close(fig)
    _caption(fig, finding, ran, provenance.versions())
    return fig, axes


def _wrap(text: str, inches: float, points: float) -> str:
    return textwrap.fill(text, max(1, int(inches * 72 / (0.62 * points))))  # 0.62 em: the mean advance of bold DejaVu Sans


def _caption(fig: Figure, finding: str, ran: str, source: str) -> None:
    width, height = fig.get_size_inches()
    texts = {"finding": (finding, 11), "ran": (ran, 8.5), "provenance": (source, 6.5)}
    blocks = {gid: (_wrap(text, width, points), points) for gid, (text, points) in texts.items()}
    inches = {gid: (text.count("\n") + 1) * 1.25 * points / 72 for gid, (text, points) in blocks.items()}
    above, below = inches["finding"] + inches["ran"] + 0.14, inches["provenance"] + 0.07
    total = height + above + below
    fig.set_size_inches(width, total)
    fig.get_layout_engine().set(w_pad=0.08, rect=(0, below / total, 1, height / total))
    second = total - 0.1 - inches["finding"]
    at = {"finding": (total - 0.06, "black"), "ran": (second, "#333333"), "provenance": (0.05, "#666666")}
    for gid, (text, points) in blocks.items():
        y, color = at[gid]
        fig.text(
            0.08 / width, y / total, text, gid=gid, size=points, color=color, family="DejaVu Sans", ha="left",
            weight="bold" if gid == "finding" else "normal", va="bottom" if gid == "provenance" else "top",
        )  # fmt: skip


def _caption_of(fig: Figure) -> dict[str, str]:
    found = {t.get_gid(): " ".join(t.get_text().split()) for t in fig.texts if t.get_gid() in ("finding", "ran", "provenance")}
    if len(found) < 3:
        raise BadInput("figure: has no finding, subtitle and provenance; make it with k3lab.figures.new(finding, ran)")
    return found


def finding_of(fig: Figure) -> str:
    """The title of a figure of `new`. Raises BadInput for another one."""
    return _caption_of(fig)["finding"]


def plot(ax: Axes, series: int, x, y, **kwargs):
    """ax.plot in the colour, marker and dash of a series, counted from 0."""
    s = SERIES[series % len(SERIES)]
    return ax.plot(x, y, **{"color": s.color, "marker": s.marker, "linestyle": s.dash} | kwargs)


def bar(ax: Axes, series: int, x, height, **kwargs):
    """ax.bar in the colour and hatch of a series, counted from 0."""
    s = SERIES[series % len(SERIES)]
    return ax.bar(x, height, **{"color": s.color, "hatch": s.hatch, "edgecolor": "white"} | kwargs)


def markdown_table(frame: pd.DataFrame) -> str:
    """The frame as a Markdown table, floats to 4 digits, missing ones empty; an index that has a name becomes the first columns."""
    frame = _flat(frame)

    def cell(x: object) -> str:
        text = "" if x is None or x is pd.NA or x != x else f"{x:.4g}" if isinstance(x, float) else str(x)
        return " ".join(text.replace("|", "\\|").split())

    rows = [list(frame.columns), ["---"] * frame.shape[1], *frame.itertuples(index=False, name=None)]
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in rows)


def _flat(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.reset_index() if any(n is not None for n in frame.index.names) else frame


def export(fig: Figure, frame: pd.DataFrame, name: str, out: str | os.PathLike | None = None, reproduce: str | None = None) -> list[Path]:
    """Write name.png (2x), name.svg, name.csv and name.md into out; return the paths. The .md is ready to paste into a PR: finding
    as heading, what ran, picture with alt text, the table (folded if long), provenance and how to reproduce it.

    out defaults to the environment variable K3LAB_OUT, else "out". reproduce is the command that makes the figure again; for a
    figure named NN_… it defaults to the run of that notebook. The exported footer names the commit as well; the
    figure itself is left as it was. The same figure, frame, versions and commit give the same bytes. Each file is written
    to a temporary name and renamed, and none is renamed before all are written.
    Raises BadInput for a name that is more than a file name, a figure without caption, something else than a frame, or a folder
    that cannot be made or written.
    """
    if not isinstance(frame, pd.DataFrame):
        raise BadInput(f"figure {name}: the numbers: is a {type(frame).__name__}, expected a pandas DataFrame")
    clash = set(frame.index.names) & set(frame.columns) - {None}
    if clash:
        raise BadInput(f"figure {name}: {sorted(clash)[0]!r} names both the index and a column; rename one")
    if not _NAME.fullmatch(name):
        raise BadInput(f"figure name {name!r}: use letters, digits, '_', '-' and '.', beginning with a letter or digit, 100 at most")
    caption = _caption_of(fig)
    folder = Path(os.environ.get("K3LAB_OUT", "out") if out is None else out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"{folder}: cannot be made a folder for figures: {e.strerror}") from e
    source = f"{caption['provenance']} · commit {provenance.commit()}"
    files = {
        f"{name}.{kind}": content
        for kind, content in (
            *_pictures(fig, source).items(),
            ("csv", _flat(frame).to_csv(index=False, lineterminator="\n").encode()),
            ("md", _snippet(caption, frame, name, source, _notebook_run(name) if reproduce is None else reproduce).encode()),
        )
    }
    return write_files(folder, files)


def _pictures(fig: Figure, source: str) -> dict[str, bytes]:
    """PNG and SVG bytes with `source` as footer, free of dates and library versions."""
    footer = next(t for t in fig.texts if t.get_gid() == "provenance")
    shown = footer.get_text()
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    pictures = {}
    try:
        footer.set_text(_wrap(source, fig.get_figwidth(), 6.5))
        with matplotlib.rc_context(RC):
            for kind, drop in metadata.items():
                buffer = io.BytesIO()
                fig.savefig(buffer, format=kind, dpi=DPI, metadata=drop)
                pictures[kind] = buffer.getvalue()
    finally:
        footer.set_text(shown)
    return pictures


def _notebook_run(name: str) -> str:
    """The command that runs the notebook of a figure NN_name, on the user's input where one was chosen; "" for other names."""
    number = re.match(r"\d\d(?=_)", name)
    if not number:
        return ""
    chosen = [f"{key}={shlex.quote(os.path.basename(os.environ[key]))} " for key in INPUTS if os.environ.get(key)]
    return f"{''.join(chosen)}make run NOTEBOOKS={number[0]}"


def _snippet(caption: dict[str, str], frame: pd.DataFrame, name: str, source: str, reproduce: str) -> str:
    """Markdown to paste into a PR: finding, picture with alt text, table (folded if long), provenance, how to reproduce."""
    table = markdown_table(frame)
    if len(frame) > FOLD_AFTER:
        table = f"<details><summary>{len(frame)} rows</summary>\n\n{table}\n\n</details>"
    alt = f"{caption['finding']} ({caption['ran']})".replace("[", "(").replace("]", ")")
    again = f"\nReproduce: `{reproduce}`\n" if reproduce else ""
    return f"### {caption['finding']}\n\n{caption['ran']}\n\n![{alt}]({name}.png)\n\n{table}\n{again}\n<sub>{source}</sub>\n"


def problems(fig: Figure) -> list[str]:
    """What would be lost at half size (100 dots an inch) or in grey; empty if nothing is.

    Text needs SMALLEST points (the provenance footer is for the full size) and must lie inside the picture. Two lines or two sets of bars
    of one axes whose greys (Rec. 709 luminance, 0 to 1) are closer than 0.15 must differ in marker, dash or hatch.
    """
    fig.draw_without_rendering()
    found = []
    box = fig.bbox
    ticks = {id(t) for ax in fig.axes for axis in (ax.xaxis, ax.yaxis) for t in axis.get_ticklabels(which="both")}  # drawn in view alone
    for text in fig.findobj(matplotlib.text.Text):
        if not text.get_visible() or not text.get_text().strip():
            continue
        if text.get_gid() != "provenance" and text.get_fontsize() < SMALLEST:
            found.append(f"text {text.get_text()[:30]!r} has {text.get_fontsize():g} points, less than {SMALLEST:g}")
        extent = text.get_window_extent()
        if (
            id(text) not in ticks
            and text.get_clip_box() is None
            and (extent.x0 < box.x0 - 2 or extent.x1 > box.x1 + 2 or extent.y0 < box.y0 - 2 or extent.y1 > box.y1 + 2)
        ):
            found.append(f"text {text.get_text()[:30]!r} leaves the picture")
    for ax in fig.axes:
        marks = [(line.get_color(), (line.get_marker(), line.get_linestyle()), line.get_label()) for line in ax.lines]
        marks += [
            (b[0].get_facecolor(), (b[0].get_hatch(),), b.get_label()) for b in ax.containers if isinstance(b, BarContainer) and b.patches
        ]
        named = [m for m in marks if not str(m[2]).startswith("_")]  # matplotlib names a mark without a label "_child0"
        found += [
            f"{a[2]!r} and {b[2]!r} are alike in grey"
            for a, b in combinations(named, 2)
            if a[1] == b[1] and abs(_grey(a[0]) - _grey(b[0])) < 0.15
        ]
    return found


def _grey(color: object) -> float:
    r, g, b = matplotlib.colors.to_rgb(color)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
