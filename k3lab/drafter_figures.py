"""The figures of notebook 03: acceptance by stream and layer, what the streams are, and a log beside published figures.

Each is a pure function of a frame and returns (figure, frame): the numbers in the picture are the numbers in the table.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from k3lab import figures
from k3lab.drafter import acceptance
from k3lab.errors import BadInput

STREAMS = ("mixture", "prefix")
OFFSETS = (-1, 0, 1)
MEAN_NAMES = {"mean_emitted": "tokens emitted a round, bonus included", "mean_accepted": "drafts accepted a round, without the bonus"}
STREAM_SERIES = {"mixture": 0, "prefix": 1, "disputed": 2, "unknown": 3, "none": 4}
PREFIX_COLOR = "#d0d0d0"
PUBLISHED_PANEL = "published EAGLE3"
COUNTED = "tiny Kimi-K3, DFlash drafters of 7 drafts, 586 held-out prompts, greedy, counted on an H200"  # data/drafter_counts.csv
ROUNDING = 0.0005  # half a unit of the third decimal, to which engines print rates


def _need(frame: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    missing = [c for c in columns if c not in frame]
    if missing:
        raise BadInput(f"{what}: no column {missing[0]!r}; expected {', '.join(columns)}")
    if frame.empty:
        raise BadInput(f"{what}: no rows")


def _signed(offset: int) -> str:
    return f"{offset:+d}" if offset else "0"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _guard(frame: pd.DataFrame) -> str:
    """The degeneracy guard for a subtitle: how much of the output is not repetition, where the counts say so."""
    return f"; n-gram uniqueness of the output {_span(frame['uniqueness'], '.2f')}" if "uniqueness" in frame else ""


def _span(values: Sequence[float], form: str) -> str:
    low, high = format(np.nanmin(values), form), format(np.nanmax(values), form)
    return low if low == high else f"{low} to {high}"


def legend(fig: Figure, handles: Sequence, ncols: int) -> None:
    """A legend in a strip of its own between the axes and the provenance line."""
    engine = fig.get_layout_engine()
    x, y, width, height = engine.get()["rect"]
    strip = (0.1 + 0.2 * -(-len(handles) // ncols)) / fig.get_figheight()
    engine.set(rect=(x, y + strip, width, height - strip))
    fig.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, y), ncols=ncols, fontsize=8)


# ---------------------------------------------------------------- two streams by three offsets


def _heat(ax: Axes, values: np.ndarray, texts: np.ndarray, top: float, trained: tuple[int, int] | None) -> None:
    """Cells [streams, offsets]: darker is more, the value printed in each, a frame around the pair the drafter was trained on."""
    ax.imshow(values, cmap="Blues", vmin=0, vmax=top * 1.25, aspect="auto")
    for (y, x), text in np.ndenumerate(texts):
        dark = values[y, x] > 0.7 * top
        head, *rest = text.split("\n")
        color = "white" if dark else "black"
        ax.text(x, y - 0.1 * bool(rest), head, ha="center", va="bottom" if rest else "center", fontsize=11, weight="bold", color=color)
        ax.text(x, y - 0.05, "\n".join(rest), ha="center", va="top", fontsize=7.5, color=color, linespacing=1.3)
    if trained:
        y, x = trained
        ax.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, edgecolor="black", linewidth=1.8, zorder=2))
    for edge in (0.5, 1.5):
        ax.axvline(edge, color="white", linewidth=2, zorder=1)
    ax.axhline(0.5, color="white", linewidth=2, zorder=1)
    ax.set_yticks(range(len(STREAMS)), [f"fed {s}" for s in STREAMS])
    ax.grid(False)
    ax.tick_params(length=0)


def _cells(summary: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of one metric per (drafter, seed, stream, offset), and `mean`, their mean over seeds."""
    _need(summary, ("drafter", "stream", "offset", "metric", "value", "low", "high"), "heat map")
    keys = ["drafter", "stream", "offset"]
    frame = summary[(summary["metric"] == metric) & summary["stream"].isin(STREAMS) & summary["offset"].isin(OFFSETS)]
    frame = frame.assign(seed=frame.get("seed", 0))
    if frame.duplicated([*keys, "seed"]).any():
        raise BadInput("heat map: several rows for one drafter, seed, stream and offset; select one domain or subset")
    _need(frame, keys, f"heat map: {metric}")
    frame = frame.assign(mean=frame.groupby(keys)["value"].transform("mean"))
    columns = [*keys, "seed", "metric", "value", "low", "high", "prompts", "mean", "uniqueness"]
    return frame[[c for c in columns if c in frame]].reset_index(drop=True)


