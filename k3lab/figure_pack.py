"""The figures of the notebooks by name, made outside a notebook: for a PR, on the shipped data or on one's own capture or log.

    for name, (fig, frame) in make(["01_routes"], capture="mine.safetensors"): figures.export(fig, frame, name)

Names are those the notebooks export under. Each function below takes the Inputs and returns a figure and its frame; a figure in OF
can be made of one's own capture or log.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.figure import Figure

from k3lab import drafter_figures, nan_figures, nonfinite, race_figures
from k3lab.capture import Capture
from k3lab.errors import BadInput
from k3lab.kda.call import KdaCall
from k3lab.provenance import DATA

if TYPE_CHECKING:
    from k3lab.drafter.logs import LogReport

Made = tuple[Figure, pd.DataFrame]
SHIPPED = DATA / "captures/mixed_split_layer1.safetensors"
TAPS = DATA / "captures/attn_res_taps.safetensors"
LOG = DATA / "drafter_fed_prefix.log"


@dataclass
class Inputs:
    """What the figures are of: a capture (kind kda or attn_res) and an engine's log; what is None is the shipped one."""

    own_capture: Path | None = None
    own_log: Path | None = None

    @property
    def capture(self) -> Path:
        return self.own_capture or SHIPPED

    @property
    def taps(self) -> Path:
        return self.own_capture or TAPS

    @property
    def log(self) -> Path:
        return self.own_log or LOG

    @cached_property
    def call(self) -> KdaCall:
        return Capture.load(self.capture).kda_call()

    @cached_property
    def streams(self) -> pd.DataFrame:
        from k3lab.attn_res.streams import compare

        return compare(self.taps)

    @cached_property
    def report(self) -> "LogReport":
        from k3lab.drafter import logs

        return logs.read(self.log)

    @property
    def fixed_route(self) -> str:
        return "gather_split" if self.call.spec_mask is not None and bool(self.call.spec_mask.any()) else "split"


def shipped(name: str) -> Path:
    """A file of data/. Raises BadInput where there is none: an installed copy without the repository."""
    path = DATA / name
    if not path.is_file():
        raise BadInput(f"{path}: is not there; run from a clone of the repository, which holds data/")
    return path


def tiles(given: Inputs) -> Made:
    return nan_figures.tiles_figure(given.call)


def routes(given: Inputs) -> Made:
    frame = nan_figures.routes_frame(given.call, ("chunk_all", given.fixed_route))
    return nan_figures.routes_figure(frame, f"{given.capture.name}, {given.call.num_sequences} sequences, {given.call.q.dtype}"), frame


def length_map(given: Inputs) -> Made:
    frame = nonfinite.length_map(range(1, 131))
    return nan_figures.length_map_figure(frame), frame


def _provenance(given: Inputs, route: str, which: int) -> Made:
    chunked = nan_figures.chunked(given.call, route)
    if not chunked:
        raise BadInput(f"{given.capture}: no sequence goes through the chunk kernel by {route}, so there is nothing to follow")
    sequence = chunked[which]
    frame = nan_figures.provenance_frame(given.call, route, "nan", sequence)
    ran = f"{given.capture.name}, route {route}, padding nan"
    return nan_figures.provenance_figure(frame, sequence, int(given.call.lengths[sequence]), ran), frame


def provenance_decode(given: Inputs) -> Made:
    return _provenance(given, "chunk_all", 0)


def provenance_prefill(given: Inputs) -> Made:
    return _provenance(given, given.fixed_route, -1)


def accuracy(given: Inputs) -> Made:
    from k3lab.tiny import accuracy as tiny

    acc = tiny.load(shipped("accuracy.json"))
    curve = acc.assign(series=acc["route"] + ", " + acc["padding"])
    published = pd.read_csv(shipped("published/vllm_pr_50649_gsm8k.csv"))
    drop = published[(published["n_shot"] == 5) & (published["filter"] == "flexible-extract")].set_index("run")["exact_match"]
    p_drop = tiny.p_of_ratio(acc, "chunk_all", drop["before"] / drop["PR"])
    lines = {"PR 50649, gsm8k with the fix": drop["PR"], "before": drop["before"]}
    ran = (
        f"tiny Kimi-K3, {int(acc['total'].iloc[0])} held-out problems a point, up to 128 requests at a time; chunk_all served on an H200, "
        "split on a CPU, one seed; bars: 95% Wilson"
    )
    return nan_figures.accuracy_figure(curve, ran, lines, p_drop), curve


def _matrix() -> pd.DataFrame:
    from k3lab.races.matrix import read_journal

    matrix = pd.DataFrame(read_journal(shipped("race_matrix.jsonl")))
    return matrix[(matrix["target"] == "hip:gfx950") & (matrix["async"] == "on")]


