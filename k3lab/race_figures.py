"""The figures of notebook 02: what compiled code does with LDS, each a pure function of rows or of a compiled kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from k3lab import figures
from k3lab.errors import BadInput
from k3lab.races.controls import REPORTED, SILENT
from k3lab.races.kernel import Kernel, standard_input
from k3lab.races.lds import findings, run, sufficient_waits
from k3lab.races.matrix import INPUTS, VERDICTS, verdict_table
from k3lab.races.order import NEVER, order, races, readers, uninitialised

RACE, UNINITIALISED, ORDERED, ERROR = "#D55E00", "#F4C56A", "#e8eef4", "#b8b8b8"
COLOR = {"ordered": ORDERED, "uninitialised": UNINITIALISED, "race": RACE, "error": ERROR}
LETTER = {"ordered": "", "uninitialised": "U", "race": "R", "error": "?"}
TILE_BYTES = 64 * 64 * 2  # one [BT, BV] tile of bf16


def draw_grid(ax: Axes, verdicts: np.ndarray, texts: np.ndarray) -> None:
    """Cells by verdict: colour, and a letter for grey-scale prints."""
    codes = np.vectorize(VERDICTS.index)(verdicts)
    ax.imshow(codes, aspect="auto", cmap=ListedColormap([COLOR[v] for v in VERDICTS]), vmin=0, vmax=3, interpolation="nearest")
    for (y, x), text in np.ndenumerate(texts):
        weight = "bold" if verdicts[y, x] == "race" else "normal"
        ax.text(x, y, text, ha="center", va="center", fontsize=8, weight=weight, color="white" if verdicts[y, x] == "race" else "black")
    for edge in range(1, verdicts.shape[0]):
        ax.axhline(edge - 0.5, color="white", linewidth=1.2)
    for edge in range(1, verdicts.shape[1]):
        ax.axvline(edge - 0.5, color="white", linewidth=1.2)
    ax.grid(False)
    ax.tick_params(length=0)


def legend(fig: Figure, ncols: int, **legend) -> None:
    """A legend in a strip of its own between the axes and the provenance line."""
    engine = fig.get_layout_engine()
    x, y, width, height = engine.get()["rect"]
    strip = 0.32 / fig.get_figheight()
    engine.set(rect=(x, y + strip, width, height - strip))
    fig.legend(loc="lower center", bbox_to_anchor=(0.5, y), ncols=ncols, fontsize=8, **legend)


def verdict_legend(fig: Figure, present: set) -> None:
    words = {"ordered": "ordered", "uninitialised": "U: reads LDS that nothing wrote", "race": "R: race", "error": "?: not analysed"}
    handles = [Patch(facecolor=COLOR[v], edgecolor="#777777", linewidth=0.4, label=words[v]) for v in VERDICTS if v in present]
    legend(fig, 4, handles=handles)


def race_card_figure(rows: pd.DataFrame, ran: str) -> tuple[Figure, pd.DataFrame]:
    """Verdict per config and input, a panel per pointer_range; a race says how many pairs of instructions race.

    rows: of one Triton version, target, async setting and padding. Frame: pointer_range, config, input, verdict, race,
    uninitialised, enough (the waits that would do).
    """
    if rows[["triton", "target", "async", "padding"]].drop_duplicates().shape[0] != 1:
        raise BadInput("race card: select rows of one Triton version, target, async setting and padding")
    frame = rows[["pointer_range", "warps", "stages", "input", "verdict"]].copy()
    for kind in ("race", "uninitialised"):
        frame[kind] = rows[kind].fillna(0).astype(int) if kind in rows else 0
    waits = rows["waits"] if "waits" in rows else pd.Series([None] * len(rows), index=rows.index)
    frame["enough"] = [", ".join(f"{w['counter']}({w['enough']})" for w in x) if isinstance(x, list) else "" for x in waits]
    frame["config"] = [f"w{w}s{s}" for w, s in zip(frame["warps"], frame["stages"], strict=True)]
    frame = frame.sort_values(["pointer_range", "warps", "stages"]).reset_index(drop=True)
    panels = [p for p in (False, True) if p in set(frame["pointer_range"])]
    inputs, configs = [i for i in INPUTS if i in set(frame["input"])], list(dict.fromkeys(frame["config"]))
    racy = {p: frame[(frame["pointer_range"] == p) & (frame["verdict"] == "race")] for p in panels}
    finding = "; ".join(
        f"pointer_range {'on' if p else 'off'}: {part['config'].nunique()} of {len(configs)} configs race" for p, part in racy.items()
    )
    fig, axes = figures.new(
        finding, f"{ran}; R n: n racing pairs of instructions; no card was used", (7.5, 0.28 * len(configs) + 0.9), 1, len(panels),
        squeeze=False, sharey=True,
    )  # fmt: skip
    for ax, p in zip(axes[0], panels, strict=True):
        part = frame[frame["pointer_range"] == p].set_index(["config", "input"])
        verdicts = np.array([[part.loc[(c, i), "verdict"] for i in inputs] for c in configs])
        count = np.array([[part.loc[(c, i), "race"] for i in inputs] for c in configs])
        texts = np.array([[LETTER[v] + (f" {n}" if v == "race" else "") for v, n in zip(*line, strict=True)]
                          for line in zip(verdicts, count, strict=True)])  # fmt: skip
        draw_grid(ax, verdicts, texts)
        ax.set_xticks(range(len(inputs)), inputs)
        ax.set_yticks(range(len(configs)), configs)
        ax.set_title(f"pointer_range {'on' if p else 'off'}", loc="left")
    verdict_legend(fig, set(frame["verdict"]))
    return fig, frame.drop(columns=["warps", "stages"])


def versions_figure(rows: pd.DataFrame, ran: str) -> tuple[Figure, pd.DataFrame]:
    """Worst verdict over the inputs per Triton version and config, a panel per (pointer_range, padding)."""
    table = verdict_table(rows, by=("pointer_range", "padding", "triton"))
    panels = list(dict.fromkeys(zip(*(table.index.get_level_values(n) for n in ("pointer_range", "padding")), strict=True)))
    racy = (table == "race").any(axis=1).groupby("triton").any()
    clean = ", ".join(v for v, r in racy.items() if not r)
    finding = f"Every version but {clean} has racy configs" if clean else "Every version has racy configs"
    ncols = 2 if len(panels) > 1 else 1
    nrows = -(-len(panels) // ncols)
    versions = table.index.get_level_values("triton").nunique()
    fig, axes = figures.new(
        f"{finding}, all of them without pointer_range" if not _races_with(table) else finding,
        f"{ran}; worst verdict over the inputs {', '.join(dict.fromkeys(rows['input']))}; no card was used",
        (7.5, nrows * (0.27 * versions + 0.55) + 0.3), nrows, ncols, squeeze=False, sharex=True, sharey=True,
    )  # fmt: skip
    for ax, (p, padding) in zip(axes.flat, panels, strict=False):
        part = table.loc[(p, padding)]
        verdicts = part.fillna("error").to_numpy()
        draw_grid(ax, verdicts, np.vectorize(LETTER.get)(verdicts))
        ax.set_xticks(range(len(part.columns)), part.columns, fontsize=7.5)
        ax.set_yticks(range(len(part)), part.index)
        ax.set_title(f"pointer_range {'on' if p else 'off'}, masked rows {padding}", loc="left")
    verdict_legend(fig, set(table.stack()))
    return fig, table.reset_index()


def _races_with(table: pd.DataFrame) -> bool:
    return bool((table[table.index.get_level_values("pointer_range").astype(bool)] == "race").any(axis=None))


# ---------------------------------------------------------------- one tile's way through LDS


@dataclass(frozen=True)
class Timeline:
    """Events of every wave from the first copy of a tile to the last read of it.

    frame: wave, row, line, text, event (copy, wait, barrier, read), copy (number, -1 for waits and barriers), racing,
    uninitialised (a read takes bytes that nothing wrote), landed (the row at whose wait a copy retires; -1: later than shown)
    """

    frame: pd.DataFrame
    label: str


def timeline(kernel: Kernel, given: str, label: str, tile: str = "v") -> Timeline:
    """The copies of `tile`, the vmcnt waits, the barriers and the reads of what was copied, at one standard input."""
    whole = run(kernel, standard_input(kernel, "full"))  # executes every copy: the numbers of copies and the order of rows
    acc = run(kernel, standard_input(kernel, given))
    o = order(acc)
    racing = {x for pair in races(acc, o) for x in pair}
    stale = uninitialised(acc, o)
    who = readers(acc, o)
    copies = {n for n, a in enumerate(acc.all) if a.kind == "dma" and a.tile == tile}
    reads = {r for c in copies for r in who[c]}
    if not copies or not reads:
        raise BadInput(f"{label}: no asynchronous copy of tile {tile!r} that is read")
    place = {ins.index: at for at, (_, ins, _) in enumerate(whole.steps[0])}
    dmas = sorted({a.instruction.index for a in whole.all if a.kind == "dma" and a.tile == tile}, key=place.__getitem__)
    per_copy = TILE_BYTES // (acc.all[min(copies)].width * 64 * kernel.warps)
    copy_of = {index: at // per_copy for at, index in enumerate(dmas)}
    source = {r: copy_of[acc.all[c].instruction.index] for c in copies for r in who[c]}
    first = min(place[acc.all[c].instruction.index] for c in copies)
    last = max(place[acc.all[r].instruction.index] for r in reads)
    events = []
    for wave, steps in enumerate(acc.steps):
        mine: list[dict] = []
        for queue, ins, n in steps:
            at = place.get(ins.index, -1)
            if not first <= at <= last:
                continue
            event = {"wave": wave, "row": at, "line": ins.line, "text": ins.text, "copy": -1, "landed": -1}
            event |= {"racing": n in racing, "uninitialised": n in stale}
            if n in copies:
                landed = place.get(steps[o.done_step[n]][1].index, -1) if o.done[n] < NEVER else -1
                mine.append(event | {"event": "copy", "copy": copy_of[ins.index], "landed": landed})
            elif n in reads and mine and mine[-1]["event"] == "read" and mine[-1]["copy"] == source[n]:
                mine[-1]["racing"] |= n in racing
                mine[-1]["uninitialised"] |= n in stale
            elif n in reads:
                mine.append(event | {"event": "read", "copy": source[n]})
            elif queue == "s_barrier" or (queue == "s_waitcnt" and "vmcnt" in ins.mods):
                mine.append(event | {"event": "wait" if queue == "s_waitcnt" else "barrier"})
        events += mine
    frame = pd.DataFrame(events)[["wave", "row", "line", "text", "event", "copy", "racing", "uninitialised", "landed"]]
    row_of = {at: row for row, at in enumerate(sorted(frame["row"].unique()))}
    frame["landed"] = [row_of.get(at, -1) for at in frame["landed"]]
    frame["row"] = frame["row"].map(row_of)
    return Timeline(frame, label)


def timelines_figure(timelines: Sequence[Timeline], finding: str, ran: str) -> tuple[Figure, pd.DataFrame]:
    """Assembly side by side, a panel per timeline: rows are instructions, columns waves, a bar is a copy in flight."""
    rows = max(t.frame["row"].max() + 1 for t in timelines)
    size = (8.4, 0.3 * rows + 1.0)
    fig, axes = figures.new(finding, f"{ran}; bar: copy in flight, until the wait that retires it", size, 1, len(timelines), squeeze=False)
    for ax, t in zip(axes[0], timelines, strict=True):
        draw_timeline(ax, t)
    event_legend(fig, [t.frame for t in timelines])
    return fig, pd.concat([t.frame.assign(build=t.label) for t in timelines], ignore_index=True)


def event_legend(fig: Figure, frames: Sequence[pd.DataFrame]) -> None:
    """What the marks of draw_timeline mean."""
    style = {"linestyle": "none", "markersize": 6}
    handles = [
        Line2D([], [], marker="s", color=figures.SERIES[0].color, label="copy into LDS", **style),
        Line2D([], [], marker="v", color=figures.SERIES[2].color, label="read from LDS", **style),
        Line2D([], [], marker="X", color=RACE, label="racing", **style),
        Line2D([], [], color="black", linewidth=2, label="s_barrier"),
        Patch(facecolor="#fff3c4", edgecolor="#999999", linewidth=0.5, label="s_waitcnt vmcnt"),
    ]
    if any(f["uninitialised"].any() for f in frames):
        handles.insert(3, Line2D([], [], marker="$U$", color="black", label="read unwritten", **style))
    legend(fig, len(handles), handles=handles)


def draw_timeline(ax: Axes, t: Timeline) -> None:
    """One timeline on an axes: rows are instructions, columns waves, a bar is a copy in flight."""
    waves, last = t.frame["wave"].max() + 1, t.frame["row"].max()
    copies = sorted(t.frame[t.frame["event"] == "copy"]["row"].unique())
    for e in t.frame.itertuples():
        if e.event == "copy":
            x = e.wave + min(0.16, 0.9 / len(copies)) * (copies.index(e.row) - (len(copies) - 1) / 2)
            color = RACE if e.racing else figures.SERIES[0].color
            end = e.landed if e.landed >= 0 else last + 0.45
            ax.plot([x, x], [e.row, end], color=color, linewidth=2.6, alpha=0.55, solid_capstyle="butt", zorder=2)
            ax.plot([x], [e.row], marker="X" if e.racing else "s", color=color, markersize=6, zorder=3)
        elif e.event == "read":
            ax.plot([e.wave], [e.row], marker="X" if e.racing else "v", color=RACE if e.racing else figures.SERIES[2].color, markersize=8,
                    zorder=3)  # fmt: skip
            if e.uninitialised:
                ax.plot([e.wave + 0.25], [e.row], marker="$U$", color="black", markersize=6, zorder=3)
        elif e.event == "wait":
            ax.barh(e.row, 1, left=e.wave - 0.5, height=0.9, color="#fff3c4", edgecolor="#999999", linewidth=0.3, zorder=0)
        else:
            ax.plot([e.wave - 0.5, e.wave + 0.5], [e.row, e.row], color="black", linewidth=2, zorder=1)
    labels = t.frame.drop_duplicates("row").sort_values("row")
    ax.set_yticks(labels["row"], [_row_label(e) for e in labels.itertuples()], fontsize=6.5, family="DejaVu Sans Mono")
    ax.set_xticks(range(waves), [f"wave {w}" for w in range(waves)], fontsize=8)
    ax.set(xlim=(-0.5, waves - 0.5), ylim=(last + 0.5, -0.5))
    ax.set_title(t.label, loc="left")
    ax.grid(False)
    ax.tick_params(length=0)


def _row_label(e) -> str:
    what = {"copy": f"copy {e.copy}: ", "read": f"read {e.copy}: "}.get(e.event, "")
    text = " ".join(e.text.split()[:1]) if e.event in ("copy", "read") else e.text.replace("s_waitcnt ", "")
    return f"{what}{text}  {e.line}"


def stale_frame(kernel: Kernel, given: str) -> pd.DataFrame:
    """What lies in the bytes that a racing read may take too early: one row per content, with its bytes.

    "of this workgroup": the tile that it wrote there before the racing copy; "of an earlier one": the tile that the kernel
    leaves there at its end, if the workgroup before was one of the same kernel and input.
    """
    acc = run(kernel, standard_input(kernel, given))
    o = order(acc)
    racing = 0
    first: dict[int, int] = {}  # earliest barrier epoch of a racing copy, by the bits that race
    for x, y in races(acc, o):
        bits = acc.bits[x] & acc.bits[y]
        racing |= bits
        first[bits] = min(first.get(bits, NEVER), o.issue[x])
    writes = sorted((n for n, a in enumerate(acc.all) if a.kind != "read"), key=lambda n: (o.issue[n], acc.step[n]))
    held: dict[str, int] = {}
    for when in ("an earlier one", "this workgroup"):
        for n in writes:
            late = 0
            if when == "this workgroup":
                for bits, epoch in first.items():
                    late |= bits if o.issue[n] >= epoch else 0
            mine = acc.bits[n] & racing & ~late
            name = f"{acc.all[n].tile or '?'} of {when}"
            for other in held:
                held[other] &= ~mine
            held[name] = held.get(name, 0) | mine
    unknown = racing
    for bits in held.values():
        unknown &= ~bits
    held["never written"] = unknown
    rows = [(name, bits.bit_count() * acc.unit) for name, bits in held.items() if bits]
    return pd.DataFrame(rows, columns=["content", "bytes"]).sort_values("bytes", ascending=False, ignore_index=True)


# ---------------------------------------------------------------- the wait that suffices, and the controls


def waits_frame(kernel: Kernel, inputs: Sequence[str] = INPUTS) -> pd.DataFrame:
    """Racing pairs left when the wait that a race blames first is given other values, down to 0, by re-analysis of the same code.

    One row per (input, value): line, counter, built (the value as compiled), value, pairs. Inputs without a race are left out.
    """
    rows = []
    for name in inputs:
        acc = run(kernel, standard_input(kernel, name))
        fixes = [f for f in sufficient_waits(acc, findings(acc, order(acc))) if f.allows is not None]
        for fix in fixes[:1]:
            for value in range(fix.allows, -1, -1):
                patched = order(acc, {fix.instruction.index: {**fix.instruction.mods, fix.counter: value}})
                left = sum(f.kind == "race" for f in findings(acc, patched))
                rows.append((name, fix.instruction.line, fix.counter, fix.allows, value, left))
    return pd.DataFrame(rows, columns=["input", "line", "counter", "built", "value", "pairs"])


def waits_figure(frame: pd.DataFrame, ran: str) -> Figure:
    """The frame of waits_frame: racing pairs left against the value of the wait, a series per input."""
    if frame.empty:
        raise BadInput("waits: no input has a race that blames a wait")
    enough = {
        i: int(part[part["pairs"] == 0]["value"].max()) for i, part in frame.groupby("input", sort=False) if (part["pairs"] == 0).any()
    }
    counter, built = frame["counter"].iloc[0], int(frame["built"].iloc[0])
    fig, ax = figures.new(
        f"{counter}({built}) is too weak; enough is " + ", ".join(f"{v} at {i}" for i, v in enough.items()),
        f"{ran}; the wait at line {frame['line'].iloc[0]} patched to each value and the same code analysed again", (7.5, 2.8),
    )  # fmt: skip
    for n, (name, part) in enumerate(frame.groupby("input", sort=False)):
        shift = 0.05 * (n - 1.5)  # full and middle give the same counts
        figures.plot(ax, n, part["value"] + shift, part["pairs"], label=name)
    ax.axvline(built, color="#999999", linewidth=0.8, linestyle=(0, (2, 2)))
    ax.text(built, 0.98, " as compiled", transform=ax.get_xaxis_transform(), va="top", fontsize=8, color="#555555")
    ax.set_xticks(range(built, -1, -1), [f"{counter}({v})" for v in range(built, -1, -1)])
    ax.set(xlabel="value of the wait", ylabel="racing pairs left", xlim=(built + 0.6, -0.3), ylim=(-0.8, frame["pairs"].max() * 1.12))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(fontsize=8, ncols=2)
    return fig


def controls_figure(counts: pd.DataFrame, ran: str) -> Figure:
    """Mutants by outcome, a bar per (build, change). counts: build, change, outcome, mutants."""
    outcomes = [REPORTED, *SILENT]
    unknown = set(counts["outcome"]) - set(outcomes)
    if unknown:
        raise BadInput(f"controls: unknown outcome {', '.join(sorted(unknown))}")
    table = counts.pivot_table(index=["build", "change"], columns="outcome", values="mutants", aggfunc="sum", fill_value=0, sort=False)
    table = table.reindex(columns=outcomes, fill_value=0)
    total, reported = int(table.to_numpy().sum()), int(table[REPORTED].sum())
    barriers = table[table.index.get_level_values("change") == "barrier removed"]
    fig, ax = figures.new(
        f"{int(barriers[REPORTED].sum())} of {int(barriers.to_numpy().sum())} removed barriers are reported as a race",
        f"{ran}; {total} mutants of ordered builds, {reported} reported; each silent one has a class", (7.5, 0.3 * len(table) + 0.9),
    )  # fmt: skip
    y, left = np.arange(len(table)), np.zeros(len(table))
    for n, outcome in enumerate(outcomes):
        s = figures.SERIES[(1, 0, 2, 4, 5)[n]]
        ax.barh(y, table[outcome], left=left, color=s.color, hatch=s.hatch, edgecolor="white", linewidth=0.5, height=0.8, label=outcome)
        left += table[outcome].to_numpy()
    ax.set_yticks(y, [f"{b}: {c}" for b, c in table.index], fontsize=8)
    ax.set(xlabel="mutants", ylim=(len(table) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    legend(fig, 5)
    return fig


def controls_counts(sweeps: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """build, change, outcome, mutants from mutation sweeps by build label."""
    parts = [s.groupby(["change", "outcome"]).size().rename("mutants").reset_index().assign(build=b) for b, s in sweeps.items()]
    return pd.concat(parts, ignore_index=True)[["build", "change", "outcome", "mutants"]]