def _cell_text(cell: pd.DataFrame) -> str:
    if cell.empty:
        return "–"
    half = (cell["high"] - cell["low"]) / 2
    each = [f"{v:.2f} ± {h:.2f}" if h == h else f"{v:.2f}" for v, h in zip(cell["value"], half, strict=True)]
    if len(cell) == 1:
        lines = [f"± {half.iloc[0]:.2f}"] if half.notna().all() else []
    elif len(cell) <= 3:
        lines = each
    else:
        lines = [f"seeds: {_span(cell['value'], '.2f')}"]
    return "\n".join([f"{cell['mean'].iloc[0]:.2f}", *lines])


def _panel(frame: pd.DataFrame, drafter: str) -> tuple[np.ndarray, np.ndarray]:
    """Means [2, 3] and cell texts of one drafter."""
    part = frame[frame["drafter"] == drafter]
    cells = [[part[(part["stream"] == s) & (part["offset"] == o)] for o in OFFSETS] for s in STREAMS]
    means = np.array([[c["mean"].iloc[0] if len(c) else np.nan for c in row] for row in cells])
    return means, np.array([[_cell_text(c) for c in row] for row in cells])


def heatmap_figure(summary: pd.DataFrame, ran: str, metric: str = "mean_emitted") -> tuple[Figure, pd.DataFrame]:
    """Streams x layer offsets, a panel per drafter: the mean, and each seed's value with half its 95% interval over prompts.

    summary: acceptance.summarize by drafter, seed, stream, offset. A drafter named after a stream was trained on it, at offset 0.
    Frame: drafter, stream, offset, seed, metric, value, low, high, prompts, mean (over seeds), and uniqueness where it is known.
    """
    frame = _cells(summary, metric)
    drafters = list(dict.fromkeys(frame["drafter"]))
    panels = {d: _panel(frame, d) for d in drafters}
    found = []
    for d, (means, _) in panels.items():
        if d in STREAMS:
            own, at = STREAMS.index(d), OFFSETS.index(0)
            found.append(
                f"{d} drafter: {means[own, at]:.2f} as trained, {means[1 - own, at]:.2f} fed the other stream, "
                f"{_span(np.delete(means[own], at), '.2f')} a layer off"
            )
    seeds, note = frame["seed"].nunique(), ", a line per seed; bold: mean over seeds"
    fig, axes = figures.new(
        _sentence("; ".join(found)) or f"{MEAN_NAMES[metric]}: {_span(frame['mean'], '.2f')}",
        f"{ran}; {MEAN_NAMES[metric]}; ±: half the 95% interval over prompts" + (note if seeds > 1 else "") + _guard(frame),
        (7.5 if len(drafters) > 1 else 4.2, 2.6), 1, len(drafters), squeeze=False, sharey=True,
    )  # fmt: skip
    top = np.nanmax([m for m, _ in panels.values()])
    for ax, (d, (means, texts)) in zip(axes[0], panels.items(), strict=True):
        _heat(ax, means, texts, top, (STREAMS.index(d), OFFSETS.index(0)) if d in STREAMS else None)
        ax.set_xticks(range(len(OFFSETS)), [_signed(o) for o in OFFSETS])
        ax.set(xlabel="layers off the tap")
        ax.set_title(f"trained on {d}", loc="left")
    return fig, frame


