"""The figures of notebook 01: each a pure function of a call or a table that returns the figure and its numbers as a frame."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from k3lab import figures, nonfinite
from k3lab.errors import BadInput
from k3lab.kda import stages
from k3lab.kda.call import KdaCall
from k3lab.kda.layer import kda_layer_step, plan
from k3lab.shapes import CHUNK

FINITE, MASKED, INVERSE, RECOMPUTE, NOT_FINITE = "#e8eef4", "#b8b8b8", "#E69F00", "#0072B2", "#D55E00"
HATCH = {INVERSE: "////"}  # the second channel, for grey-scale prints
STAGE_COLOR = {"": FINITE, "inverse": INVERSE, "recompute_w_u": RECOMPUTE}
STAGE_LETTER = {"": "", "inverse": "i", "recompute_w_u": "w"}
PROVENANCE = (
    ("raw_g", "input"), ("k", "input"), ("v", "input"), ("g", "gate_cumsum"), ("Aqk", "intra"), ("Akk", "intra"), ("A", "inverse"),
    ("w", "recompute_w_u"), ("u", "recompute_w_u"), ("kg", "recompute_w_u"), ("v_new", "state"), ("final_state", "state"), ("o", "output"),
)  # fmt: skip


def _legend(ax: Axes, labels: Mapping[str, str]) -> None:
    patches = [Patch(facecolor=c, hatch=HATCH.get(c), edgecolor="#777777", linewidth=0.4, label=label) for c, label in labels.items()]
    _below(ax, handles=patches)


def _below(ax: Axes, **legend) -> None:
    """A legend under the axis label, at the same distance in inches whatever the height."""
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.75 / ax.figure.get_figheight()), ncols=3, fontsize=8, **legend)


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


def _kinds(call: KdaCall, sequences: pd.Series) -> np.ndarray:
    # between speculative rows a plain sequence of one token is a decode, wherever it stands
    single = np.array([call.spec_mask is not None and n == 1 for n in call.lengths.tolist()])
    return np.where((sequences < call.num_decodes) | single[sequences], "decode", "prefill")


def tiles_figure(call: KdaCall) -> tuple[Figure, pd.DataFrame]:
    """The 64-row tiles that a batch becomes in the chunk kernel by chunk_all: rows that exist, and rows that are masked.

    Frame: one row per tile with sequence, chunk, kind ("decode" or "prefill"), rows.
    """
    lengths = call.lengths.tolist()
    frame = pd.DataFrame(stages.chunk_index(call.cu_seqlens).tolist(), columns=["sequence", "chunk"])
    frame = frame[frame["sequence"].isin(chunked(call, "chunk_all"))].reset_index(drop=True)
    frame["kind"] = _kinds(call, frame["sequence"])
    frame["rows"] = [min(CHUNK, lengths[s] - c * CHUNK) for s, c in zip(frame["sequence"], frame["chunk"], strict=True)]
    masked = int((CHUNK - frame["rows"]).sum())
    kinds = frame.drop_duplicates("sequence")["kind"]
    fig, ax = figures.new(
        f"{int((frame['rows'] < CHUNK).sum())} of {len(frame)} tiles have masked rows: {masked} of {CHUNK * len(frame)} rows hold no token",
        f"route chunk_all: {int((kinds == 'decode').sum())} decodes and {int((kinds == 'prefill').sum())} prefills, "
        f"{int(frame['rows'].sum())} tokens; "
        "one bar per 64-row tile of one head",
        size=(7.5, max(2.4, 0.16 * len(frame) + 0.8)),
    )
    y = np.arange(len(frame))
    for kind, series, hatch in (("decode", 1, "xx"), ("prefill", 0, None)):
        at = (frame["kind"] == kind).to_numpy()
        ax.barh(y[at], frame["rows"][at], color=figures.SERIES[series].color, hatch=hatch, label=f"{kind} token rows", height=0.8)
    ax.barh(
        y, CHUNK - frame["rows"], left=frame["rows"], height=0.8, label="masked rows",
        color="white", edgecolor="#8a8a8a", hatch="////", linewidth=0.3,
    )  # fmt: skip
    ticks = [f"{s}.{c}" if lengths[s] > CHUNK else f"{s}" for s, c in zip(frame["sequence"], frame["chunk"], strict=True)]
    ax.set_yticks(y, ticks, fontsize=6.5)
    ax.set(xlabel="row of the tile", ylabel="sequence.chunk", xlim=(0, CHUNK), ylim=(len(frame) - 0.4, -0.6))
    ax.grid(False)
    _below(ax)
    return fig, frame


def routes_frame(call: KdaCall, routes: Sequence[str], paddings: Sequence[str] = stages.PADDINGS) -> pd.DataFrame:
    """What each route and padding does to each sequence, by the torch stages.

    One row per (sequence, route, padding): length, kind, first_stage ("" if finite), state_lost.
    """
    parts = []
    for route in routes:
        for padding in paddings:
            report = nonfinite.trace(call, kda_layer_step(call, route, padding=padding))
            first = report.stages.drop_duplicates("sequence").set_index("sequence")["stage"].to_dict()
            part = pd.DataFrame({"sequence": range(call.num_sequences), "length": call.lengths.tolist()})
            part["kind"] = _kinds(call, part["sequence"])
            part["route"], part["padding"] = route, padding
            part["first_stage"] = [first.get(n, "") for n in part["sequence"]]
            part["state_lost"] = part["sequence"].isin(report.state_lost)
            parts.append(part)
    return pd.concat(parts, ignore_index=True)


def routes_figure(frame: pd.DataFrame, ran: str) -> Figure:
    """The frame of routes_frame as a strip per (route, padding), coloured by the first stage that is not finite."""
    total = frame["sequence"].nunique()
    rows = list(frame[["route", "padding"]].drop_duplicates().itertuples(index=False, name=None))
    lost = {row: int((part["first_stage"] != "").sum()) for row, part in frame.groupby(["route", "padding"], sort=False)}
    worst = {r: max(n for (route, _), n in lost.items() if route == r) for r in dict.fromkeys(frame["route"])}
    finding = "NaN in masked rows: " + ", ".join(f"{r} loses {n}" for r, n in worst.items()) + f" of {total} sequences"
    zero = [n for (_, padding), n in lost.items() if padding == "zero"]
    fig, ax = figures.new(
        finding + (f"; zero padding loses {max(zero)}" if zero else ""),
        f"{ran}; torch stages, CPU; undefined rows are set to NaN here; colour and letter: the first stage that is not finite",
        size=(7.5, 0.32 * len(rows) + 1.1),
    )
    few = total <= 40
    for y, row in enumerate(rows):
        part = frame[(frame["route"] == row[0]) & (frame["padding"] == row[1])]
        for x, stage in zip(part["sequence"], part["first_stage"], strict=True):
            color = STAGE_COLOR.get(stage, NOT_FINITE)
            ax.barh(y, 0.92, left=x - 0.46, height=0.84, color=color, hatch=HATCH.get(color), edgecolor="white", linewidth=0)
            if stage and few:
                ax.text(x, y, STAGE_LETTER.get(stage, "?"), ha="center", va="center", fontsize=8, weight="bold",
                        color="black" if color == INVERSE else "white")  # fmt: skip
    if few:
        lengths = frame.drop_duplicates("sequence")["length"].tolist()
        ax.set_xticks(range(total), lengths, fontsize=7, rotation=90 if max(lengths) > 99 and total > 20 else 0)
    ax.set_yticks(range(len(rows)), [f"{r}, {p}" for r, p in rows])
    ax.set(xlabel="sequence, labelled by its tokens" if few else "sequence", xlim=(-0.6, total - 0.4), ylim=(len(rows) - 0.5, -0.5))
    ax.grid(False)
    _legend(ax, {FINITE: "finite", INVERSE: "i: inverse", RECOMPUTE: "w: recompute_w_u"})
    return fig


def length_map_figure(frame: pd.DataFrame) -> Figure:
    """The frame of nonfinite.length_map as a strip per padding, coloured by the first stage that is not finite."""
    paddings = list(dict.fromkeys(frame["padding"]))
    lengths = sorted(frame["length"].unique())
    hit = {p: int((part["first_stage"] != "").sum()) for p, part in frame.groupby("padding")}
    full = ", ".join(str(n) for n in lengths if n % CHUNK == 0)
    fig, ax = figures.new(
        f"NaN in masked rows reaches {max(hit.values())} of {len(lengths)} lengths, all but {full}"
        + (f"; zeros reach {hit['zero']}" if "zero" in hit else ""),
        f"chunk_kda, torch stages, CPU, fp32, single sequences of {lengths[0]} to {lengths[-1]} tokens; undefined rows are set to NaN here",
        size=(7.5, 0.4 * len(paddings) + 1.0),
    )
    for y, p in enumerate(paddings):
        stage_at = frame[frame["padding"] == p].set_index("length")["first_stage"]
        for stage, color in STAGE_COLOR.items():
            x = [n for n in lengths if stage_at[n] == stage]
            ax.bar(x, 0.8, bottom=y - 0.4, width=1.0, color=color, hatch=HATCH.get(color), edgecolor="white", linewidth=0)
    ax.set_yticks(range(len(paddings)), paddings)
    ax.set_xticks([n for n in (1, 16, 32, 48, 64, 80, 96, 112, 128) if lengths[0] <= n <= lengths[-1]])
    ax.set(xlabel="sequence length, tokens", ylim=(len(paddings) - 0.5, -0.5), xlim=(lengths[0] - 0.5, lengths[-1] + 0.5))
    ax.grid(False)
    _legend(ax, {FINITE: "finite", INVERSE: "first: inverse", RECOMPUTE: "first: recompute_w_u"})
    return fig


def chunked(call: KdaCall, route: str) -> list[int]:
    """Sequences that the route sends through the chunk kernel, shortest first."""
    sequences = [n for kernel, launched in plan(call, route) if kernel == "chunk" for n in launched]
    return sorted(sequences, key=lambda n: (int(call.lengths[n]), n))


def provenance_frame(call: KdaCall, route: str, padding: stages.Padding, sequence: int) -> pd.DataFrame:
    """One sequence's last tile through the stages of the chunk kernel.

    One row per (tensor, tile row): tensor, stage, row, value ("finite", "not finite", "masked"); the final state is one
    value shown on every row. Raises BadInput if the sequence does not go through the chunk kernel by this route.
    """
    result = kda_layer_step(call, route, padding=padding)
    launch = next((x for x in result.launches if x.kernel == "chunk" and sequence in x.sequences), None)
    if launch is None:
        raise BadInput(f"sequence {sequence} does not go through the chunk kernel by route {route!r}; pick another sequence or route")
    at = launch.sequences.index(sequence)
    cu = launch.call.cu_seqlens.long().tolist()
    n = cu[at + 1] - cu[at]
    rows = slice(cu[at] + (n - 1) // CHUNK * CHUNK, cu[at + 1])
    parts = []
    for name, stage in PROVENANCE:
        x = getattr(launch.call, name) if stage == "input" else launch.tensors[name]
        # one state per sequence: its verdict is shown on every row
        x = x[at][None].expand(CHUNK, *x[at].shape) if name == "final_state" else x[rows]
        bad = ~torch.isfinite(x.flatten(1)).all(1)
        value = ["not finite" if b else "finite" for b in bad.tolist()]
        parts += [(name, stage, i, v) for i, v in enumerate(value + ["masked"] * (CHUNK - len(value)))]
    return pd.DataFrame(parts, columns=["tensor", "stage", "row", "value"])


def provenance_figure(frame: pd.DataFrame, sequence: int, length: int, ran: str) -> Figure:
    """The frame of provenance_frame as a map of tile rows by tensor: where NaN enters and what it takes."""
    bad = frame[frame["value"] == "not finite"]
    finding = f"Sequence {sequence} ({_tokens(length)}): every stage is finite"
    if len(bad):
        taken = ", ".join(bad["tensor"].unique())
        finding = f"Sequence {sequence} ({_tokens(length)}): NaN enters at {bad.iloc[0]['stage']} and takes {taken}"
    codes = {"finite": 0, "not finite": 1, "masked": 2}
    grid = frame.pivot(index="row", columns="tensor", values="value")[[t for t, _ in PROVENANCE]].replace(codes).astype(int).to_numpy()
    fig, ax = figures.new(
        finding, f"{ran}; torch stages, CPU; rows of the last 64-row tile (final_state is one value, drawn over all rows)", size=(7.5, 3.6)
    )
    ax.imshow(grid, aspect="auto", cmap=ListedColormap([FINITE, NOT_FINITE, MASKED]), vmin=0, vmax=2, interpolation="nearest")
    for j, (tensor, _) in enumerate(PROVENANCE):
        if tensor in set(bad["tensor"]):
            ax.text(j, max(3.0, bad[bad["tensor"] == tensor]["row"].mean()), "NaN", ha="center", va="center", fontsize=7, weight="bold")
    edges = [j for j in range(1, len(PROVENANCE)) if PROVENANCE[j][1] != PROVENANCE[j - 1][1]]
    for j in edges:
        ax.axvline(j - 0.5, color="black", linewidth=0.8)
    ax.set_xticks(range(len(PROVENANCE)), [t for t, _ in PROVENANCE], fontsize=8)
    top = ax.secondary_xaxis("top")
    spans = list(pairwise([0, *edges, len(PROVENANCE)]))
    top.set_xticks([(a + b - 1) / 2 for a, b in spans], [PROVENANCE[a][1] for a, _ in spans], fontsize=7)
    top.tick_params(length=0)
    ax.set(ylabel="row of the tile")
    ax.grid(False)
    _legend(ax, {FINITE: "finite", NOT_FINITE: "not finite", MASKED: "masked: no token"})
    return fig


def _p_of_half(part: pd.DataFrame) -> float:
    """The p at which the measured rate passes half of that at p = 0, interpolated in log p; infinity if it never does."""
    part = part.sort_values("p")
    half = part["rate"].iloc[0] / 2
    above = part[part["p"] > 0]
    if above["rate"].min() > half:
        return float("inf")
    return float(np.exp(np.interp(-half, -np.minimum.accumulate(above["rate"].to_numpy()), np.log(above["p"].to_numpy()))))


def accuracy_figure(frame: pd.DataFrame, ran: str, published: Mapping[str, float], p_drop: float) -> Figure:
    """Exact match against the probability p that the undefined rows of one workgroup are NaN, one series a route.

    frame columns: series (legend label), p, rate, low, high (95% interval). p = 0 is drawn at the left edge, apart from the
    log scale. published: labelled horizontal lines; p_drop: the p that is marked.
    """
    positive = frame[frame["p"] > 0]
    halves = {label: _p_of_half(part) for label, part in frame.groupby("series", sort=False) if len(part) > 1}
    where = ", ".join(f"{label.split(',')[0]} at p = {p:.1e}" for label, p in sorted(halves.items(), key=lambda x: x[1]))
    flat = [part["rate"].iloc[0] for _, part in frame.groupby("series") if len(part) == 1]
    fig, ax = figures.new(
        f"Half the accuracy is lost by {where}" + (f"; zero padding keeps {min(flat):.1%}" if flat else ""), ran, size=(7.5, 3.8)
    )
    zero_at = positive["p"].min() / 4
    for i, (label, part) in enumerate(frame.groupby("series", sort=False)):
        part = part.sort_values("p")
        x = part["p"].where(part["p"] > 0, zero_at)
        if len(part) == 1:  # zero padding does not depend on p
            s = figures.SERIES[i]
            ax.axhline(part["rate"].iloc[0], color=s.color, linestyle=s.dash, label=label)
            continue
        figures.plot(ax, i, x, part["rate"], label=label)
        ax.vlines(x, part["low"], part["high"], color=figures.SERIES[i].color, linewidth=1)
    for label, rate in published.items():
        ax.axhline(rate, color="#555555", linewidth=0.8, linestyle=(0, (2, 2)))
        ax.text(1.0, rate - 0.01, f"{label} {rate:.4f} ", transform=ax.get_yaxis_transform(), ha="right", va="top", fontsize=7)
    ax.axvline(p_drop, color="#555555", linewidth=0.8, linestyle=(0, (2, 2)))
    ax.text(p_drop, 0.02, f" the PR's ratio\n at p = {p_drop:.1e}", fontsize=7, va="bottom")
    ax.set_xscale("log")
    decades = 10.0 ** np.arange(np.ceil(np.log10(positive["p"].min())), 1)
    ax.set_xticks([zero_at, *decades], ["0", *[f"{t:g}" for t in decades]])
    ax.minorticks_off()
    ax.set(xlabel="p: chance that the undefined rows of one workgroup are NaN in one launch", ylabel="exact match", ylim=(-0.02, 1.05))
    ax.legend(loc="lower left", fontsize=8)
    return fig
