"""Notebook 01, live: a batch made of a capture's sequences, a route, a padding, and where the tensor of a stage is not finite.

nan_panel.show(call, name)                 pictures for the values that the notebook discusses, and controls in a live session
fig, frame = nan_panel.draw(call, name, decodes=5, prefill=200, route="chunk_all", padding="nan", tensor="u")
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from k3lab import figures
from k3lab.errors import BadInput
from k3lab.explore import explore
from k3lab.kda import stages
from k3lab.kda.call import KdaCall
from k3lab.kda.layer import ROUTES, Launch, StepResult, kda_layer_step
from k3lab.race_figures import legend
from k3lab.shapes import CHUNK

if TYPE_CHECKING:
    from ipywidgets import Widget

# the position is the code in a map, and the greatest code wins where several values share a pixel
VALUES = ("finite", "not in this kernel", "infinite", "NaN")
COLORS = ("#e8eef4", "#b8b8b8", "#000000", "#D55E00")
TENSORS = {t: "input" for t in ("q", "k", "v", "raw_g")} | {t: s for s in stages.STAGES for t in stages.STAGE_OUTPUTS[s]}
EVERYWHERE = ("q", "k", "v", "raw_g", "o", "final_state")  # the others are of the chunk kernel alone
ZOOMS = ("whole", "first", "selected")
BATCHES = ("made", "captured")
NEAR = (10, 6)  # rows and channels around the first value that is not finite; few enough to print the values
PIXELS = 600  # rows and channels of a map that are drawn; more share pixels
MOST_DECODES, LONGEST = 128, 512


def make_batch(call: KdaCall, decodes: int, prefill: int) -> KdaCall:
    """A decode-first batch out of a call's own sequences: `decodes` of one token, then one of `prefill` tokens if that is not 0.

    A decode is a length-1 sequence of the call with its state (where it has none, the first token of a sequence, with the state that
    it starts from); more than there are repeat in turn. The prefill is the head of the longest sequence, with its state; a longer one
    goes on with the tokens of the sequences behind it. Speculative and null-slot sequences are left out.
    Raises BadInput for counts that are out of range, an empty batch, or a call in which every sequence is left out.
    """
    if not 0 <= decodes <= MOST_DECODES or not 0 <= prefill <= LONGEST:
        raise BadInput(f"batch: {decodes} decodes and a prefill of {prefill}; expected 0 to {MOST_DECODES} and 0 to {LONGEST} tokens")
    if decodes + prefill == 0:
        raise BadInput("batch: no decode and no prefill token is nothing to run; raise one of the two")
    lengths = call.lengths.tolist()
    spec = [False] * len(lengths) if call.spec_mask is None else call.spec_mask.tolist()
    usable = [n for n in range(len(lengths)) if not spec[n] and (call.state_indices is None or int(call.state_indices[n]) > 0)]
    if not usable:
        raise BadInput("batch: every sequence of this capture is speculative or in the null slot; none is left to make a batch of")
    single = [n for n in usable if lengths[n] == 1] or usable
    longest = max(usable, key=lambda n: lengths[n])
    sequences = [single[i % len(single)] for i in range(decodes)] + [longest] * (prefill > 0)
    cu = call.cu_seqlens.long().tolist()
    behind = usable[usable.index(longest) :] + usable[: usable.index(longest)]
    tokens = [row for n in behind for row in range(cu[n], cu[n + 1])]
    rows = torch.tensor([cu[n] for n in sequences[:decodes]] + [tokens[i % len(tokens)] for i in range(prefill)])
    at = torch.tensor(sequences)

    def take(name: str, index: torch.Tensor) -> torch.Tensor | None:
        x = getattr(call, name)
        return None if x is None else x[index.to(x.device)]

    made = torch.tensor([0, *np.cumsum([1] * decodes + [prefill] * (prefill > 0)).tolist()], dtype=call.cu_seqlens.dtype)
    return replace(
        call, cu_seqlens=made.to(call.q.device), num_decodes=decodes, spec_mask=None, num_accepted_tokens=None, state_indices=None,
        **{n: take(n, rows) for n in ("q", "k", "v", "raw_g", "raw_beta", "output_gate")},
        **{n: take(n, at) for n in ("initial_state", "has_initial_state")},
    )  # fmt: skip


def one_head(call: KdaCall, head: int) -> KdaCall:
    """The call of one head alone; heads do not read each other. Raises BadInput for a head that is not there."""
    if not 0 <= head < call.q.shape[1]:
        raise BadInput(f"head: {head} is not one of the {call.q.shape[1]} heads of this capture (0 is the first)")
    axis = {"A_log": 0, "dt_bias": 0} | dict.fromkeys(("q", "k", "v", "raw_g", "raw_beta", "output_gate", "initial_state"), 1)
    parts = {n: getattr(call, n) for n in axis}
    return replace(call, **{n: None if x is None else x.narrow(axis[n], head, 1) for n, x in parts.items()})


@dataclass(frozen=True, eq=False)
class Map:
    """A tensor over a batch: values and codes [rows, channels], the first row of every sequence and one past, its kernel."""

    values: np.ndarray
    codes: np.ndarray
    edges: list[int]
    kernels: list[str]

    @property
    def first(self) -> tuple[int, int] | None:
        """Row and channel of the first value that is not finite."""
        return _first(self.codes >= 2)


@lru_cache(maxsize=2)
def _step(call: KdaCall, batch: str, decodes: int, prefill: int, route: str, padding: str, head: int) -> tuple[KdaCall, StepResult]:
    """The step of one head, kept: moving through the stages and rows of one batch computes nothing."""
    made = call if batch == "captured" else make_batch(call, decodes, prefill)
    made = one_head(made, head)
    return made, kda_layer_step(made, route, padding=padding)


def _rows(launch: Launch, tensor: str) -> tuple[torch.Tensor, list[int]]:
    """The values [rows, channels] of a launch's tensor of one head, and how many rows each of its sequences has."""
    x = (getattr(launch.call, tensor) if TENSORS[tensor] == "input" else launch.tensors[tensor])[:, 0]
    lengths = launch.call.lengths
    sizes = {"h": (lengths + CHUNK - 1) // CHUNK * x.shape[-2], "final_state": torch.full_like(lengths, x.shape[-2])}.get(tensor, lengths)
    return x.flatten(0, -2), sizes.tolist()


@lru_cache(maxsize=2)
def _map(call: KdaCall, batch: str, decodes: int, prefill: int, route: str, padding: str, head: int, tensor: str) -> Map:
    """The map of a tensor. A sequence that lacks it (another kernel, a null slot) has a row of code 1 per token."""
    made, result = _step(call, batch, decodes, prefill, route, padding, head)
    parts: list = [None] * made.num_sequences
    kernels = ["none"] * made.num_sequences
    for launch in result.launches:
        here = TENSORS[tensor] == "input" or tensor in launch.tensors
        values, sizes = _rows(launch, tensor) if here else (None, None)
        split = values.float().cpu().split(sizes) if here else [None] * len(launch.sequences)
        for n, x in zip(launch.sequences, split, strict=True):
            parts[n], kernels[n] = x, launch.kernel
    width = next((x.shape[1] for x in parts if x is not None), 1)
    lengths = made.lengths.tolist()
    values = torch.cat([torch.zeros(n, width) if x is None else x for x, n in zip(parts, lengths, strict=True)]).numpy()
    codes = np.where(np.isnan(values), 3, np.where(np.isinf(values), 2, 0)).astype(np.int8)
    edges = [0, *np.cumsum([n if x is None else len(x) for x, n in zip(parts, lengths, strict=True)]).tolist()]
    for n, x in enumerate(parts):
        if x is None:
            codes[edges[n] : edges[n + 1]] = 1
    return Map(values, codes, edges, kernels)


def _first(bad: np.ndarray) -> tuple[int, int] | None:
    at = int(bad.argmax())
    return divmod(at, bad.shape[1]) if bad.flat[at] else None


def _frame(call: KdaCall, m: Map) -> pd.DataFrame:
    rows = []
    for n, (length, kernel) in enumerate(zip(call.lengths.tolist(), m.kernels, strict=True)):
        bad = m.codes[m.edges[n] : m.edges[n + 1]] >= 2
        kind = "decode" if n < call.num_decodes else "prefill"
        rows.append((n, kind, length, kernel, int(bad.sum()), int(bad.any(axis=1).sum()), *(_first(bad) or (-1, -1))))
    names = ["sequence", "kind", "length", "kernel", "values_not_finite", "rows_not_finite", "first_row", "first_channel"]
    return pd.DataFrame(rows, columns=names)


def draw(
    call: KdaCall,
    name: str = "capture",
    *,
    batch: str = "made",
    decodes: int = 5,
    prefill: int = 200,
    route: str = "chunk_all",
    padding: str = "nan",
    tensor: str = "u",
    head: int = 0,
    zoom: str = "whole",
    rows: tuple[int, int] = (0, 0),
    channels: tuple[int, int] = (0, 0),
) -> tuple[Figure, pd.DataFrame]:
    """A map of finite and other values: rows of the batch by channels of one head, for the tensor of a stage (torch stages).

    batch     "made": make_batch(call, decodes, prefill); "captured": the call as it is, decodes and prefill are not read
    tensor    a key of TENSORS. A row is a token; for final_state a V index of a sequence, for h a V index of a chunk's state
    zoom      "whole", "first" (around the first value that is not finite; the whole where there is none) or "selected"
    rows, channels   the window (first, last) where zoom is "selected", counted over the map
    Frame: one row per sequence: sequence, kind, length, kernel, values_not_finite, rows_not_finite (of this head), first_row and
    first_channel (-1 where all is finite; the row counted within the sequence).
    Raises BadInput for a name or number out of range, and for a route that the batch cannot take.
    """
    for what, value, allowed in (("batch", batch, BATCHES), ("tensor", tensor, tuple(TENSORS)), ("zoom", zoom, ZOOMS)):
        if value not in allowed:
            raise BadInput(f"{what}: {value!r} is not one of {', '.join(allowed)}")
    key = (call, batch, decodes, prefill, route, padding, head)
    made, _ = _step(*key)
    m = _map(*key, tensor)
    frame = _frame(made, m)
    window = _window(m.codes.shape, zoom, rows, channels, m.first)
    what = f"as captured, {made.num_sequences} sequences"
    if batch == "made":
        what = f"{decodes} decode{'s' * (decodes != 1)}" + f" and a prefill of {prefill}" * (prefill > 0)
    ran = f"{TENSORS[tensor]}, {name}: {what}; route {route}, padding {padding}; torch stages, CPU, undefined rows set to NaN"
    return _figure(_finding(frame, tensor, head), ran, m, window), frame


def _finding(frame: pd.DataFrame, tensor: str, head: int) -> str:
    bad = frame[frame["values_not_finite"] > 0]
    if bad.empty:
        there = frame if tensor in EVERYWHERE else frame[frame["kernel"] == "chunk"]
        chunk = "" if len(there) == len(frame) else " that the chunk kernel takes"
        return f"{tensor} of head {head}: finite in all {len(there)} sequences{chunk}" if len(there) else f"{tensor}: no sequence has one"
    f = bad.iloc[0]
    tokens = "1 token" if f["length"] == 1 else f"{f['length']} tokens"
    return (
        f"{tensor} of head {head}: {len(bad)} of {len(frame)} sequences not finite, first {f['kind']} {f['sequence']} "
        f"({tokens}) at row {f['first_row']}, channel {f['first_channel']}"
    )


def _window(shape: tuple[int, int], zoom: str, rows: tuple[int, int], channels: tuple[int, int], first: list[int] | None) -> tuple:
    """(row, one past, channel, one past) that are shown."""
    whole = (0, shape[0], 0, shape[1])
    if zoom == "selected":
        for what, (lo, hi), size in (("rows", rows, shape[0]), ("channels", channels, shape[1])):
            if not 0 <= lo <= hi < size:
                raise BadInput(f"{what}: {lo} to {hi} is not a range within 0 to {size - 1}, which this tensor has")
        return (rows[0], rows[1] + 1, channels[0], channels[1] + 1)
    if zoom == "whole" or first is None:
        return whole
    out = []
    for at, size, near in zip(first, shape, NEAR, strict=True):
        start = max(0, min(at - near // 3, size - near))
        out += [start, min(size, start + near)]
    return tuple(out)


def _figure(finding: str, ran: str, m: Map, window: tuple) -> Figure:
    """The window of the map, and beside it where in the whole map it lies."""
    codes, first = m.codes, m.first
    whole = (0, codes.shape[0], 0, codes.shape[1])
    ncols = 1 if window == whole else 2
    fig, axes = figures.new(finding, ran, (8.4, 3.6), 1, ncols, squeeze=False, width_ratios=[1, 2.6][-ncols:])
    for ax, shown in zip(axes[0], [whole, window][-ncols:], strict=True):
        _paint(ax, codes, shown)
        _name_rows(ax, m.edges, shown)
        ax.set(xlabel="channel", ylabel="sequence" if shown[1] - shown[0] > NEAR[0] else "sequence: row")
        if first and shown[0] <= first[0] < shown[1] and shown[2] <= first[1] < shown[3]:
            ax.plot(first[1], first[0], marker="*", color="white", markeredgecolor="black", markersize=11, linestyle="none", clip_on=False)
    if ncols == 2:
        r0, r1, c0, c1 = window
        axes[0, 0].add_patch(Rectangle((c0 - 0.5, r0 - 0.5), c1 - c0, r1 - r0, fill=False, edgecolor="black", linewidth=1.4, zorder=3))
        if r1 - r0 <= NEAR[0] and c1 - c0 <= NEAR[1]:
            _print_values(axes[0, 1], m, window)
    present = set(np.unique(codes).tolist()) | {0}
    handles = [Patch(facecolor=COLORS[i], edgecolor="#777777", linewidth=0.4, label=VALUES[i]) for i in sorted(present)]
    if first:
        handles.append(Line2D([], [], marker="*", color="white", markeredgecolor="black", markersize=10, linestyle="none", label="first"))
    legend(fig, len(handles), handles=handles)
    return fig


def _paint(ax: Axes, codes: np.ndarray, window: tuple) -> None:
    """The codes in a window; where there are more rows or channels than pixels, the greatest of a block, so that no NaN is lost."""
    r0, r1, c0, c1 = window
    part = codes[r0:r1, c0:c1]
    for axis in (0, 1):
        step = -(-part.shape[axis] // PIXELS)
        part = np.maximum.reduceat(part, range(0, part.shape[axis], step), axis=axis)
    extent = (c0 - 0.5, c1 - 0.5, r1 - 0.5, r0 - 0.5)
    ax.imshow(part, aspect="auto", cmap=ListedColormap(COLORS), vmin=0, vmax=3, interpolation="nearest", extent=extent)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.grid(False)


def _name_rows(ax: Axes, edges: list[int], window: tuple) -> None:
    """Sequences on the row axis, lines between them; in a small window every row by sequence and row."""
    r0, r1 = window[:2]
    inside = [n for n in range(len(edges) - 1) if edges[n] < r1 and edges[n + 1] > r0]
    if len(inside) <= 40:
        for n in inside[1:]:
            ax.axhline(edges[n] - 0.5, color="white", linewidth=0.8)
    if r1 - r0 <= NEAR[0]:
        of = {row: n for n in inside for row in range(edges[n], edges[n + 1])}
        ax.set_yticks(range(r0, r1), [f"{of[row]}: {row - edges[of[row]]}" for row in range(r0, r1)], fontsize=7)
        return
    ticks: list[tuple[float, str]] = []
    run: list[int] = []  # neighbours too thin for a label each
    for n in [*inside, None]:
        thin = n is not None and edges[n + 1] - edges[n] < 0.05 * (r1 - r0)
        if run and not thin:
            ticks.append(((edges[run[0]] + edges[run[-1] + 1] - 1) / 2, f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}"))
            run = []
        if thin:
            run.append(n)
        elif n is not None:
            ticks.append(((max(r0, edges[n]) + min(r1, edges[n + 1]) - 1) / 2, f"{n}"))
    apart = 0.05 * (r1 - r0)
    kept = [t for i, t in enumerate(ticks) if i == 0 or t[0] - ticks[i - 1][0] >= apart]
    ax.set_yticks([y for y, _ in kept], [label for _, label in kept], fontsize=8)


def _print_values(ax: Axes, m: Map, window: tuple) -> None:
    r0, r1, c0, c1 = window
    for row in range(r0, r1):
        for channel in range(c0, c1):
            code = m.codes[row, channel]
            text = "" if code == 1 else "NaN" if code == 3 else f"{m.values[row, channel]:.2g}"
            ax.text(channel, row + 0.32, text, ha="center", va="bottom", fontsize=6.5, color="white" if code == 2 else "black")


def show(call: KdaCall, name: str, shown: Sequence[Mapping[str, Any]]) -> None:
    """Pictures for the values in shown, and in a live session a panel; the file name of the capture is in every subtitle."""
    explore(
        partial(draw, call, name), shown, partial(controls, call, dict(shown[0])), "01_panel", partial(adapt, call),
        "k3lab.panels.nan_panel.draw(call, ",
    )  # fmt: skip


def controls(call: KdaCall, start: Mapping[str, Any]) -> dict[str, "Widget"]:
    """The widgets, at the values of start where it has them."""
    import ipywidgets as w

    wide = {"style": {"description_width": "7em"}, "layout": w.Layout(width="25em")}
    slider = {"continuous_update": False, **wide}
    tensors = [(f"{stage}: {tensor}", tensor) for tensor, stage in TENSORS.items()]
    batches = [("cut from the capture", "made"), ("as captured", "captured")]
    zooms = [("whole tensor", "whole"), ("around the first not finite", "first"), ("rows and channels below", "selected")]
    out = {
        "batch": w.Dropdown(options=batches, description="batch", **wide),
        "decodes": w.IntSlider(value=5, min=0, max=MOST_DECODES, description="decodes", **slider),
        "prefill": w.IntSlider(value=200, min=0, max=LONGEST, description="prefill length", **slider),
        "route": w.Dropdown(options=ROUTES, description="route", **wide),
        "padding": w.Dropdown(options=stages.PADDINGS, value="nan", description="padding", **wide),
        "tensor": w.Dropdown(options=tensors, value="u", description="stage", **wide),
        "head": w.IntSlider(value=0, min=0, max=call.q.shape[1] - 1, description="head", **slider),
        "zoom": w.Dropdown(options=zooms, description="zoom", **wide),
        "rows": w.IntRangeSlider(value=(0, 1), min=0, max=1, description="rows", **slider),
        "channels": w.IntRangeSlider(value=(0, 1), min=0, max=1, description="channels", **slider),
    }
    for key, value in start.items():
        out[key].value = value
    return out


def adapt(call: KdaCall, widgets: Mapping[str, "Widget"]) -> None:
    """Fit the window sliders to the map that is chosen, and switch off what the others make void."""
    v = {key: control.value for key, control in widgets.items()}
    for key in ("decodes", "prefill"):
        widgets[key].disabled = v["batch"] == "captured"
    for key in ("rows", "channels"):
        widgets[key].disabled = v["zoom"] != "selected"
    m = _map(call, v["batch"], v["decodes"], v["prefill"], v["route"], v["padding"], v["head"], v["tensor"])
    for key, size in zip(("rows", "channels"), m.codes.shape, strict=True):
        lo, hi = widgets[key].value
        fits = hi < size and v["zoom"] == "selected"
        widgets[key].max = size - 1
        widgets[key].value = (lo, hi) if fits else (0, size - 1)