def published_streams_figure(summary: pd.DataFrame, streams: pd.DataFrame, ran: str) -> tuple[Figure, pd.DataFrame]:
    """Our two drafters beside the published EAGLE3 table, all without the bonus token, each panel coloured by its own best.

    summary: as for heatmap_figure; streams: published.published_streams(). Frame: panel, stream, offset, value (mean over seeds),
    share (of the value at the trained pair), trained.
    """
    _need(streams, ("fed", "offset", "vllm_ids", "metric", "value", "trained_offset"), "published streams")
    ours = _cells(summary, "mean_accepted")
    theirs = streams[streams["metric"] == "mean_accepted"].rename(columns={"fed": "stream"})
    # the source names the stream that it takes for the trained one: its best
    best = theirs.loc[theirs["value"].idxmax()]
    panels = [(f"trained on {d}", *_panel(ours, d), d, 0) for d in dict.fromkeys(ours["drafter"])]
    theirs = theirs.assign(drafter="", seed=0, low=np.nan, high=np.nan, prompts=np.nan, mean=theirs["value"])
    panels.append((PUBLISHED_PANEL, *_panel(theirs, ""), best["stream"], int(best["trained_offset"])))
    vllm_ids = dict(zip(theirs["offset"], theirs["vllm_ids"].str.replace(" ", ", "), strict=True))
    rows, stream_kept, layer_kept = [], [], []
    size = (2.6 * len(panels) + 0.4, 2.7)
    for title, means, _, own, offset in panels:
        y, x = STREAMS.index(own), OFFSETS.index(offset)
        share = means / means[y, x]
        stream_kept.append(share[1 - y, x])
        layer_kept += np.delete(share[y], x).tolist()
        rows += [(title, s, o, means[i, j], share[i, j], (i, j) == (y, x)) for i, s in enumerate(STREAMS) for j, o in enumerate(OFFSETS)]
    fig, axes = figures.new(
        f"Of the drafts accepted as trained, the other stream keeps {_span(stream_kept, '.0%')}, another layer {_span(layer_kept, '.0%')}",
        f"{ran}; published: raviraju1113/speculators, 64 chats, teacher-forced, no interval given, offsets of vLLM's ids; "
        "drafts accepted a round, without the bonus; framed: the trained pair; darker: more of the panel's best",
        size, 1, len(panels), squeeze=False, sharey=True,
    )  # fmt: skip
    for ax, (title, means, _, own, offset) in zip(axes[0], panels, strict=True):
        y, x = STREAMS.index(own), OFFSETS.index(offset)
        kept = np.array([f"{v:.2f}\n{v / means[y, x]:.0%}" for v in means.flat]).reshape(means.shape)
        _heat(ax, means, kept, np.nanmax(means), (y, x))
        ids = vllm_ids if title == PUBLISHED_PANEL else {}
        ax.set_xticks(range(len(OFFSETS)), [f"{_signed(o)}\n{ids[o]}" if o in ids else _signed(o) for o in OFFSETS], fontsize=8)
        ax.set_xlabel("off the ids as given" if ids else "layers off the tap")
        ax.set_title(title, loc="left")
    return fig, pd.DataFrame(rows, columns=["panel", "stream", "offset", "value", "share", "trained"])


