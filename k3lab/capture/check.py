"""The capture doctor: what is wrong with a capture, named before anything runs on it.

Each finder below looks at one thing and yields findings; check() gathers them. A finding is an "error" (a replay would be
refused or wrong), a "warning" (it would run, and the result may not mean what it seems to) or a "note". Nothing is raised
for content that loaded: a sick capture is what the doctor is for.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from k3lab.capture.format import REQUIRED, SAY_LAYOUT, STORE_RAW, TENSORS, Capture, is_integer, not_activated, starting_slots
from k3lab.errors import BadInput
from k3lab.kda.call import FLOATS, KdaCall
from k3lab.kda.reference import recurrent_kda
from k3lab.shapes import CHUNK

if TYPE_CHECKING:
    import pandas as pd

SEVERITIES = ("error", "warning", "note")
PER_TOKEN = {"q": 3, "k": 3, "v": 3, "raw_g": 3, "raw_beta": 2, "output_gate": 3, "g": 3, "beta": 2, "o": 3}
PROVENANCE = ("model", "layer", "step", "engine", "engine_version", "git_commit", "tp_rank", "tp_size")
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
TAIL = 8  # equal ids at the end of a stream, or repeats of a cycle times its period, before it counts as a loop
STATE_TOKENS = 64  # longest sequence on which the state layout is tried out


class Finding(NamedTuple):
    severity: str
    tensor: str
    where: str
    finding: str
    what_to_do: str


def check(capture: Capture) -> "pd.DataFrame":
    """Everything the doctor finds, most severe first: columns severity, tensor, where, finding, what_to_do.

    An empty frame means that nothing was found, not that the capture is right.
    """
    import pandas as pd  # here, because the recorder of this package also runs in servers that have no pandas

    finders = [_names, _finite, _rows, _token_ids]
    if capture.kind == "kda":
        finders += [_axes, _cu_seqlens, _num_decodes, _weights, _gate, _state_shape, _state_layout_by_replay, _slots]
    if capture.kind == "hidden_states":
        finders.append(_hidden_states)
    found = [f for finder in [*finders, _metadata] for f in finder(capture)]
    found.sort(key=lambda f: SEVERITIES.index(f.severity))
    return pd.DataFrame(found, columns=list(Finding._fields))


def _names(c: Capture) -> Iterator[Finding]:
    known = TENSORS[c.kind]
    for name in sorted(c.tensors):
        if known and name not in known and not name.startswith("arg."):
            yield Finding("note", name, "", "is not a name of the capture format; nothing reads it", f"known names: {', '.join(known)}")
    spare = {"raw_g": "g", "raw_beta": "beta"}
    if "g" in c.tensors:
        spare |= {"A_log": "g", "dt_bias": "g"}
    for name in REQUIRED[c.kind]:
        absent = name in c.metadata.get("absent", [])
        if name not in c.tensors and spare.get(name) not in c.tensors and name != "cu_seqlens" and not absent:
            yield Finding("error", name, "", f"is missing, expected {known[name]}", "record it, or add it to the capture's tensors")


def _finite(c: Capture) -> Iterator[Finding]:
    for name, x in c.tensors.items():
        if not x.is_floating_point() or x.numel() == 0:
            continue
        if x.dtype not in FLOATS:
            if x.element_size() == 1 and x.dtype not in FP8:
                yield Finding("note", name, "", f"dtype {x.dtype} is not looked into", "record it before it is packed")
                continue
            x = x.float()
        bad = ~torch.isfinite(x)
        if not bad.any():
            continue
        nan = int(torch.isnan(x).sum())
        first = [int(i) for i in bad.nonzero()[0]]
        what = f"{nan} NaN and {int(bad.sum()) - nan} Inf of {x.numel()} elements"
        if name == "initial_state" and not _starting(c, bad.flatten(1).any(1) if bad.dim() > 1 else bad):
            yield Finding("note", name, f"first at {first}", f"{what}, in rows that start from zeros", "none: a stale slot is not read")
        elif name in ("o", "final_state", "token_states"):
            do = "python -m k3lab nan CAPTURE names the stage, sequence and row it came from"
            yield Finding("error", name, f"first at {first}{_sequence(c, name, first)}", f"recorded result has {what}", do)
        else:
            yield Finding("error", name, f"first at {first}", what, "look upstream of this call: the input is already bad")


def _starting(c: Capture, bad_rows: Tensor) -> bool:
    """True if a bad row of initial_state is one that the call reads."""
    has = c.tensors.get("has_initial_state")
    return has is None or has.shape != bad_rows.shape or bool((has.bool() & bad_rows).any())


def _sequence(c: Capture, name: str, first: list[int]) -> str:
    """', sequence n of length L' of a bad element, where the capture can say."""
    cu = _offsets(c)
    if cu is None:
        return ""
    if name == "final_state":
        n = first[0]
    else:
        row = first[1] if name == "o" and c.tensors[name].dim() == 4 else first[0]
        n = int(torch.searchsorted(cu, row, right=True)) - 1
    return f", sequence {n} of length {int(cu[n + 1] - cu[n])}" if 0 <= n < len(cu) - 1 else ""


def _offsets(c: Capture) -> Tensor | None:
    """cu_seqlens as int64 if it is sound, else None."""
    cu = c.tensors.get("cu_seqlens")
    if cu is None or cu.dim() != 1 or cu.numel() < 2 or not is_integer(cu) or bool((cu.long().diff() < 0).any()):
        return None
    return cu.long().contiguous()


def _packed(c: Capture, name: str) -> Tensor | None:
    """A token tensor without its batch axis, or None if there is none or its rank is wrong."""
    x = c.tensors.get(name)
    if x is None:
        return None
    if x.dim() == PER_TOKEN[name] + 1:
        x = x.flatten(0, 1)
    return x if x.dim() == PER_TOKEN[name] and x.numel() else None


def _rows(c: Capture) -> Iterator[Finding]:
    wide = {n: x for n in ("q", "k", "v", "raw_g", "output_gate", "o") if (x := _packed(c, n)) is not None}
    wide |= {n: c.tensors[n] for n in ("hidden_states", "prefix", "pending") if n in c.tensors and c.tensors[n].dim() > 1}
    for name, x in wide.items():
        rows = x.contiguous().flatten(1)
        if rows.shape[0] < 2 or rows.shape[1] == 0:
            continue
        zero = (rows == 0).all(1)
        if zero.any():
            first = int(zero.nonzero()[0])
            what = f"{int(zero.sum())} of {len(rows)} rows are all zero"
            do = "the null slot writes zeros to o; elsewhere look for padding rows or a buffer that was never written"
            yield Finding("warning", name, f"first row {first}", what, do)
        live = rows[~zero]
        if name == "o" or len(live) < 2:
            continue
        seen = {hash(row.tobytes()) for row in live.view(torch.uint8).numpy()}
        copies = len(live) - len(seen)
        if copies:
            severity = "warning" if 2 * copies >= len(live) else "note"
            do = "equal tokens give equal rows in a first layer; elsewhere look for a stale buffer or a recording taken twice"
            yield Finding(severity, name, "", f"{copies} of {len(live)} rows repeat another row bit for bit", do)


def _axes(c: Capture) -> Iterator[Finding]:
    cu = _offsets(c)
    beta, A_log = _packed(c, "raw_beta"), c.tensors.get("A_log")
    tokens = int(cu[-1]) if cu is not None else len(beta) if beta is not None else None
    heads = A_log.numel() if A_log is not None else beta.shape[1] if beta is not None else None
    for name, rank in PER_TOKEN.items():
        x = c.tensors.get(name)
        if x is None:
            continue
        shape = x.shape[1:] if x.dim() == rank + 1 and x.shape[0] == 1 else x.shape
        if x.dim() not in (rank, rank + 1):
            yield Finding("error", name, "", f"shape {list(x.shape)}, expected {TENSORS['kda'][name]}", "reshape it to the format's axes")
        elif len(shape) == rank and (tokens, heads) == (shape[1], shape[0]) and tokens != heads:
            what = f"shape {list(x.shape)} has the {heads} heads before the {tokens} tokens"
            yield Finding("error", name, "", what, f"transpose it to {TENSORS['kda'][name]}")
        elif len(shape) == rank and tokens is not None and shape[0] != tokens:
            yield Finding("error", name, "", f"shape {list(x.shape)} for {tokens} tokens", "cut padding rows, or correct cu_seqlens")


def _cu_seqlens(c: Capture) -> Iterator[Finding]:
    cu, name = c.tensors.get("cu_seqlens"), "cu_seqlens"
    q = c.tensors.get("q")
    if cu is None:
        derivable = q is not None and (q.dim() == 4 or "state_indices" in c.tensors)
        do = "nothing, if every batch row (or every token with its own slot) is one sequence; else add it"
        yield Finding("note" if derivable else "error", name, "", "is missing", do)
        return
    if cu.dim() != 1 or cu.numel() < 2 or not is_integer(cu):
        yield Finding("error", name, "", f"shape {list(cu.shape)} dtype {cu.dtype}, expected [N + 1] int32 or int64", "convert it")
        return
    if cu.dtype not in (torch.int32, torch.int64):
        yield Finding("warning", name, "", f"dtype {cu.dtype}; kernels read int32 or int64", "convert it to int32")
    steps = cu.long().diff()
    if int(cu[0]) != 0:
        yield Finding("error", name, "[0]", f"starts at {int(cu[0])}, expected 0", "rebase it: subtract its first entry")
    for sign, what in ((steps < 0, "decreases"), (steps == 0, "is an empty sequence")):
        if sign.any():
            i = int(sign.nonzero()[0])
            do = "drop the padding entries of a graph-sized buffer, or correct the offsets"
            yield Finding("error", name, f"sequence {i}", f"{what}: {int(cu[i])} to {int(cu[i + 1])}", do)
    packed = _packed(c, "q")
    if packed is not None and int(cu[-1]) != len(packed):
        what = f"ends at {int(cu[-1])}, q has {len(packed)} token rows"
        yield Finding("error", name, f"[{len(cu) - 1}]", what, "cut the padding rows of the token tensors, or correct the offsets")


def _num_decodes(c: Capture) -> Iterator[Finding]:
    count, cu = c.metadata.get("num_decodes"), _offsets(c)
    if count is None or cu is None:
        return
    lengths = cu.diff()
    name = "metadata num_decodes"
    if not 0 <= count <= len(lengths):
        yield Finding("error", name, "", f"is {count}, there are {len(lengths)} sequences", "correct it")
        return
    longer = (lengths[:count] != 1).nonzero()
    if len(longer):
        i = int(longer[0])
        what = f"is {count}, but sequence {i} has {int(lengths[i])} tokens; decodes come first and have one token"
        yield Finding("error", name, f"sequence {i}", what, "correct it, or reorder the batch decode-first")
    elif count < len(lengths) and int(lengths[count]) == 1 and "spec_mask" not in c.tensors:
        what = f"is {count}, but sequence {count} has one token too"
        yield Finding("note", name, f"sequence {count}", what, "none, if it is a prefill piece of one token; else count it as a decode")


def _weights(c: Capture) -> Iterator[Finding]:
    for name in ("A_log", "dt_bias"):
        x = c.tensors.get(name)
        if x is not None and x.dtype != torch.float32:
            do = "check the engine's parameter dtype: exp(A_log) of a rounded A_log decays differently"
            yield Finding("warning", name, "", f"dtype {x.dtype}, engines keep it in float32", do)


def _gate(c: Capture) -> Iterator[Finding]:
    bound = c.metadata.get("lower_bound")
    if bound is not None and not (math.isfinite(bound) and bound < 0):
        what = f"is {bound}; the log-decay lies in (lower_bound, 0), natural log"
        yield Finding("error", "metadata lower_bound", "", what, "give the negative bound of the checkpoint (Kimi-K3: -5), or None")
        bound = None
    for name, do in STORE_RAW.items():
        x = c.tensors.get(name)
        if x is not None and f"raw_{name}" not in c.tensors and x.dtype in FLOATS and (why := not_activated(name, x)):
            yield Finding("error", name, "", why, do)
    beta = c.tensors.get("raw_beta")
    if beta is not None and beta.dtype in FLOATS and beta.numel() >= 64 and bool(((beta >= 0) & (beta <= 1)).all()):
        what = "all values lie in [0, 1]: looks like beta after the sigmoid"
        yield Finding("warning", "raw_beta", "", what, "if so, store it under the name beta")
    g = _packed(c, "raw_g")
    if g is None or g.numel() < 64 or g.dtype not in FLOATS or not bool((g <= 0).all()):
        return
    low, high = float(g.min()), float(g.max())
    do = "if so, store it under the name g (kda_call turns it back), with gate_base 'natural' or 'log2'"
    cu = _offsets(c)
    longest = int(cu.diff().argmax()) if cu is not None else None
    piece = g[cu[longest] : cu[longest + 1]][:CHUNK] if cu is not None else g[:CHUNK]
    if len(piece) >= 4 and bool((piece.diff(dim=0) <= 0).all()):
        what = f"all values are <= 0 (down to {low:.3g}) and fall from token to token: looks like the gate's cumulative sum"
        yield Finding("warning", "raw_g", "", what, "record the gate before the cumulative sum")
    elif bound is None or low >= bound:
        what = f"all values lie in [{low:.3g}, {high:.3g}], inside [lower_bound, 0]: looks already activated"
        yield Finding("warning", "raw_g", "", what, do)
    elif low >= bound / math.log(2) and high >= bound:
        what = f"all values lie in [{low:.3g}, {high:.3g}], inside [lower_bound / ln 2, 0]: looks activated, in log2 units"
        yield Finding("warning", "raw_g", "", what, do)


def _state_shape(c: Capture) -> Iterator[Finding]:
    q, v, layout = _packed(c, "q"), _packed(c, "v"), c.metadata.get("state_layout")
    states = [n for n in ("initial_state", "final_state") if n in c.tensors]
    if states and layout is None:
        yield Finding("error", "metadata state_layout", "", "is missing, and with K = V no shape tells", SAY_LAYOUT)
    if q is None or v is None:
        return
    cu = _offsets(c)
    n = len(cu) - 1 if cu is not None else None
    sizes = {"vk": (q.shape[1], v.shape[2], q.shape[2]), "kv": (q.shape[1], q.shape[2], v.shape[2])}
    other = {"vk": "kv", "kv": "vk"}
    for name in states:
        shape = tuple(c.tensors[name].shape)
        if layout is not None and shape[1:] != sizes[layout]:
            swapped = shape[1:] == sizes[other[layout]]
            what = f"shape {list(shape)}, expected [N, {', '.join(map(str, sizes[layout]))}] for state_layout {layout!r}"
            do = f"set state_layout to {other[layout]!r}: K and V are swapped" if swapped else "correct the axes of the state"
            yield Finding("error", name, "", what, do)
        elif n is not None and len(shape) == 4 and shape[0] != n:
            do = "gather the used slots by state_indices: a capture holds one state per sequence, not the pool"
            yield Finding("error", name, "", f"holds {shape[0]} states for {n} sequences", do)
        dtype = c.tensors[name].dtype
        if dtype not in (torch.float32, torch.float64):
            yield Finding("warning", name, "", f"dtype {dtype}; the recurrent state is kept in float32", "check the engine's state dtype")


def _state_layout_by_replay(c: Capture) -> Iterator[Finding]:
    """With K = V only arithmetic tells the layouts apart: replay one short sequence in float64 under both."""
    final, layout = c.tensors.get("final_state"), c.metadata.get("state_layout")
    if final is None or layout is None:
        return
    try:
        call = c.kda_call()
    except BadInput:
        return  # the other finders say what is wrong
    short = [n for n, length in enumerate(call.lengths.tolist()) if length <= STATE_TOKENS and _live(call, n)]
    square = call.q.shape[-1] == call.v.shape[-1]
    if not short or not square or final.shape != call.state_vk().shape:
        return
    n = short[0]
    one, _ = call.select([n])
    recorded = final[n].double()
    if not torch.isfinite(recorded).all():
        return
    errors = {}
    for name in ("vk", "kv"):
        truth = recurrent_kda(replace(one, state_layout=name))["final_state"][0]
        truth = truth if name == "vk" else truth.transpose(-1, -2)
        errors[name] = float((recorded - truth).norm() / truth.norm().clamp_min(1e-30))
    other = "kv" if layout == "vk" else "vk"
    if errors[other] < 0.1 and errors[layout] > 5 * errors[other]:
        what = f"fits the float64 recurrence as {other!r} (relative error {errors[other]:.2g}), not as {layout!r} ({errors[layout]:.2g})"
        yield Finding("error", "final_state", f"sequence {n}", what, f"set state_layout to {other!r}")


def _live(call: KdaCall, n: int) -> bool:
    return call.state_indices is None or int(call.state_indices[n]) > 0


def _slots(c: Capture) -> Iterator[Finding]:
    slots, cu = c.tensors.get("state_indices"), _offsets(c)
    if slots is None:
        return
    count = len(cu) - 1 if cu is not None else len(slots) if slots.dim() else 0
    try:
        used = starting_slots(slots, count, c.tensors.get("num_accepted_tokens"))
    except BadInput as e:
        yield Finding("error", "state_indices", "", str(e).partition(": ")[2], "correct it")
        return
    null = (used <= 0).nonzero().flatten().tolist()
    if null:
        what = f"{len(null)} of {len(used)} sequences use the null slot (index <= 0): no state is read or written, o is zero"
        yield Finding("warning", "state_indices", f"sequence {null[0]}", what, "none for padding rows; a live request here loses its state")
    repeated = [(slot, n) for slot, n in Counter(used.tolist()).items() if n > 1 and slot > 0]
    if repeated:
        what = f"slot {repeated[0][0]} serves {repeated[0][1]} sequences ({len(repeated)} such slots): they overwrite each other's state"
        yield Finding("error", "state_indices", f"slot {repeated[0][0]}", what, "look at the engine's slot allocation")


def token_loop(ids: Tensor) -> tuple[int, int] | None:
    """(period, length) of the cycle that a token stream [T] ends in, or None: period 1 is one repeated id.

    The tail counts as a loop from max(8, 4 * period) ids on; periods up to 16 are tried, shortest first.
    """
    values = ids.flatten().tolist()
    for period in range(1, 17):
        length = period
        while length < len(values) and values[-1 - length] == values[-1 - length + period]:
            length += 1
        if length >= max(TAIL, 4 * period):
            return period, length
    return None


def _token_ids(c: Capture) -> Iterator[Finding]:
    ids = c.tensors.get("token_ids")
    if ids is None:
        return
    if ids.dim() != 1 or not is_integer(ids):
        yield Finding("error", "token_ids", "", f"shape {list(ids.shape)} dtype {ids.dtype}, expected [T] integers", "convert it")
        return
    cu = _offsets(c)
    if cu is not None and int(cu[-1]) == len(ids) and int(cu[0]) == 0:
        streams = list(enumerate(ids.split(cu.diff().tolist())))
    else:
        streams = [(0, ids)]
    for n, stream in streams:
        loop = token_loop(stream)
        if loop is None:
            continue
        period, length = loop
        tail = stream[-period:].tolist()
        what = f"ends in {length} tokens of id {tail[0]}" if period == 1 else f"ends in {length} tokens of the cycle {tail}"
        do = "argmax over NaN gives one id for ever (0 in vLLM, 163839 in SGLang); other loops inflate acceptance and repeat rows"
        yield Finding("warning", "token_ids", f"sequence {n}", what, do)
    negative = (ids.long() < 0).nonzero().flatten()
    if len(negative):
        what = f"{len(negative)} ids are negative: placeholders, not tokens"
        yield Finding("note", "token_ids", f"first at {int(negative[0])}", what, "record the ids after sampling")


def _hidden_states(c: Capture) -> Iterator[Finding]:
    if "axis_order" in c.metadata:
        do = "none: it was turned to [T, taps, hidden]; tell whoever wrote the file"
        yield Finding("note", "hidden_states", "", str(c.metadata["axis_order"]), do)
    for key, why in (("layer_ids", "the layer of each tap"), ("stream", "prefix or mixture")):
        if key not in c.metadata:
            do = f"put it into the JSON side file: {why} decides what a drafter reads, and no shape tells"
            yield Finding("warning", f"metadata {key}", "", "is missing", do)


def _metadata(c: Capture) -> Iterator[Finding]:
    meta = c.metadata
    if c.kind == "kda":
        if "lower_bound" not in meta and "g" not in c.tensors:
            do = "give the gate's lower bound (natural log), or None for a softplus gate"
            yield Finding("error", "metadata lower_bound", "", "is missing", do)
        for key, default in (("num_decodes", 0), ("eps", 1e-5)):
            if key not in meta and (key != "eps" or "norm_weight" in c.tensors):
                yield Finding("warning", f"metadata {key}", "", f"is missing; {default} is assumed", "add it")
        q = c.tensors.get("q")
        if q is not None and "dtype" in meta and str(q.dtype) != f"torch.{meta['dtype']}":
            yield Finding("warning", "metadata dtype", "", f"is {meta['dtype']}, q is {q.dtype}", "was the capture recast after recording?")
    unknown = [key for key in PROVENANCE if meta.get(key) in (None, "", -1) and not (key == "layer" and "layers" in meta)]
    if unknown:
        yield Finding("note", "metadata", "", f"unknown origin: {', '.join(unknown)}", "add what you know, before the capture travels")
