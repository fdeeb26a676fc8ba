"""Prometheus text: vLLM V1 and V0 speculative counters, SGLang's gauges. One row per scrape and label set.

V1 counters vllm:spec_decode_num_drafts, _num_draft_tokens, _num_accepted_tokens, _num_accepted_tokens_per_pos{position="0"}, on the
wire with _total (0.8.5 declared them so) and a _created sample each, which is a time and no count. V0 has no drafts: emitted /
(drafts (k + 1)) is its gauge vllm:spec_decode_efficiency, and drafts k its draft tokens.
"""

import math
import re

from k3lab.drafter.log_counts import BIGGEST, MOST_POSITIONS

_SAMPLE = re.compile(
    rb'(vllm|sglang):(spec_\w{1,80})(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?\s+'
    rb"([-+]?(?:\d{1,30}(?:\.\d{0,30})?(?:[eE][-+]?\d{1,3})?|NaN|Inf))(?![\w.])"
)
_LABEL = re.compile(rb'(\w{1,80})="((?:[^"\\]|\\.)*)"')
_V1 = {"spec_decode_num_drafts": "drafts", "spec_decode_num_draft_tokens": "drafted", "spec_decode_num_accepted_tokens": "accepted",
       "spec_decode_num_emitted_tokens": "emitted"}  # fmt: skip
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_GAUGES = {"spec_decode_draft_acceptance_rate", "spec_decode_efficiency", "spec_accept_length", "spec_accept_rate", "spec_cap_length",
           "spec_block_accept_length", "spec_num_steps", "spec_num_draft_tokens"}  # fmt: skip


class Scrapes:
    """Samples of one source, gathered to scrapes: a series that comes a second time begins the next one."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.rows: list[dict] = []
        self._open: dict[tuple, dict] = {}

    def sample(self, line: bytes, number: int) -> str | None:
        """Take a line. None: no metric of ours; "": taken; else why it was not understood."""
        starts = [p for p in (line.find(b"vllm:spec_"), line.find(b"sglang:spec_")) if p >= 0]
        m = _SAMPLE.match(line, min(starts)) if starts else None  # one attempt: a line of names in names costs no more than its length
        if m is None:
            if line.lstrip().startswith(b"#") and (b"# HELP" in line or b"# TYPE" in line):
                return ""
            return "a speculative metric's name without labels and a value" if starts else None
        engine, name = m[1].decode(), m[2].decode()
        labels = {k.decode(): v.decode(errors="replace") for k, v in _LABEL.findall(m[3] or b"")}
        created = name.endswith("_created")
        name = name.removesuffix("_created").removesuffix("_total")
        position = labels.pop("position", None)
        value = float(m[4])
        if name not in _V1 and name != _PER_POSITION and name not in _GAUGES:
            return f"no known metric: {engine}:{name}"
        if name == _PER_POSITION and (position is None or not position.isdecimal() or len(position) > 3 or int(position) >= MOST_POSITIONS):
            return f"accepted tokens per position without a position from 0 to {MOST_POSITIONS - 1}"
        if not created and name not in _GAUGES and not (0 <= value < BIGGEST and math.isfinite(value)):
            return f"a count of {m[4].decode()}"
        key = (engine, tuple(sorted(labels.items())))
        series = (name, position, created)
        at = self._open.get(key)
        if at is None or series in at["series"]:
            if at is not None:
                self.close()
            at = self._open[key] = {"line": number, "labels": labels, "series": {}}
        at["series"][series] = value
        return ""

    def close(self) -> None:
        """End the scrape that is open: a row for each label set."""
        for (engine, _), at in self._open.items():
            row = _vllm_row(at["series"]) if engine == "vllm" else _sglang_row(at["series"])
            labels = dict(at["labels"])
            model = labels.pop("model_name", labels.pop("model", ""))
            stream = ", ".join(f"{k}={v}" for k, v in sorted(labels.items()))
            self.rows.append({"source": self.source, "line": at["line"], "engine": engine, "stream": stream, "model": model, **row})
        self._open = {}


def _vllm_row(series: dict) -> dict:
    counts = {_V1[name]: v for (name, _, created), v in series.items() if name in _V1 and not created}
    by_position = {int(p): v for (name, p, created), v in series.items() if name == _PER_POSITION and not created}
    started = [v for (name, _, created), v in series.items() if created and name in _V1]
    gauge = {name: v for (name, _, _), v in series.items() if name in _GAUGES}
    row = {"format": "prometheus", "scope": "cumulative", "convention": "bonus", "created": min(started, default=math.nan)}
    row["reported_rate"] = gauge.get("spec_decode_draft_acceptance_rate", math.nan)
    if "emitted" in counts:
        row["format"] = "prometheus V0"
        efficiency, drafted = gauge.get("spec_decode_efficiency", math.nan), counts.get("drafted", math.nan)
        # emitted / efficiency = drafts (k + 1) = drafts + drafted
        drafts = round(counts["emitted"] / efficiency - drafted) if efficiency > 0 and drafted == drafted else math.nan
        if drafts == drafts and 0 < drafts <= counts["emitted"] <= drafts + drafted:
            return row | {"drafts": drafts, "drafted": drafted, "accepted": counts["emitted"] - drafts, "emitted": counts["emitted"],
                          "k": round(drafted / drafts)}  # fmt: skip
        return row | {"drafted": drafted, "emitted": counts["emitted"]}
    if counts.get("accepted", 0) > counts.get("drafted", math.inf):  # damaged, or of two servers: what was accepted is not known
        del counts["accepted"]
    row |= counts
    if {"drafts", "accepted"} <= set(counts):
        row["emitted"] = counts["drafts"] + counts["accepted"]
    if by_position and set(by_position) == set(range(len(by_position))):
        row |= {f"accepted_{j}": v for j, v in by_position.items()} | {"k": len(by_position)}
        if counts.get("drafts"):
            row["residual"] = (sum(by_position.values()) - counts.get("accepted", math.nan)) / counts["drafts"]
            row["tolerance"] = 0.005  # counters are read one after the other while the engine runs
    return row


def _sglang_row(series: dict) -> dict:
    gauge = {name: v for (name, _, _), v in series.items()}
    steps = gauge.get("spec_num_steps", math.nan)
    return {"format": "sglang gauge", "scope": "gauge", "convention": "bonus", "reported_mean": gauge.get("spec_accept_length", math.nan),
            "reported_rate": gauge.get("spec_accept_rate", math.nan), "k": steps if steps > 0 else math.nan}  # fmt: skip