def survival_figure(summary: pd.DataFrame, ran: str, metric: str = "survival", offset: int = 0) -> tuple[Figure, pd.DataFrame]:
    """Survival (or the conditional rate) by draft position, fed prefix against fed mixture, with 95% bands over prompts.

    A column of panels per drafter, a row per domain if the summary has several; seeds are separate lines of the same style.
    Frame: the rows drawn.
    """
    _need(summary, ("drafter", "stream", "offset", "metric", "position", "value", "low", "high"), "survival")
    frame = summary[(summary["metric"] == metric) & (summary["offset"] == offset) & summary["stream"].isin(STREAMS)].reset_index(drop=True)
    _need(frame, ("stream",), f"survival: {metric} at offset {offset}")
    frame = frame.assign(seed=frame.get("seed", 0), domain=frame.get("domain", ""))
    if frame.duplicated(["drafter", "seed", "stream", "domain", "position"]).any():
        raise BadInput("survival: several rows for one drafter, seed, stream, domain and position; select one subset")
    drafters, domains = (list(dict.fromkeys(frame[c])) for c in ("drafter", "domain"))
    several = ", a line per seed" if frame["seed"].nunique() > 1 else ""
    told = frame[(frame["position"] == 0) == (metric == "survival")]
    what = "The first draft is accepted" if metric == "survival" else "A draft behind accepted ones is accepted"
    found = []
    for d in drafters:
        by = {s: told[(told["drafter"] == d) & (told["stream"] == s)]["value"] for s in STREAMS}
        found.append(f"{d} drafter " + ", ".join(f"{_span(v, '.2f')} fed {s}" for s, v in by.items() if len(v)))
    fig, axes = figures.new(
        f"{what}: " + "; ".join(found),
        f"{ran}; layer offset {_signed(offset)}; band: 95% interval over prompts{several}{_guard(frame)}",
        (7.5 if len(drafters) > 1 else 4.4, 2.1 * len(domains) + 0.7), len(domains), len(drafters), squeeze=False, sharex=True, sharey=True,
    )  # fmt: skip
    for (drafter, domain), part in frame.groupby(["drafter", "domain"], sort=False):
        ax = axes[domains.index(domain), drafters.index(drafter)]
        for (stream, _), line in part.groupby(["stream", "seed"], sort=False):
            series = STREAM_SERIES[stream]
            x = line["position"].astype(int)
            figures.plot(ax, series, x, line["value"], linewidth=1.3)
            ax.fill_between(x, line["low"], line["high"], color=figures.SERIES[series].color, alpha=0.25, linewidth=0)
        ax.set_title(f"trained on {drafter}" + (f", {domain}" if domain else ""), loc="left")
        ax.set(ylim=(-0.02, 1.02))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for ax in axes[-1]:
        ax.set_xlabel("draft position, from 0")
    fig.supylabel("accepted here and before" if metric == "survival" else "accepted if all before were", fontsize=9)
    shown = [s for s in STREAMS if s in set(frame["stream"])]
    legend(fig, [_key(STREAM_SERIES[s], f"fed {s}") for s in shown], 2)
    return fig, frame


def _key(series: int, label: str, **style) -> Line2D:
    s = figures.SERIES[series]
    return Line2D([], [], **{"color": s.color, "marker": s.marker, "linestyle": s.dash, "label": label} | style)


# ---------------------------------------------------------------- what the streams are


def _mark_commits(ax: Axes, committing: Sequence[int]) -> None:
    for layer in committing:
        ax.axvline(layer, color="#333333", linewidth=1.1, linestyle=(0, (2, 2)), zorder=0)


def weights_frame(compared: pd.DataFrame) -> pd.DataFrame:
    """What weights_figure takes, of attn_res.streams.compare: index `after layer` (layer id - 1; the embedding is left out)."""
    rows = compared[compared["layer"] > 0]
    weights = rows.filter(regex="^weight_").set_axis(rows["layer"].sub(1).rename("after layer"))
    return weights.rename(columns=lambda c: c.replace("weight_", "" if c == "weight_prefix" else "block "))


def streams_frame(compared: pd.DataFrame) -> pd.DataFrame:
    """What streams_figure takes, of attn_res.streams.compare: layers counted as the tap after them, without the embedding."""
    rows = compared.loc[compared["layer"] > 0, ["layer", "cosine", "cosine_p05", "cosine_p95", "norm_ratio"]]
    rows = rows.assign(layer=rows["layer"] - 1).rename(columns={"cosine_p05": "cosine_low", "cosine_p95": "cosine_high"})
    return rows.reset_index(drop=True)


