"""Where the NaN comes from: the first stage, sequence, row, head and channel that is not finite, what fed it, how far it went.

Provenance is read off the tensors of a replay (kda.layer). A replay with padding="nan" shows what the language permits a
masked row to be; whether a card really holds such values there is another question (notebooks 01 and 02).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from k3lab.capture.check import TAIL
from k3lab.capture.format import Capture, is_integer
from k3lab.errors import BadInput
from k3lab.kda import reference, stages
from k3lab.kda.call import FLOATS, KdaCall
from k3lab.kda.layer import Launch, StepResult, kda_layer_step
from k3lab.shapes import CHUNK
from k3lab.testing import error_budget, low_precision_reference, random_call

# the tensors whose 64-row tiles a stage loads: where its masked rows come from
STAGE_TILES = {
    "gate_cumsum": ("raw_g",),
    "intra": ("q", "k", "g", "beta"),
    "inverse": ("Akk",),
    "recompute_w_u": ("A", "v", "beta", "k", "g"),
    "state": ("u", "w", "kg"),
    "output": ("q", "g", "Aqk", "v_new"),
}
_INPUTS = ("q", "k", "v", "raw_g", "raw_beta", "output_gate")
_PARAMETERS = ("A_log", "dt_bias", "norm_weight")


@dataclass(frozen=True)
class First:
    """The first value that is not finite.

    stage     "input", one of kda.stages.STAGES, "recurrent" (or "chunk" where impl "reference" or "triton_fused" shows no stages),
              "output_norm_gate", or "recorded" for outputs that came with a capture
    tensor    its name; sequence, length: which sequence of the batch, and its tokens
    row       token within its sequence; for a state, the last token that went into it (-1: none yet)
    channel   index on the last axis; for a state [V, K], the V index
    """

    layer: int
    stage: str
    tensor: str
    sequence: int
    length: int
    row: int
    head: int
    channel: int
    value: str


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: 0-127, 130."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class Report:
    """What trace() found.

    first                  the first non-finite value, or None
    nonfinite_sequences    sequences whose output or final state is not finite
    state_lost             sequences whose final state is not finite: they never recover
    neighbours_finite      the other sequences, all finite
    fed_by                 the masked rows of the tile in which `first` was computed, or None (see fed_by())
    stages                 one row per (stage, tensor, sequence): how many values and rows are not finite
    """

    first: First | None
    nonfinite_sequences: list[int]
    state_lost: list[int]
    neighbours_finite: list[int]
    fed_by: dict[str, Any] | None
    stages: pd.DataFrame = field(repr=False)

    @property
    def finite(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        if self.first is None:
            return "every stage is finite"
        f = self.first
        text = f"first {f.value}: stage {f.stage}, tensor {f.tensor}, sequence {f.sequence} (length {f.length}), "
        text += f"row {f.row}, head {f.head}, channel {f.channel}. "
        if self.fed_by:
            b, (lo, hi) = self.fed_by, self.fed_by["masked_rows"]
            text += f"Its tile has {b['valid_rows']} of {CHUNK} rows; rows {lo}..{hi} of {', '.join(b['tensors'])} are masked. "
        lost = f"final state lost in {ranges(self.state_lost)}" if self.state_lost else "no final state lost"
        hit, kept = ranges(self.nonfinite_sequences), ranges(self.neighbours_finite) or "none"
        return text + f"Sequences not finite: {hit}; {lost}; finite: {kept}."


def _row_places(launch: Launch, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence (index in the batch) and row within it of each entry on axis 0 of x."""
    call, ids = launch.call, torch.tensor(launch.sequences)
    lengths = call.lengths
    if name == "h":
        index = stages.chunk_index(call.cu_seqlens).long().cpu()
        return ids[index[:, 0]], index[:, 1] * CHUNK - 1
    if name in ("final_state", "initial_state"):
        return ids, (lengths - 1 if name == "final_state" else torch.full_like(lengths, -1))
    rows = torch.cat([torch.arange(n) for n in lengths.tolist()])
    return ids.repeat_interleave(lengths), rows


