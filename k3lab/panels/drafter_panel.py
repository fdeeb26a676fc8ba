"""Notebook 03, live: what a drafter accepts when it is fed a stream at an offset, and a log of one's own beside it.

summary = drafter_panel.load("../data/drafter_counts.csv")
drafter_panel.show(summary, shown)          pictures for the settings that the notebook discusses, and controls in a live session
fig, frame = drafter_panel.draw(summary, drafter="mixture", stream="prefix", offset=0, domain="all", log="server.log")
"""

import os
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from k3lab import figures
from k3lab.drafter import acceptance, logs
from k3lab.drafter_figures import STREAM_SERIES, legend
from k3lab.errors import BadInput
from k3lab.explore import explore

if TYPE_CHECKING:
    from ipywidgets import Widget

SERIES = STREAM_SERIES | {"zeros": 2}
LOG_SERIES = 7
ALL = "all"
KEYS = ["drafter", "stream", "offset"]
SHOWN = 3  # lines of a log of no known engine that its error quotes


def load(counts: str | os.PathLike, resamples: int = 2000) -> pd.DataFrame:
    """acceptance.summarize of a counts file by domain ("all" first), drafter, stream and offset, its seeds pooled.

    The counts of a prompt are summed over the training seeds, and prompts are resampled: an interval is over prompts, for these seeds.
    Raises BadInput for a file that holds no counts.
    """
    try:
        rows = pd.read_csv(counts)
    except (OSError, ValueError) as e:
        raise BadInput(f"{counts}: not a table of counts ({e}); data/train_drafters.py makes one") from e
    missing = [c for c in ("domain", "seed", "prompt", *KEYS) if c not in rows]
    if missing:
        raise BadInput(f"{counts}: no column {missing[0]!r}; data/train_drafters.py makes a table that has it")
    pooled = rows.drop(columns="seed")
    whole = acceptance.summarize(pooled, KEYS, resamples=resamples).assign(domain=ALL)
    summary = pd.concat([whole, acceptance.summarize(pooled, ["domain", *KEYS], resamples=resamples)], ignore_index=True)
    return summary.assign(seeds=rows["seed"].nunique())


def draw(
    summary: pd.DataFrame, *, drafter: str = "mixture", stream: str = "mixture", offset: int = 0, domain: str = ALL, log: str = ""
) -> tuple[Figure, pd.DataFrame]:
    """Left, tokens a round of one drafter by what it is fed, the chosen setting marked; right, its survival; both with 95% intervals.

    summary  of load; log  a path or the text of a log (k3lab.drafter.logs), drawn beside the counts with its diagnosis; "" for none
    Frame: of (counts or log), stream, offset, metric, position, value, low, high: what is drawn.
    Raises BadInput for a setting that was not counted, and for a log that cannot be read or is of no known engine.
    """
    part = summary
    for what, value in (("drafter", drafter), ("domain", domain)):
        if value not in set(summary[what]):
            raise BadInput(f"{what}: {value!r} is not one of {', '.join(summary[what].unique())}")
        part = part[part[what] == value]
    chosen = _at(part, stream, offset)
    if chosen.empty:
        there = ", ".join(f"{s} {o:+d}" for s, o in part[["stream", "offset"]].drop_duplicates().itertuples(index=False))
        raise BadInput(f"stream, offset: {stream} {offset:+d} was not counted; there are {there}")
    trained = _at(part, drafter, 0)
    report = _read(log) if log.strip() else None
    means = part[part["metric"] == "mean_emitted"]
    curves = [chosen] if (stream, offset) == (drafter, 0) else [chosen, trained]
    drawn = pd.concat([means, *(c[c["metric"] == "survival"] for c in curves)]).assign(of="counts")
    frame = pd.concat([drawn, *([_log_rows(report)] if report else [])], ignore_index=True)
    mean = _mean(chosen)
    finding = f"{drafter.capitalize()} drafter fed {stream}{_signed(offset)}, {domain} prompts: {_interval(mean)} tokens a round"
    if len(curves) == 2:
        finding += f", {mean['value'] / _mean(trained)['value']:.0%} of what it has as trained"
    ran = (
        f"tiny Kimi-K3, DFlash drafters of 7 drafts, {mean['prompts']:.0f} prompts, {mean['seeds']} seeds pooled, greedy, H200; "
        "bonus included; 95% intervals over prompts"
    )
    if report:
        finding += "; log: " + ("no mean" if report.totals is None or report.totals.mean_emitted is None else _log_mean(report))
        ran += f". Log: {report.diagnosis.text}"
    fig, (left, right) = figures.new(finding, ran, (8.4, 3.1), 1, 2, width_ratios=(1, 1.15))
    _means(left, means, (stream, offset), report)
    _survival(right, curves, stream, report)
    handles = [
        Line2D([], [], color="black", marker="o", markerfacecolor="none", markersize=10, linestyle="none", label="the setting chosen")
    ]
    if len(curves) == 2:
        handles.append(Line2D([], [], color="#666666", linestyle=(0, (1, 1)), label="as trained"))
    if report:
        handles.append(Line2D([], [], color="black", marker=figures.SERIES[LOG_SERIES].marker, label="the log"))
    legend(fig, handles, len(handles))
    columns = ["of", "stream", "offset", "metric", "position", "value", "low", "high"]
    return fig, frame[columns]


