"""JSON that states acceptance, anywhere in a document: per-request metrics, bench results, SGLang's meta_info and server info.

vLLM PR 48915   {"speculative_decoding": {"acceptance_histogram": [39, 1, 0, 3], "num_spec_steps": 43, …}}    index = drafts accepted
vllm bench      {"spec_decode_num_drafts": …, "spec_decode_per_position_acceptance_rates": [0.76, …]}          fractions
SGLang          {"spec_verify_ct": …, "spec_num_correct_drafts": …, "spec_correct_drafts_histogram": […]}      (older names are read too)
SGLang          {"internal_states": [{"avg_spec_accept_length": 3.56}]}
"""

import json
import math
from collections.abc import Iterator

from k3lab.drafter.log_counts import BIGGEST, MOST_POSITIONS, histogram_survivors

MARKERS = (b"speculative_decoding", b"spec_decode_num_drafts", b"spec_verify_ct", b"spec_accept_length")
_DECODER = json.JSONDecoder()
_TRIES = 8  # a prefix may hold braces of its own


def decode(text: str) -> object | None:
    """The first JSON object or array in a text that may have something before it; None if there is none."""
    at = -1
    for _ in range(_TRIES):
        starts = [i for i in (text.find("{", at + 1), text.find("[", at + 1)) if i >= 0]
        if not starts:
            return None
        at = min(starts)
        try:
            value, _ = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            continue
        if value and not (isinstance(value, list) and not any(isinstance(x, dict) for x in value)):
            return value
    return None


def json_rows(document: object) -> Iterator[dict | str]:
    """A row for each record in the document; a text for a record that is one by its keys and cannot be used."""
    stack: list[tuple[object, dict]] = [(document, {})]
    while stack:
        node, about = stack.pop()
        if isinstance(node, list):
            stack.extend((x, about) for x in reversed(node) if isinstance(x, dict | list))
            continue
        if not isinstance(node, dict):
            continue
        about = _about(node, about)
        used = None
        if isinstance(inner := node.get("speculative_decoding"), dict) and "num_spec_steps" in inner:
            yield _finished(_vllm_request, inner, about)
            used = inner
        if "spec_verify_ct" in node:
            yield _finished(_sglang_request, node, about)
        elif "spec_decode_num_drafts" in node:
            yield _finished(_bench, node, about)
        elif "avg_spec_accept_length" in node:
            yield _finished(_server_info, node, about)
        stack.extend((x, about) for x in reversed(node.values()) if isinstance(x, dict | list) and x is not used)


class _Unusable(Exception):
    """Why a record cannot be used."""


def _finished(make, node: dict, about: dict) -> dict | str:
    try:
        return make(node, about)
    except _Unusable as why:
        return str(why)


_NAMES = (("model", ("model", "model_id", "model_name")), ("id", ("id", "request_id", "rid")))
_ALL_NAMES = {"index", "usage", "prompt_tokens", *(n for _, names in _NAMES for n in names)}


def _about(node: dict, outer: dict) -> dict:
    """What the enclosing objects say of a request: model, id, tokens."""
    if _ALL_NAMES.isdisjoint(node):
        return outer
    about = dict(outer)
    for key, names in _NAMES:
        for name in names:
            if isinstance(node.get(name), str):
                about[key] = node[name][:200]
    if isinstance(node.get("index"), int):
        about["choice"] = node["index"]
    usage = node["usage"] if isinstance(node.get("usage"), dict) else node
    tokens = [usage.get(n) for n in ("prompt_tokens", "completion_tokens")]
    if all(type(t) is int and 0 <= t < BIGGEST for t in tokens):
        about["length"] = float(sum(tokens))
    return about


def _row(about: dict, **values: object) -> dict:
    row = {"stream": "", "model": about.get("model", ""), "length": about.get("length", math.nan), "convention": "bonus", **values}
    if row["scope"] == "request" and "id" in about:
        row["request"] = f"{about['id']}/{about.get('choice', 0)}"
    return row


def _count(node: dict, *names: str) -> int:
    """The first of the names that is there, as a count."""
    for name in names:
        value = node.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < BIGGEST or value != int(value):
                raise _Unusable(f"{name} is no count: {str(value)[:40]}")
            return int(value)
    raise _Unusable(f"a record without {names[0]}")


def _ratio(node: dict, name: str) -> float:
    value = node.get(name)
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < BIGGEST
    return float(value) if good else math.nan