def weights_figure(weights: pd.DataFrame, ran: str) -> tuple[Figure, pd.DataFrame]:
    """Where the mixture looks: mean AttnRes weight of each source, a stacked bar per layer.

    weights: index layer, a column per source (block 0, block 1, ..., prefix), each row summing to 1; NaN where a source does not
    exist yet. Raises BadInput for weights that do not sum to 1. Frame: the same with layer as a column.
    """
    if weights.empty:
        raise BadInput("weights: no rows")
    total = weights.sum(axis=1)
    off = total[(total - 1).abs() > 1e-3]
    if len(off) or (weights < -1e-6).any(axis=None):
        what = f"of layer {off.index[0]} sum to {off.iloc[0]:.4g}" if len(off) else "hold a negative number"
        raise BadInput(f"weights: those {what}; expected softmax weights over the sources, which sum to 1")
    if weights.shape[1] > len(figures.SERIES) + ("prefix" in weights):
        raise BadInput(f"weights: {weights.shape[1]} sources; {len(figures.SERIES)} blocks and the prefix can be told apart")
    shares = {s: _span(weights[s].dropna(), ".0%") for s in weights.columns}
    most = weights.drop(columns="prefix", errors="ignore").max().idxmax()
    finding = f"Weight in the mixture: {most}, {shares[most]}" + (f"; running prefix, {shares['prefix']}" if "prefix" in shares else "")
    fig, ax = figures.new(
        finding, f"{ran}; mean over tokens of the weight that the consumer after each layer gives a source",
        (7.5, 3.2),
    )  # fmt: skip
    bottom = np.zeros(len(weights))
    x = np.arange(len(weights))
    for n, source in enumerate(weights.columns):
        height = weights[source].fillna(0).to_numpy()
        style = {"color": PREFIX_COLOR, "hatch": ""} if source == "prefix" else {}
        figures.bar(ax, n, x, height, bottom=bottom, width=0.82 if len(x) <= 40 else 1, linewidth=0.3, label=source, **style)
        bottom += height
    ax.set_xticks(x[:: max(1, len(x) // 24)], weights.index[:: max(1, len(x) // 24)])
    ax.set(xlabel=weights.index.name or "layer", ylabel="weight", ylim=(0, 1), xlim=(-0.6, len(x) - 0.4))
    ax.grid(False)
    handles, _ = ax.get_legend_handles_labels()
    legend(fig, handles, min(len(handles), 5))
    return fig, weights.rename_axis(weights.index.name or "layer").reset_index()


def streams_figure(frame: pd.DataFrame, ran: str, committing: Sequence[int] = ()) -> tuple[Figure, pd.DataFrame]:
    """Cosine and norm ratio of the two streams after each layer, the committing layers marked.

    frame: layer, cosine, norm_ratio (|prefix| / |mixture|), and, if given, cosine_low, cosine_high, norm_ratio_low, norm_ratio_high
    (quantiles over tokens, drawn as bands); committing: layers that commit a block to the bank.
    """
    _need(frame, ("layer", "cosine", "norm_ratio"), "streams")
    low, high = (frame.loc[frame["cosine"].agg(f)] for f in ("idxmin", "idxmax"))
    commits = frame["layer"].isin(committing)
    finding = f"The two streams differ most after layer {low['layer']:.0f} (cosine {low['cosine']:.2f}) and least after layer "
    finding += f"{high['layer']:.0f} ({high['cosine']:.2f})"
    if len(frame) == 1:
        finding = f"After layer {low['layer']:.0f} the two streams have a cosine of {low['cosine']:.2f}"
    committing = [layer for layer in committing if frame["layer"].min() <= layer <= frame["layer"].max()]
    if commits.any() and not commits.all():
        a, b = (frame[rows]["cosine"].mean() for rows in (commits, ~commits))
        finding += f"; mean cosine {a:.2f} after a layer that commits, {b:.2f} after the others"
    fig, axes = figures.new(finding, ran, (7.5, 3.8), 2, 1, sharex=True)
    bands = False
    for ax, name, series, label in zip(axes, ("cosine", "norm_ratio"), (0, 1), ("cosine", "|prefix| / |mixture|"), strict=True):
        figures.plot(ax, series, frame["layer"], frame[name])
        if f"{name}_low" in frame and f"{name}_high" in frame:
            bands = True
            ends = (frame[f"{name}_low"], frame[f"{name}_high"])
            ax.fill_between(frame["layer"], *ends, color=figures.SERIES[series].color, alpha=0.2, linewidth=0)
        _mark_commits(ax, committing)
        ax.set_ylabel(label)
    axes[1].axhline(1, color="#555555", linewidth=0.7)
    axes[1].set(xlabel="after layer")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = [Line2D([], [], color="#333333", linewidth=1.1, linestyle=(0, (2, 2)), label="commits a block")] if len(committing) else []
    if bands:
        handles.append(Rectangle((0, 0), 1, 1, color="#aaaaaa", label="5% to 95% of the tokens"))
    if handles:
        legend(fig, handles, 2)
    return fig, frame


# ---------------------------------------------------------------- a log, and the published figures


def overlay_figure(
    rows: pd.DataFrame, mean_emitted: float, ran: str, survival: Sequence[float] | None = None, label: str = "this log"
) -> tuple[Figure, pd.DataFrame]:
    """Published mean lengths as dots, a line per drafter and k, with the user's mean across; survival curves beside, if given.

    rows: published.published(...), of which the mean_emitted figures known to count the bonus token are drawn; a range is a bar.
    Frame: the user's figures, then the rows drawn.
    """
    _need(rows, ("drafter", "dataset", "metric", "value", "k", "includes_bonus", "stream"), "published")
    if not np.isfinite(mean_emitted) or mean_emitted < 1:
        raise BadInput(f"overlay: mean_emitted is {mean_emitted}; expected 1 or more, the bonus token counted")
    dots = rows[(rows["metric"] == "mean_emitted") & (rows["includes_bonus"] == "yes")]
    curves = rows[rows["metric"] == "survival"]
    names = [f"{d}, k = {'?' if pd.isna(k) else k}" for d, k in zip(dots["drafter"], dots["k"], strict=True)]
    order = list(dict.fromkeys(names))
    above = int((mean_emitted > dots["value"]).sum())
    fig, axes = figures.new(
        f"{label}: {mean_emitted:.2f} tokens a round, above {above} of {len(dots)} published mean lengths",
        f"{ran}; published: engines, prompts, temperature and k differ from dot to dot, so no two are a comparison; bonus token included",
        (7.5 if survival is None else 9.5, 0.24 * len(order) + 1.3), 1, 1 if survival is None else 2, squeeze=False,
        width_ratios=(1,) if survival is None else (1.5, 1),
    )  # fmt: skip
    ax = axes[0, 0]
    y = np.array([order.index(n) for n in names])
    present = [s for s in STREAM_SERIES if s in set(dots["stream"])]
    for s in present:
        at = (dots["stream"] == s).to_numpy()
        figures.plot(ax, STREAM_SERIES[s], dots["value"][at], y[at], linestyle="none", markersize=5, alpha=0.85)
    if "value_high" in dots:
        ax.hlines(y, dots["value"], dots["value_high"].fillna(dots["value"]), color="#444444", linewidth=2)
    ax.axvline(mean_emitted, color="black", linewidth=1.4)
    ax.set_yticks(range(len(order)), order, fontsize=7.5)
    ax.set(xlabel="tokens emitted a round", ylim=(len(order) - 0.4, -0.6), xlim=(0.9, None))
    handles = [_key(STREAM_SERIES[s], f"expects {s}" if s in STREAMS else f"stream {s}", linestyle="none") for s in present]
    own = {"drafter": label, "dataset": "", "metric": "mean_emitted", "value": mean_emitted, "includes_bonus": "yes"}
    mine = [own]
    if survival is not None:
        right = axes[0, 1]
        for _, curve in curves.groupby(["drafter", "dataset", "engine"], sort=False):
            right.plot(curve["position"].astype(int), curve["value"], color="#999999", linewidth=1, marker=".")
        figures.plot(right, 7, range(len(survival)), survival, linewidth=1.8, linestyle="solid")
        right.set(xlabel="draft position, from 0", ylabel="accepted here and before", ylim=(-0.02, 1.02))
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        handles.append(Line2D([], [], color="#999999", marker=".", label="published survival"))
        mine += [own | {"metric": "survival", "position": j, "value": v} for j, v in enumerate(survival)]
    handles.append(Line2D([], [], color="black", linewidth=1.4, label=label))
    legend(fig, handles, 4)
    drawn = dots if survival is None else pd.concat([dots, curves])
    return fig, pd.concat([pd.DataFrame(mine).reindex(columns=rows.columns), drawn], ignore_index=True)


def log_figure(counts: pd.DataFrame, ran: str) -> tuple[Figure, pd.DataFrame]:
    """Acceptance from a log: survival by position with the check 1 + sum of rates = mean, and the mean of each interval in order.

    counts: one row per interval, e.g. `counted` of logs.read. Where an engine prints a mean and no counts, the column reported_mean
    is drawn for that interval, and left out of every sum. Frame: metric ("survival", "mean_emitted"), position, interval (row
    number), value, drafts (missing where not printed).
    """
    _need(counts, acceptance.COUNTS, "log")
    columns = [*acceptance.COUNTS, *(f"accepted_{j}" for j in range(acceptance.positions(counts)))]
    known = counts["drafts"].notna() & counts["emitted"].notna()
    n, out = (counts[c].to_numpy(float, na_value=np.nan) for c in ("drafts", "emitted"))
    each = np.divide(out, n, out=np.full(len(n), np.nan), where=n > 0)
    if "reported_mean" in counts:
        each = np.where(known, each, counts["reported_mean"].to_numpy(float, na_value=np.nan))
    if np.isnan(each).all():
        raise BadInput("log: no draft round and no reported mean; there is no acceptance to draw")
    survival, mean, drafts = np.array([]), np.nan, np.nan
    finding = f"Mean lengths as printed: {_span(each, '.2f')}; without draft rounds they have no overall mean"
    if n[known].sum() > 0:
        summary = acceptance.summarize(counts.loc[known, columns]).set_index("metric")
        mean, drafts = (float(summary.loc["mean_emitted", c]) for c in ("value", "drafts"))
        finding = f"{mean:.2f} tokens a round over {drafts:,.0f} draft rounds"
        survival = summary.loc[["survival"], "value"].to_numpy(float) if "survival" in summary.index else survival
    k = counts.loc[known, "k"].max() if "k" in counts else pd.NA
    if len(survival) and not np.isnan(survival).any() and (pd.isna(k) or len(survival) >= k):
        total = 1 + survival.sum()
        agrees = abs(total - mean) <= ROUNDING * len(survival) + 0.005
        finding += f"; 1 + sum of survival = {total:.2f} " + ("agrees" if agrees else "does not agree with it")
    subtitle = f"{ran}; counts summed over {known.sum()} of {len(counts)} intervals, bonus included"
    fig, axes = figures.new(finding, subtitle, (7.5, 3.0), 1, 2, width_ratios=(1, 1.4))
    left, right = axes
    if len(survival):
        figures.bar(left, 0, range(len(survival)), survival, width=0.8)
        for j, v in enumerate(survival):
            left.text(j, v + 0.015, f"{v:.2f}", ha="center", va="bottom", fontsize=7.5, rotation=0 if len(survival) <= 8 else 90)
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        left.text(0.5, 0.5, "no counts per position", ha="center", va="center", transform=left.transAxes)
    left.set(xlabel="draft position, from 0", ylabel="accepted here and before", ylim=(0, 1.08))
    left.grid(axis="x", visible=False)
    figures.plot(right, 1, range(len(each)), each, linewidth=1, linestyle="solid", marker="s" if len(each) <= 60 else "")
    if not np.isnan(mean):
        right.axhline(mean, color="black", linewidth=1, linestyle=(0, (4, 2)))
        right.text(0.99, 0.98, f"dashed: all intervals, {mean:.2f}", transform=right.transAxes, ha="right", va="top", fontsize=8)
    right.set(xlabel="interval, in the order of the log", ylabel="tokens emitted a round")
    right.set_ylim(1 - 0.02, np.nanmax(each) * 1.12)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    parts = [pd.DataFrame({"metric": "survival", "position": range(len(survival)), "value": survival, "drafts": drafts})]
    parts.append(pd.DataFrame({"metric": "mean_emitted", "interval": range(len(each)), "value": each, "drafts": n}))
    return fig, pd.concat(parts, ignore_index=True)