def _at(part: pd.DataFrame, stream: str, offset: int) -> pd.DataFrame:
    return part[(part["stream"] == stream) & (part["offset"] == offset)]


def _mean(rows: pd.DataFrame) -> pd.Series:
    return rows[rows["metric"] == "mean_emitted"].iloc[0]


def _signed(offset: int) -> str:
    return f" {offset:+d}" if offset else ""


def _interval(row: pd.Series) -> str:
    return f"{row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


# ---------------------------------------------------------------- a log


def _read(log: str) -> logs.LogReport:
    """What a log says. Raises BadInput if nothing in it was understood, with the first lines, and for what would never end."""
    if "\n" not in log:
        log = os.path.expanduser(log)
    try:
        status = os.stat(log)
    except (OSError, ValueError):  # a text, or a name that is not there
        status = None
    # a kernel has no standard input, and would wait for a pipe for ever
    if log == "-" or (status and not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode)):
        raise BadInput(f"log: {log} is no file; paste the lines, or give the path of a file")
    changed = status.st_mtime_ns if status else 0
    report = _report(log, changed)
    if not report.recognised:
        first = [f"line {number}: {text}" for u in report.unread for number, text, _ in u.first][:SHOWN]
        raise BadInput(f"log: {report.diagnosis.text} {' · '.join(first)}")
    return report


@lru_cache(maxsize=1)
def _report(log: str, _changed: int) -> logs.LogReport:
    """Kept: moving the other controls reads no log again."""
    return logs.read(log)


def _log_mean(report: logs.LogReport) -> str:
    t = report.totals
    return f"{t.mean_emitted:.2f}" + (f" ({t.low:.2f} to {t.high:.2f})" if t.low is not None else "")


def _log_rows(report: logs.LogReport) -> pd.DataFrame:
    t = report.totals
    if t is None or t.mean_emitted is None:
        return pd.DataFrame()
    mean = {"metric": "mean_emitted", "value": t.mean_emitted, "low": t.low, "high": t.high}
    rows = [mean, *({"metric": "survival", "position": j, "value": v} for j, v in enumerate(t.survival))]
    return pd.DataFrame(rows).assign(of="log", stream=report.mode or "not stated")


# ---------------------------------------------------------------- the picture