def _histogram(node: dict, name: str, drafts: int) -> list[int] | None:
    found = node.get(name)
    if not found:
        return None
    if not isinstance(found, list) or len(found) > MOST_POSITIONS + 1:
        raise _Unusable(f"{name} is no list of up to {MOST_POSITIONS + 1} counts")
    counts = [_count({name: n}, name) for n in found]
    if sum(counts) != drafts:
        raise _Unusable(f"{name} holds {sum(counts)} rounds, the record says {drafts}")
    return counts


def _counts(drafts: int, drafted: int, accepted: int, reached: list[int] | None) -> dict:
    if accepted > drafted:
        raise _Unusable(f"{accepted} accepted of {drafted} drafted tokens")
    row: dict = {"drafts": drafts, "drafted": drafted, "accepted": accepted, "emitted": drafts + accepted}
    return row | {f"accepted_{j}": n for j, n in enumerate(reached or ())}


def _vllm_request(node: dict, about: dict) -> dict:
    drafts = _count(node, "num_spec_steps")
    accepted, drafted = _count(node, "num_accepted_draft_tokens"), _count(node, "num_draft_tokens")
    histogram = _histogram(node, "acceptance_histogram", drafts)
    reached = histogram_survivors(histogram) if histogram else None
    mean = _ratio(node, "mean_acceptance_length")
    check = (sum(reached) / drafts + 1 - mean) if reached and drafts else math.nan
    k = len(reached) if reached else _ratio(node, "num_spec_tokens")
    return _row(about, engine="vllm", format="vllm request", scope="request", k=k, reported_mean=mean, residual=check, tolerance=0.0051,
                reported_rate=_ratio(node, "draft_acceptance_rate"), **_counts(drafts, drafted, accepted, reached))  # fmt: skip


def _sglang_request(node: dict, about: dict) -> dict:
    """spec_accept_length is completion tokens / verify steps, so it counts the token of the prefill too: counts go before it."""
    drafts = _count(node, "spec_verify_ct")
    row = {"engine": "sglang", "format": "sglang request", "scope": "request", "reported_mean": _ratio(node, "spec_accept_length"),
           "reported_rate": _ratio(node, "spec_accept_rate")}  # fmt: skip
    names = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    if not any(n in node for n in names):
        return _row(about, **row, drafts=drafts)
    accepted = _count(node, *names)
    drafted = _count(node, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    name = "spec_correct_drafts_histogram" if "spec_correct_drafts_histogram" in node else "spec_accept_histogram"
    histogram = _histogram(node, name, drafts)
    reached = histogram_survivors(histogram) if histogram else None
    if reached and drafts:
        row |= {"residual": (sum(reached) - accepted) / drafts, "tolerance": 1e-9}
    k = round(drafted / drafts) if drafts else math.nan
    return _row(about, **row, k=k, **_counts(drafts, drafted, accepted, reached))


def _bench(node: dict, about: dict) -> dict:
    drafts, accepted = _count(node, "spec_decode_num_drafts"), _count(node, "spec_decode_accepted_tokens")
    rates = node.get("spec_decode_per_position_acceptance_rates") or []
    if not isinstance(rates, list) or len(rates) > MOST_POSITIONS or not all(0 <= _ratio({"r": r}, "r") <= 1 for r in rates):
        raise _Unusable("spec_decode_per_position_acceptance_rates is no list of up to 64 fractions")
    mean = _ratio(node, "spec_decode_acceptance_length")
    check = {"residual": 1 + sum(rates) - mean, "tolerance": 0.0051} if rates else {}
    drafted, rate = _count(node, "spec_decode_draft_tokens"), _ratio(node, "spec_decode_acceptance_rate")
    if drafted and abs(rate / 100 - accepted / drafted) < abs(rate - accepted / drafted):  # percent, as the text of the same run prints
        rate /= 100
    counts = _counts(drafts, drafted, accepted, [round(r * drafts) for r in rates])
    return _row(about, engine="vllm", format="vllm bench", scope="bench", k=len(rates) or math.nan, reported_mean=mean,
                reported_rate=rate, **check, **counts)  # fmt: skip


def _server_info(node: dict, about: dict) -> dict:
    mean = _ratio(node, "avg_spec_accept_length")
    return _row(about, engine="sglang", format="sglang server info", scope="gauge", reported_mean=mean)