def _find(launch: Launch, stage: str, name: str, x: Tensor, layer: int) -> tuple[First | None, list[dict[str, Any]]]:
    bad = ~torch.isfinite(x.cpu() if x.dim() != 2 else x.cpu()[:, :, None])
    if not bad.any():
        return None, []
    sequence, row = _row_places(launch, name, x)
    lengths = dict(zip(launch.sequences, launch.call.lengths.tolist(), strict=True))
    per_row = bad.flatten(1).sum(1)
    by_row = per_row > 0
    hit, group = sequence[by_row].unique(return_inverse=True)
    values = torch.zeros_like(hit).index_add_(0, group, per_row[by_row])
    first_row = torch.zeros_like(hit).scatter_reduce_(0, group, row[by_row], "amin", include_self=False)
    counts = [
        {"stage": stage, "tensor": name, "sequence": n, "length": lengths[n], "values": v, "rows": r, "first_row": f}
        for n, v, r, f in zip(hit.tolist(), values.tolist(), group.bincount().tolist(), first_row.tolist(), strict=True)
    ]
    at = by_row.nonzero().flatten()
    i = int(at[sequence[at].argmin()])
    head, channel = (int(j) for j in bad[i].nonzero()[0][:2])
    value = str(float(x[i].reshape(bad[i].shape)[tuple(bad[i].nonzero()[0])]))
    n = int(sequence[i])
    return First(layer, stage, name, n, lengths[n], int(row[i]), head, channel, value), counts


def fed_by(first: First) -> dict[str, Any] | None:
    """The masked rows that the tile of `first` holds: names of the loaded tensors and the row range, None if it has none."""
    if first.stage not in STAGE_TILES:
        return None
    # a state sums over its whole sequence, so the masked rows are those of the last chunk
    row = first.length - 1 if first.tensor == "final_state" else max(first.row, 0)
    start = row // CHUNK * CHUNK
    valid = min(CHUNK, first.length - start)
    if valid == CHUNK:
        return None
    return {
        "tensors": list(STAGE_TILES[first.stage]),
        "chunk": row // CHUNK,
        "valid_rows": valid,
        "masked_rows": (valid, CHUNK - 1),
    }


def _parameter(call: KdaCall) -> First | None:
    """The first parameter of the layer that is not finite; it has no token, so it stands at row -1 of sequence 0."""
    for name in _PARAMETERS:
        x = getattr(call, name)
        if x is None or torch.isfinite(x).all():
            continue
        at = (~torch.isfinite(x)).nonzero()[0].tolist()
        head, channel = {"A_log": (at[0], 0), "dt_bias": (at[0], at[-1]), "norm_weight": (0, at[0])}[name]
        return First(call.layer, "input", name, 0, int(call.lengths[0]), -1, head, channel, str(float(x[tuple(at)])))
    return None


def trace(call: KdaCall, result: StepResult) -> Report:
    """Find the first non-finite value of a layer step in the order of computation, and how far it spread.

    The order is: the layer's parameters and the call's own tensors, then per launch the stages in turn (STAGES) or the
    recurrent kernel, then the output norm and gate. Within one tensor the first sequence counts, then its first row, head
    and channel. Only rows that exist are looked at. Launches do not read each other: an input that is not finite comes
    before any stage, else the first launch with a finding explains the batch.
    """
    first = _parameter(call)
    counts: list[dict[str, Any]] = []
    for launch in result.launches:
        inputs = {n: getattr(launch.call, n) for n in _INPUTS if getattr(launch.call, n) is not None}
        groups = [("input", inputs | {"initial_state": launch.call.state_vk()})]
        if launch.kernel == "recurrent" or "g" not in launch.tensors:
            groups.append((launch.kernel, {n: launch.tensors[n] for n in ("o", "final_state")}))
        else:
            groups += [(s, {n: launch.tensors[n] for n in stages.STAGE_OUTPUTS[s]}) for s in stages.STAGES]
        mine: First | None = None
        for stage, tensors in groups:
            found = []
            for name, x in tensors.items():
                f, rows = _find(launch, stage, name, x, call.layer)
                counts += rows
                if f:
                    found.append(f)
            if mine is None and found:
                mine = found[0]
        if mine and (first is None or (mine.stage == "input" and first.stage != "input")):
            first = mine
    seen = result.o if result.y is None else result.y
    if result.y is not None:
        whole = Launch("layer", list(range(call.num_sequences)), torch.arange(call.q.shape[0]), call, {})
        last, rows = _find(whole, "output_norm_gate", "y", result.y, call.layer)
        first, counts = first or last, counts + rows
    o_bad = torch.tensor([not bool(torch.isfinite(x).all()) for x in seen.split(call.lengths.tolist())])
    s_bad = ~torch.isfinite(result.final_state).flatten(1).all(1).cpu()
    lost, hit = s_bad.nonzero().flatten().tolist(), (o_bad | s_bad).nonzero().flatten().tolist()
    return Report(
        first=first,
        nonfinite_sequences=hit,
        state_lost=lost,
        neighbours_finite=[n for n in range(call.num_sequences) if n not in hit],
        fed_by=fed_by(first) if first else None,
        stages=pd.DataFrame(counts, columns=["stage", "tensor", "sequence", "length", "values", "rows", "first_row"]),
    )