def _means(ax: Axes, means: pd.DataFrame, chosen: tuple[str, int], report: logs.LogReport | None) -> None:
    """A row per stream and offset, the mean with its interval; a ring around the chosen one, a line where the log's mean is."""
    rank = {s: i for i, s in enumerate(SERIES)}
    rows = sorted(means.to_dict("records"), key=lambda r: (rank.get(r["stream"], len(rank)), r["offset"]))
    for y, r in enumerate(rows):
        style = figures.SERIES[SERIES.get(r["stream"], 3)]
        ends = [[r["value"] - r["low"]], [r["high"] - r["value"]]]
        ax.errorbar(r["value"], y, xerr=ends, color=style.color, marker=style.marker, linestyle="none", capsize=3, markersize=5)
        if (r["stream"], r["offset"]) == chosen:
            ax.plot(r["value"], y, marker="o", markersize=13, markerfacecolor="none", markeredgecolor="black", linestyle="none")
    ax.set_yticks(range(len(rows)), [f"fed {r['stream']}{_signed(r['offset'])}" for r in rows])
    t = report.totals if report else None
    top = max(r["high"] for r in rows)
    if t is not None and t.mean_emitted is not None:
        ax.axvline(t.mean_emitted, color="black", linewidth=1.2, zorder=0)
        if t.low is not None:
            ax.axvspan(t.low, t.high, color="black", alpha=0.12, linewidth=0, zorder=0)
        ax.plot(t.mean_emitted, len(rows) - 0.5, marker=figures.SERIES[LOG_SERIES].marker, color="black", clip_on=False, markersize=7)
        top = max(top, t.mean_emitted)
    ax.set(xlabel="tokens emitted a round", xlim=(0.8, 1.05 * top), ylim=(len(rows) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)


def _survival(ax: Axes, curves: list[pd.DataFrame], stream: str, report: logs.LogReport | None) -> None:
    for n, curve in enumerate(curves):
        rows = curve[curve["metric"] == "survival"]
        x = rows["position"].astype(int)
        if n:
            ax.plot(x, rows["value"], color="#666666", linestyle=(0, (1, 1)), linewidth=1.5)
            ax.fill_between(x, rows["low"], rows["high"], color="#666666", alpha=0.2, linewidth=0)
        else:
            figures.plot(ax, SERIES.get(stream, 3), x, rows["value"])
            ax.fill_between(x, rows["low"], rows["high"], color=figures.SERIES[SERIES.get(stream, 3)].color, alpha=0.25, linewidth=0)
            ax.plot(x, rows["value"], marker="o", markersize=10, markerfacecolor="none", markeredgecolor="black", linestyle="none")
    if report and report.totals is not None and report.totals.survival:
        seen = report.totals.survival
        figures.plot(ax, LOG_SERIES, range(len(seen)), seen, linestyle="solid", markersize=7)
    ax.set(xlabel="draft position, from 0", ylabel="accepted here and before", ylim=(-0.02, 1.02))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


# ---------------------------------------------------------------- live


def show(summary: pd.DataFrame, shown: Sequence[Mapping[str, Any]]) -> None:
    """Pictures for the settings in shown, and in a live session a panel with a box and a file picker for a log."""
    explore(
        partial(draw, summary), shown, partial(controls, summary, dict(shown[0])), "03_panel", adapt,
        "k3lab.panels.drafter_panel.draw(summary, ",
    )  # fmt: skip


def controls(summary: pd.DataFrame, start: Mapping[str, Any]) -> dict[str, "Widget"]:
    """The widgets, at the values of start where it has them."""
    import ipywidgets as w

    from k3lab.panels.log_input import LogInput

    wide = {"style": {"description_width": "6em"}, "layout": w.Layout(width="16em")}
    out = {name: w.Dropdown(options=list(summary[name].unique()), description=name, **wide) for name in ("drafter", "stream")}
    offsets = sorted(int(o) for o in summary["offset"].unique())
    out["offset"] = w.Dropdown(options=[(f"{o:+d}" if o else "0", o) for o in offsets], value=0, description="offset", **wide)
    out["domain"] = w.Dropdown(options=list(summary["domain"].unique()), description="domain", **wide)
    out["log"] = LogInput()
    for key, value in start.items():
        out[key].value = value
    return out


def adapt(widgets: Mapping[str, "Widget"]) -> None:
    """Zeros are the same at every offset and were counted at 0."""
    zeros = widgets["stream"].value == "zeros"
    if zeros:
        widgets["offset"].value = 0
    widgets["offset"].disabled = zeros