def race_card(given: Inputs) -> Made:
    rows = _matrix()
    rows = rows[(rows["triton"] == "3.7.1") & (rows["padding"] == "undefined")]
    return race_figures.race_card_figure(rows, "recompute_w_u_fwd_kernel, Triton 3.7.1, gfx950, async copy on, masked rows undefined")


def versions(given: Inputs) -> Made:
    return race_figures.versions_figure(_matrix(), "recompute_w_u_fwd_kernel, gfx950, async copy on")


def weights(given: Inputs) -> Made:
    return drafter_figures.weights_figure(drafter_figures.weights_frame(given.streams), _tapped(given))


def streams(given: Inputs) -> Made:
    block, layers = (Capture.load(given.taps).metadata.get(k, 0) for k in ("attn_res_block", "num_layers"))
    return drafter_figures.streams_figure(
        drafter_figures.streams_frame(given.streams), _tapped(given), range(0, layers, block) if block else ()
    )


def _tapped(given: Inputs) -> str:
    return f"{given.taps.name}, {given.streams['tokens'].iloc[0]} tokens, attn_res in torch, CPU"


@cache
def _summary(by: tuple[str, ...]) -> pd.DataFrame:
    """The shipped counts, summarised by `by`; `seed` not among it: the seeds of a prompt are added up."""
    from k3lab.drafter import acceptance

    counts = pd.read_csv(shipped("drafter_counts.csv")).merge(pd.read_csv(shipped("drafter_prompts.csv"))[["prompt", "uniqueness"]])
    return acceptance.summarize(counts if "seed" in by else counts.drop(columns="seed"), by)


def heatmap(given: Inputs) -> Made:
    return drafter_figures.heatmap_figure(_summary(("drafter", "seed", "stream", "offset")), drafter_figures.COUNTED)


def survival(given: Inputs) -> Made:
    return drafter_figures.survival_figure(
        _summary(("drafter", "stream", "offset", "domain")), f"{drafter_figures.COUNTED}; 3 seeds pooled"
    )


def conditional(given: Inputs) -> Made:
    summary = _summary(("drafter", "stream", "offset"))
    return drafter_figures.survival_figure(summary, f"{drafter_figures.COUNTED}; 3 seeds pooled", "conditional")


def published_streams(given: Inputs) -> Made:
    from k3lab.drafter import published

    summary = _summary(("drafter", "seed", "stream", "offset"))
    return drafter_figures.published_streams_figure(summary, published.published_streams(), drafter_figures.COUNTED)


def log(given: Inputs) -> Made:
    if given.report.counted.empty:
        raise BadInput(f"{given.log}: holds no acceptance to draw: {given.report.diagnosis.text}")
    return drafter_figures.log_figure(given.report.counted, given.log.name)


def overlay(given: Inputs) -> Made:
    from k3lab.drafter import published

    t = given.report.totals
    if t is None or t.mean_emitted is None:
        raise BadInput(f"{given.log}: gives no mean length to hold against published ones: {given.report.diagnosis.text}")
    return drafter_figures.overlay_figure(published.published(), t.mean_emitted, given.log.name, t.survival or None)


def _compiled(*configs: tuple[int, int], pointer_range: bool = False, padding: str = "undefined") -> list:
    """Kernels of recompute_w_u for gfx950 with async copies, compiled by the installed Triton."""
    from k3lab.races.compiled import compile_builds
    from k3lab.races.matrix import matrix_builds

    builds = matrix_builds(["installed"], ["hip:gfx950"], (pointer_range,), (True,), (padding,), list(configs))
    return [c.kernel() for c in compile_builds(builds)]


def _triton() -> str:
    import triton

    return triton.__version__


def _assembly(given: str, racy: str, finding: str) -> Made:
    kernels = _compiled((int(racy[1]), int(racy[3])), (4, 2))
    pair = [race_figures.timeline(k, given, name) for k, name in zip(kernels, (racy, "w4s2"), strict=True)]
    racing = [bool(t.frame["racing"].sum()) for t in pair]
    shape = "full chunk" if given == "full" else "length 1"
    ran = f"u loop of recompute_w_u_fwd_kernel, Triton {_triton()}, gfx950, async copy on, pointer_range off, {shape}"
    return race_figures.timelines_figure(pair, finding if racing == [True, False] else f"{racy} beside w4s2, {shape}", ran)


def assembly(given: Inputs) -> Made:
    return _assembly("full", "w4s4", "w4s4 reads copy 0 while it is in flight; w4s2 waits for it first")