def length_map(
    lengths: Sequence[int], paddings: Sequence[str] = ("undefined", "zero", "nan"), heads: int = 1, seed: int = 0
) -> pd.DataFrame:
    """The first non-finite stage of the chunk kernel for single sequences of each length, by padding (torch stages).

    Columns length, padding, first_stage ("" if finite), state_lost. Inputs are random at realistic magnitudes, fresh per
    seed; only which stage is hit matters, and that depends on length % 64 alone. Raises BadInput for a length below 1.
    """
    rows = []
    for n in lengths:
        if n < 1:
            raise BadInput(f"lengths: {n} is below 1; every sequence needs at least one token")
        call = replace(random_call((n,), heads=heads, head_dim=64, seed=seed), num_decodes=0)
        for padding in paddings:
            r = trace(call, kda_layer_step(call, "chunk_all", padding=padding))
            rows.append(
                {"length": n, "padding": padding, "first_stage": r.first.stage if r.first else "", "state_lost": bool(r.state_lost)}
            )
    return pd.DataFrame(rows)


def truth(call: KdaCall) -> dict[str, Tensor]:
    """The float64 recurrence over a call: o [T, H, V], final_state [N, H, V, K]; a null slot gives zeros and keeps its state."""
    return _null_slots(call, reference.recurrent_kda(call))


def _null_slots(call: KdaCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if call.state_indices is not None:
        null = call.state_indices.cpu() <= 0
        out["o"][null.repeat_interleave(call.lengths)] = 0.0
        out["final_state"][null] = call.state_vk()[null].to(out["final_state"].dtype)
    return out


def _against_truth(call: KdaCall, got: dict[str, Tensor]) -> dict[str, Any]:
    """Error of outputs against float64 on rows that are finite, and the sequences that are away from it by the budget rule."""
    exact, low = truth(call), _null_slots(call, low_precision_reference(call, call.q.dtype))
    away: set[int] = set()
    error = size = 0.0
    messages = []
    sequence_of_token = torch.arange(call.num_sequences).repeat_interleave(call.lengths)
    for name, x in got.items():
        sequence = sequence_of_token if name == "o" else torch.arange(call.num_sequences)
        keep = torch.isfinite(x).flatten(1).all(1) & torch.isfinite(exact[name]).flatten(1).all(1)
        if not keep.any():
            continue
        a, b, c = x[keep].double(), exact[name][keep], low[name][keep].double()
        budget = error_budget(name, a, b, c, call.q.dtype)
        messages.append(str(budget))
        if not budget.ok:
            over = (a - b).abs().flatten(1).amax(1) > budget.budget
            away.update(sequence[keep][over].tolist() if over.any() else sequence[keep].unique().tolist())
        error, size = error + float((a - b).square().sum()), size + float(b.square().sum())
    relative = (error / size) ** 0.5 if size else None
    return {"relative_error": relative, "away_sequences": sorted(away), "budget": messages}


def _recorded(capture: Capture, call: KdaCall) -> dict[str, Tensor]:
    """The recorded o [T, H, V] and final_state [N, H, V, K]; BadInput if they are not of this call."""
    got = capture.results()
    got.pop("token_states", None)
    for name, x in got.items():
        shape = call.v.shape if name == "o" else call.state_vk().shape
        if x.shape != shape or x.dtype not in FLOATS:
            what = f"shape {tuple(capture.tensors[name].shape)} dtype {x.dtype} does not fit the call"
            expected = "[T, H, V]" if name == "o" else f"[N, H, V, K] (state_layout {call.state_layout!r})"
            raise BadInput(f"{capture.name}: {name}: {what}, expected {expected} for v {tuple(call.v.shape)}, a float of 16 bits or more")
    return got


def observed(capture: Capture) -> dict[str, Any]:
    """What a capture RECORDED: are its outputs finite, and are the finite ones the float64 recurrence of its inputs?

    Keys: recorded (names), finite (None where nothing was recorded), first, nonfinite_sequences, relative_error (finite
    rows, None where nothing was recorded), away_sequences, budget (error, budget and reference error in words).
    """
    call = capture.kda_call()
    got = _recorded(capture, call)
    if not got:
        return {
            "recorded": [], "finite": None, "first": None, "nonfinite_sequences": [],
            "relative_error": None, "away_sequences": [], "budget": [],
        }  # fmt: skip
    whole = Launch("recorded", list(range(call.num_sequences)), torch.arange(call.q.shape[0]), call, got)
    first, hit = None, set()
    for name, x in got.items():
        f, counts = _find(whole, "recorded", name, x, call.layer)
        first = first or f
        hit.update(c["sequence"] for c in counts)
    return {
        "recorded": sorted(got),
        "finite": not hit,
        "first": asdict(first) if first else None,
        "nonfinite_sequences": sorted(hit),
        **_against_truth(call, got),
    }


def exposed(call: KdaCall) -> dict[str, dict[str, Any]]:
    """What NaN in masked rows WOULD reach, by route: sequences that are finite with zero padding and not with NaN.

    One entry per route that can serve this batch: {"sequences": [...], "first": {...} or None}. Torch stages.
    """
    out = {}
    for route in ("chunk_all", "gather_split" if call.spec_mask is not None else "split"):
        clean = trace(call, kda_layer_step(call, route, padding="zero"))
        dirty = trace(call, kda_layer_step(call, route, padding="nan"))
        sequences = [n for n in dirty.nonfinite_sequences if n not in clean.nonfinite_sequences]
        out[route] = {"sequences": sequences, "first": asdict(dirty.first) if dirty.first and sequences else None}
    return out


def investigate(capture: Capture) -> dict[str, Any]:
    """`k3lab nan CAPTURE`: OBSERVED apart from EXPOSED. finding is True for observed trouble alone."""
    seen = observed(capture)
    return {
        "finite": seen["finite"],
        "first": seen["first"],
        "nonfinite_sequences": seen["nonfinite_sequences"],
        "relative_error": seen["relative_error"],
        "observed": seen,
        "exposed": exposed(capture.kda_call()),
        "finding": bool(seen["nonfinite_sequences"] or seen["away_sequences"]),
    }


def replay(capture: Capture, route: str, padding: str, impl: str = "torch", dtype: torch.dtype | None = None) -> dict[str, Any]:
    """`k3lab nan CAPTURE --route R --padding P`: run the step again. finding is True if the replay is not finite.

    impl "triton" runs on the GPU where torch sees one, else under the interpreter. dtype, if given, recasts the token tensors
    first, truth included: bfloat16 captures need float32 or float16 under the interpreter. Same keys as investigate(); observed and
    exposed are None, as nothing recorded is judged here.
    """
    call = capture.kda_call().to(dtype=dtype)
    on_gpu = impl == "triton" and torch.cuda.is_available()
    moved = call.to("cuda") if on_gpu else call
    result = kda_layer_step(moved, route, impl, padding)
    report = trace(moved, result)
    error = _against_truth(call, {"o": result.o.cpu(), "final_state": result.final_state.cpu()})
    return {
        "finite": report.finite,
        "first": asdict(report.first) if report.first else None,
        "nonfinite_sequences": report.nonfinite_sequences,
        "relative_error": error["relative_error"],
        "observed": None,
        "exposed": None,
        "finding": not report.finite,
        "fed_by": report.fed_by,
        "away_sequences": error["away_sequences"],
        "text": str(report),
    }


NAN_IDS = {0: "vLLM", 163839: "SGLang"}  # what each engine's sampler returns for a row of NaN logits, Kimi-K3 vocabulary


def triage_tokens(token_ids: Sequence[int] | Tensor, shortest: int = TAIL) -> dict[str, Any]:
    """Does a stream of token ids end the way argmax over NaN looks: one id repeated to the end?

    Keys: repeated_id, run (length of the tail), start (its index), engine ("vLLM" for id 0, "SGLang" for 163839, else None),
    suspicious (run >= shortest and the id is one of those), text. A tail of another id is a loop of the model, not this.
    Raises BadInput if the stream is empty or not whole numbers.
    """
    try:
        ids = torch.as_tensor(token_ids)
    except (TypeError, ValueError, RuntimeError) as e:
        raise BadInput(f"token_ids: {type(token_ids).__name__} is not a list of whole numbers: {e}") from e
    if ids.dim() != 1 or ids.numel() == 0 or not is_integer(ids):
        raise BadInput(f"token_ids: shape {tuple(ids.shape)} dtype {ids.dtype}, expected a non-empty list of whole numbers")
    other = (ids != ids[-1]).nonzero().flatten()
    start = int(other[-1]) + 1 if len(other) else 0
    last, run = int(ids[-1]), ids.numel() - start
    engine = NAN_IDS.get(last)
    suspicious = engine is not None and run >= shortest
    if suspicious:
        text = f"ends in {run} x id {last} from token {start} on: what argmax over NaN logits looks like in {engine}"
    elif run >= shortest:
        text = f"ends in {run} x id {last} from token {start} on: a loop, but not an id that argmax over NaN gives"
    else:
        text = f"no repeated tail of {shortest} or more (the last id {last} repeats {run} times)"
    return {"repeated_id": last, "run": run, "start": start, "engine": engine, "suspicious": suspicious, "text": text}