def assembly_length1(given: Inputs) -> Made:
    return _assembly("length1", "w4s3", "w4s3 at length 1: skipped copies make the wait too weak")


def waits(given: Inputs) -> Made:
    left = race_figures.waits_frame(_compiled((4, 4))[0])
    if left.empty:
        raise BadInput(f"02_waits: Triton {_triton()} leaves no wait of w4s4 too weak, so there is nothing to draw")
    return race_figures.waits_figure(left, f"w4s4, Triton {_triton()}, gfx950, async copy on, pointer_range off"), left


def controls(given: Inputs) -> Made:
    from k3lab.races.controls import mutation_sweep

    builds = {"w4s2, pointer_range on": _compiled((4, 2), pointer_range=True), "w4s2, off, zero": _compiled((4, 2), padding="zero")}
    counts = race_figures.controls_counts({name: mutation_sweep(kernel) for name, (kernel,) in builds.items()})
    return race_figures.controls_figure(counts, f"recompute_w_u_fwd_kernel, Triton {_triton()}, gfx950, async copy on"), counts


FIGURES: dict[str, tuple[str, Callable[[Inputs], Made]]] = {
    "00_nan": ("which lengths NaN in masked rows would hit, and at which stage", length_map),
    "00_race": ("nine configs of recompute_w_u on gfx950", race_card),
    "00_drafter": ("acceptance of two drafters by stream and layer", heatmap),
    "01_tiles": ("the tiles of a batch, and their masked rows", tiles),
    "01_routes": ("which sequences each route and padding loses", routes),
    "01_length_map": ("which lengths NaN in masked rows would hit, and at which stage", length_map),
    "01_provenance_decode": ("the shortest sequence by chunk_all, stage by stage", provenance_decode),
    "01_provenance_prefill": ("the longest prefill by the fixed route, stage by stage", provenance_prefill),
    "01_accuracy": ("accuracy against the probability that undefined rows are NaN", accuracy),
    "02_race_card": ("nine configs of recompute_w_u on gfx950", race_card),
    "02_assembly": ("a racy config's way through LDS beside a safe one's, full chunk; compiles, about 10 s", assembly),
    "02_assembly_length1": ("the same at length 1, w4s3", assembly_length1),
    "02_waits": ("racing pairs left by the value of the blamed wait; compiles", waits),
    "02_versions": ("the race matrix over Triton versions", versions),
    "02_controls": ("what the analysis says of mutants; compiles, about 20 s", controls),
    "03_weights": ("where the AttnRes mixture looks, by layer", weights),
    "03_streams": ("cosine and norm ratio of prefix and mixture, by layer", streams),
    "03_heatmap": ("tokens a round, two drafters by two streams by three layer offsets", heatmap),
    "03_survival": ("survival by draft position, fed prefix against mixture, by domain", survival),
    "03_conditional": ("conditional acceptance by draft position, fed prefix against mixture", conditional),
    "03_published_streams": ("a published drafter on two streams at three offsets, beside ours", published_streams),
    "03_log": ("acceptance from an engine's log, by position and by interval", log),
    "03_overlay": ("a log's mean length and survival among published ones", overlay),
}
OF = dict.fromkeys(("01_tiles", "01_routes", "01_provenance_decode", "01_provenance_prefill"), "kda")
OF |= dict.fromkeys(("03_weights", "03_streams"), "attn_res") | dict.fromkeys(("03_log", "03_overlay"), "log")


def make(
    names: Sequence[str] = (), capture: str | os.PathLike | None = None, log: str | os.PathLike | None = None
) -> Iterator[tuple[str, Made]]:
    """Yield (name, (figure, frame)) for each name; if none is given, all, or all of the capture and the log that are given.

    Raises BadInput for an unknown name or an input that does not fit.
    """
    unknown = [n for n in names if n not in FIGURES]
    if unknown:
        raise BadInput(f"figure {unknown[0]!r} is not one of {', '.join(FIGURES)}")
    for option, value, kinds in (("--capture", capture, ("kda", "attn_res")), ("--log", log, ("log",))):
        takers = [n for n in FIGURES if OF.get(n) in kinds]
        if names and value is not None and not set(names) & set(takers):
            raise BadInput(f"{option} {value}: {', '.join(names)} shows other data; figures of a {option[2:]}: {', '.join(takers)}")
    given = Inputs(None if capture is None else Path(capture), None if log is None else Path(log))
    kinds = ([Capture.load(capture).kind] if capture is not None else []) + (["log"] if log is not None else [])
    for name in dict.fromkeys(names) if names else FIGURES:
        if names or not kinds or OF.get(name) in kinds:
            yield name, FIGURES[name][1](given)
