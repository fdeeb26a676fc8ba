"""Speculative acceptance out of what engines leave behind: logs, metrics, responses and reports, in any mix, into one frame of counts.

read(["server.log", "before.prom", "after.prom"]) streams the bytes, hands each line to the format that knows it, and counts what no
format understood. Formats: log_lines (vLLM, SGLang, ATOM), metrics_text (Prometheus), json_records, log_blocks (benches, speculators).
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from k3lab.drafter import json_records
from k3lab.drafter import log_lines as lines
from k3lab.drafter.diagnosis import Diagnosis, diagnose
from k3lab.drafter.log_blocks import Blocks
from k3lab.drafter.log_counts import COUNTS
from k3lab.drafter.log_input import CHUNK, LONGEST, Rewound, chunks, opened
from k3lab.drafter.log_totals import Totals, countable, total
from k3lab.drafter.metrics_text import Scrapes

LONG = 16 << 10  # a line above it can only be JSON
SHOWN = 5  # lines of each kind that are kept to show
WIDTH = 200
KEYS = ("source", "line", "engine", "stream", "model", "format", "scope", "convention", "ts")
_RATIOS = ("reported_mean", "reported_rate", "residual", "tolerance", "length", "running", "created")
_COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
MARKERS = (b"ccept", b"spec_", b"aux", b"iffusion", b"SIMULATE_ACC", b"synthetic", b"ulative Decoding", b"MTP Stats")
_LOOKS = re.compile(
    rb"(?i)accept(?:ance|ed)?[ _]?(?:rate|len)|accepted?[^\n]{0,40}draft|draft[^\n]{0,40}accept|spec\w*[ _]?decod\w*[ _]metrics|MTP stats"
    rb"|spec_decode_num|spec_accept|spec_verify_ct|aux hidden capture|acceptance report"
)
_SIMULATED = re.compile(
    rb"""(?<!unset )SGLANG_SIMULATE_ACC_LEN['"]?\s*[=:]\s*['"]?(\d+(?:\.\d+)?)|rejection_sample_method['"]?\s*[=:]\s*['"]?synthetic"""
    rb"""|--spec-decode-acceptance-rate[= ]\d"""
)
_ENGINES = {"vllm": b"Avg generation throughput:", "sglang": b"Decode batch", "atom": b"[atom "}
_FORMATS = {"vllm": "a line 'SpecDecoding metrics:'", "sglang": "'accept len:' in the lines 'Decode batch'", "atom": "a line '[MTP Stats'"}


@dataclass
class Unread:
    """What of one source was not understood. spec_like: lines that look like acceptance and did not parse; ordinary: all other lines.

    first: (line, text, reason) of the first few spec_like ones, or of the ordinary ones if nothing in the source was known.
    """

    source: str
    lines: int = 0
    records: int = 0
    ordinary: int = 0
    spec_like: int = 0
    first: list[tuple[int, str, str]] = field(default_factory=list)


@dataclass
class Aux:
    """A line that says what the drafter is fed: mode "prefix", "mixture" or "" (the line does not say)."""

    source: str
    line: int
    kind: str
    layers: list[int]
    mode: str


@dataclass
class LogReport:
    """What read() found.

    records   one row per record: KEYS, request, drafts, drafted, accepted, emitted, k, accepted_0, … (Int64, missing where not stated),
              and reported_mean, reported_rate, residual = 1 + sum of rates - mean, the tolerance that printed digits allow, length
              (tokens of a request), running (SGLang's #running-req)
    counted   the rows that are summed: cumulative twins, earlier scrapes and repeated states left out, scrapes as differences
    totals    the sum that speaks for the input; None if engines are mixed or nothing was counted
    groups    totals by engine, format and source
    """

    records: pd.DataFrame
    counted: pd.DataFrame
    totals: Totals | None
    groups: list[Totals]
    aux: list[Aux]
    flags: dict[str, list[str]]
    unread: list[Unread]
    notes: list[str]
    diagnoses: list[Diagnosis]

    @property
    def recognised(self) -> bool:
        """Something was understood: a record, what the drafter is fed, a flag, or that an engine ran without a word of acceptance."""
        return bool(len(self.records) or self.aux or self.flags or self.diagnosis.kind == "not drafting")

    @property
    def diagnosis(self) -> Diagnosis:
        """The weightiest statement."""
        return self.diagnoses[0]

    @property
    def finding(self) -> bool:
        return any(d.finding for d in self.diagnoses)

    @property
    def mode(self) -> str | None:
        """The stream that the log says the drafter is fed: "prefix", "mixture", "both" if it says either, None if it says nothing."""
        modes = {a.mode for a in self.aux if a.mode}
        return modes.pop() if len(modes) == 1 else "both" if modes else None

    def summary(self) -> dict:
        """JSON-able: mean_emitted, survival, drafts, accepted, drafted, mode, diagnosis, not_understood, and more detail."""
        t = self.totals or Totals("", "", [], 0)
        return {
            "mean_emitted": t.mean_emitted, "interval": [t.low, t.high], "survival": t.survival, "drafts": t.drafts, "accepted": t.accepted,
            "drafted": t.drafted, "emitted": t.emitted, "k": t.k, "estimated": t.estimated,
            "estimated_drafts": t.estimated_drafts, "engine": t.engine or None, "format": t.format or None,
            "mode": self.mode, "aux": [asdict(a) for a in self.aux],
            "diagnosis": self.diagnosis.as_dict(), "also": [d.as_dict() for d in self.diagnoses[1:]], "finding": self.finding,
            "recognised": self.recognised, "records": len(self.records),
            "groups": [{**asdict(g), "survival": g.survival} for g in self.groups], "flags": self.flags, "notes": self.notes,
            "not_understood": [
                {"source": u.source, "lines": u.lines, "records": u.records, "ordinary": u.ordinary, "spec_like": u.spec_like,
                 "first": [{"line": n, "text": text, "reason": why} for n, text, why in u.first]}
                for u in self.unread
            ],
        }  # fmt: skip


def read(inputs: str | Path | Iterable[str | Path]) -> LogReport:
    """Read logs, metrics, responses and reports, of any engine and in any mix.

    inputs: paths ("-" is standard input, .gz is unpacked), or one text: a str with a line break, or with ": " or "{" in it that is
    no file. Prometheus scrapes are taken as before and after in the order given. Counts are summed, means never averaged:

        mean_emitted = sum emitted / sum drafts,    emitted = accepted + drafts,    survival_j = sum accepted_j / sum drafts

    Printed ratios are worked back to integer counts (log_counts); a record's rounding is in `tolerance`.
    Raises BadInput for a path that is missing, a folder, binary, empty or a damaged .gz, and for scrapes in the wrong order.
    """
    scan = _Scan()
    for source, stream in opened(inputs):
        with stream() as f:
            scan.read(source, f)
    return scan.report()


class _Scan:
    """Everything gathered on the way through the sources."""

    def __init__(self) -> None:
        self.vllm, self.v0, self.sglang, self.atom = (lines.LineTable() for _ in range(4))
        self.tables = (self.vllm, self.v0, self.sglang, self.atom)
        self.rows: list[dict] = []
        self.aux: list[Aux] = []
        self.flags: dict[str, list[str]] = {}
        self.flag_counts: dict[str, int] = {}
        self.unread: list[Unread] = []
        self.engines: set[str] = set()

    def read(self, source: str, f) -> None:
        self.source, self.now = source, Unread(source)
        self.unread.append(self.now)
        self.scrapes, self.blocks, self.taken = Scrapes(source), Blocks(source), 0
        before = self._records()
        start: list[tuple[int, str, str]] = []
        document = self._document(f)
        for chunk, cut in chunks(document) if document is not None else ():
            if b"\x1b" in chunk:
                chunk = _COLOUR.sub(b"", chunk)
            if b"\r" in chunk:
                chunk = chunk.replace(b"\r\n", b"\n").removesuffix(b"\r")
            self._note_engines(chunk)
            first = self.now.lines
            if len(start) < SHOWN:
                heads = chunk.split(b"\n", 50)[:50]
                start += [(first + i, _text(x), "") for i, x in enumerate(heads, 1) if x.strip()][: SHOWN - len(start)]
            if cut:
                self.now.lines += 1
                self.taken += 1
                self._refuse(self.now.lines, chunk, f"a line of more than {LONGEST >> 20} MiB, not read to its end")
            elif self.blocks.open or any(m in chunk for m in MARKERS):
                self._lines(chunk)
            else:
                self.now.lines += chunk.count(b"\n") + 1
        self.scrapes.close()
        self.blocks.close()
        self.rows += self.scrapes.rows + self.blocks.rows
        for number, why in self.blocks.unread:
            self._refuse(number, b"", why)
        self.now.records, self.now.ordinary = self._records() - before, self.now.lines - self.taken
        if not self.now.records and not self.now.spec_like and not any(a.source == source for a in self.aux):
            self.now.first = start

    def _records(self) -> int:
        return len(self.rows) + sum(len(t.rows) for t in self.tables)

    def _note_engines(self, chunk: bytes) -> None:
        self.engines |= {name for name, mark in _ENGINES.items() if name not in self.engines and mark in chunk}

    def _document(self, f: Rewound) -> Rewound | None:
        """None if the source is one JSON document and was read as such; else the stream, from its beginning."""
        if f.head.lstrip()[:1] not in (b"{", b"["):
            return f
        parts, size = [], 0
        while size <= LONGEST and (part := f.read(CHUNK)):
            parts.append(part)
            size += len(part)
        data = b"".join(parts)
        f.head = data
        if size > LONGEST or not any(m in data for m in json_records.MARKERS):
            return f
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return f  # JSON lines, or a log that begins with a bracket
        self.now.lines = self.taken = data.count(b"\n") + (not data.endswith(b"\n"))
        if not self._json(document, 1):
            self._refuse(1, data[:WIDTH], "JSON that names acceptance and holds no record of a known form")
        return None

    def _json(self, document: object, number: int) -> int:
        found = 0
        for row in json_records.json_rows(document):
            found += 1
            if isinstance(row, str):
                self._refuse(number, b"", row)
            else:
                self.rows.append({"source": self.source, "line": number, **row})
        return found

    def _lines(self, chunk: bytes) -> None:
        """Hand on the lines that hold a marker, and every line while a report is open."""
        number, at, taken, blocks, line = self.now.lines, 0, 0, self.blocks, self._line
        for start, end in _marked(chunk):
            while blocks.open and at < start:
                stop = chunk.find(b"\n", at)
                number += 1
                taken += line(chunk[at:stop], number)
                at = stop + 1
            number += chunk.count(b"\n", at, start) + 1
            taken += line(chunk[start:end], number)
            at = end + 1
        while blocks.open and at < len(chunk):
            stop = chunk.find(b"\n", at)
            stop = len(chunk) if stop < 0 else stop
            number += 1
            taken += line(chunk[at:stop], number)
            at = stop + 1
        self.now.lines += chunk.count(b"\n") + 1
        self.taken += taken

    def _line(self, line: bytes, number: int) -> bool:
        """Take a line that holds a marker. False: it has nothing to do with acceptance."""
        if len(line) > LONG:
            return self._long(line, number)
        if b"Decode batch" in line and b"accept len: " in line:
            why = lines.parse_sglang(line, self.source, number, self.sglang)
        elif b"SpecDecoding metrics: " in line:
            why = lines.parse_vllm(line, self.source, number, self.vllm)
            if not why and b"nan" in line:
                self._flag("nan", number, line)
        elif b"Speculative metrics: " in line:
            why = lines.parse_v0(line, self.source, number, self.v0)
        elif b"[MTP Stats" in line and b"toks/fwd" in line:
            why = lines.parse_atom(line, self.source, number, self.atom)
        elif b"DiffusionDecoding metrics: " in line or b"vllm:diffusion_" in line:
            self._flag("diffusion", number, line)
            why = ""
        else:
            return self._seldom(line, number)
        if why:
            self._refuse(number, line, why)
        return True

    def _seldom(self, line: bytes, number: int) -> bool:
        if b"vllm:spec_" in line or b"sglang:spec_" in line:
            why = self.scrapes.sample(line, number)
            if why:
                self._refuse(number, line, why)
            return why is not None
        if self.blocks.offer(line, number):
            return True
        if b"aux" in line and (found := lines.parse_aux(line)):
            layers, mode, kind = found
            if not any((a.source, a.layers, a.mode) == (self.source, layers, mode) for a in self.aux):  # each rank says it once
                self.aux.append(Aux(self.source, number, kind, layers, mode))
            return True
        named = b"SIMULATE_ACC" in line or b"synthetic" in line or b"-acceptance-rate" in line
        simulated = _SIMULATED.search(line) if named else None
        if simulated and (simulated[1] is None or float(simulated[1]) > 0):
            self._flag("simulated", number, line)
        if self._json_in(line, number):
            return True
        if _LOOKS.search(line) and re.search(rb"\d", line):
            self._refuse(number, line, "looks like acceptance and is none of the known forms")
            return True
        return simulated is not None

    def _long(self, line: bytes, number: int) -> bool:
        if not self._json_in(line, number):
            self._refuse(number, line, f"a line of {len(line):,} bytes that is no JSON of a known form")
        return True

    def _json_in(self, line: bytes, number: int) -> bool:
        if b"{" not in line or not any(m in line for m in json_records.MARKERS):
            return False
        document = json_records.decode(line.decode("utf-8", "replace"))
        return document is not None and self._json(document, number) > 0

    def _flag(self, kind: str, number: int, line: bytes) -> None:
        self.flag_counts[kind] = self.flag_counts.get(kind, 0) + 1
        shown = self.flags.setdefault(kind, [])
        if len(shown) < SHOWN:
            shown.append(f"{self.source} line {number}: {_text(line)}")

    def _refuse(self, number: int, line: bytes, why: str) -> None:
        self.now.spec_like += 1
        if len(self.now.first) < SHOWN:
            self.now.first.append((number, _text(line), why))

    def report(self) -> LogReport:
        records = self._frame()
        notes: list[str] = []
        for kind, shown in self.flags.items():
            if self.flag_counts[kind] > len(shown):
                notes.append(f"{self.flag_counts[kind]:,} lines with the flag {kind}; the first {len(shown)} are kept")
        counted = countable(records, notes) if len(records) else records
        groups = [total(rows) for _, rows in counted.groupby(["engine", "format", "source"], sort=False, observed=True)]
        chosen, spoken, refusal = _chosen(counted, notes)
        report = LogReport(records, counted, chosen, groups, self.aux, self.flags, self.unread, notes, [])
        if refusal is not None:
            report.diagnoses = [refusal]
        elif len(records):
            report.diagnoses = diagnose(chosen, spoken, self.flags.get("simulated", []), report.mode)
        else:
            report.diagnoses = [self._nothing(report)]
        return report

    def _nothing(self, report: LogReport) -> Diagnosis:
        n = sum(u.lines for u in self.unread)
        if "diffusion" in self.flags:
            return Diagnosis("diffusion", False, "A diffusion model: it commits tokens of a canvas and has no draft acceptance.")
        if "simulated" in self.flags:
            return Diagnosis(
                "simulated", True, f"Acceptance is set to be simulated ({self.flags['simulated'][0]}), and no figure is in the log."
            )
        if report.aux or any(u.spec_like for u in self.unread):
            what = (
                "The log says what the drafter is fed, and holds"
                if report.aux
                else "Lines look like acceptance and did not parse; the log holds"
            )
            return Diagnosis("no acceptance", False, f"{what} no acceptance figure in a known form ({n:,} lines).")
        if self.engines:
            names = sorted(self.engines)
            text = (
                f"Lines of {' and '.join(names)} without {_FORMATS[names[-1]]} ({n:,} lines): the engine does not speculate, no "
                "request came, or statistics are switched off."
            )
            return Diagnosis("not drafting", True, text, {"lines": n})
        return Diagnosis(
            "unknown engine", False, f"No line of a known engine in {n:,} lines; the first ones are shown as not understood.", {"lines": n}
        )

    def _frame(self) -> pd.DataFrame:
        makers = (
            (self.vllm, lines.vllm_frame),
            (self.v0, lines.v0_frame),
            (self.sglang, lines.sglang_frame),
            (self.atom, lines.atom_frame),
        )
        parts = [make(table) for table, make in makers if table.rows]
        if self.rows:
            parts.append(pd.DataFrame(self.rows))
        positions = max((sum(str(c).startswith("accepted_") for c in part) for part in parts), default=0)
        whole = [*COUNTS, "k", *(f"accepted_{j}" for j in range(positions))]
        out = {}
        for name in (*KEYS, "request", *whole, *_RATIOS):
            columns = [part.get(name) for part in parts]
            if name in whole:
                out[name] = _joined(columns, parts, "Int64")
            elif name in _RATIOS:
                out[name] = _joined(columns, parts, "float64")
            elif name == "line":
                out[name] = np.concatenate([*columns, np.zeros(0, int)]).astype(int)
            else:
                texts = [_category(c, len(part)) for c, part in zip(columns, parts, strict=True)]
                out[name] = union_categoricals(texts) if texts else pd.Categorical([])
        frame = pd.DataFrame(out)
        order = {u.source: i for i, u in enumerate(self.unread)}
        at = np.lexsort((out["line"], frame["source"].map(order).to_numpy(dtype=float)))
        return frame.iloc[at].reset_index(drop=True)


def _joined(columns: list, parts: list[pd.DataFrame], dtype: str) -> pd.Series:
    pieces = [
        pd.Series(pd.NA if dtype == "Int64" else np.nan, index=part.index, dtype=dtype) if c is None
        else c if c.dtype == dtype else c.astype("Float64").astype(dtype) if dtype == "Int64" else c.astype(dtype)
        for c, part in zip(columns, parts, strict=True)
    ]  # fmt: skip
    return pd.concat(pieces, ignore_index=True) if pieces else pd.Series(dtype=dtype)


def _category(column: pd.Series | None, n: int) -> pd.Categorical:
    if column is None:
        return pd.Categorical([""] * n)
    return column.array if isinstance(column.dtype, pd.CategoricalDtype) else pd.Categorical(column.fillna("").astype(str))


def _marked(chunk: bytes) -> list[tuple[int, int]]:
    """Begin and end of the lines that hold a marker, by find(): lines that hold none cost no step in Python."""
    found = {}
    for marker in MARKERS:
        p = chunk.find(marker)
        while p >= 0:
            end = chunk.find(b"\n", p)
            if end < 0:
                end = len(chunk)
            found[chunk.rfind(b"\n", 0, p) + 1] = end
            p = chunk.find(marker, end)
    return sorted(found.items())


def _chosen(counted: pd.DataFrame, notes: list[str]) -> tuple[Totals | None, pd.DataFrame, Diagnosis | None]:
    """The totals that speak for the input and their rows. Engines are not added; of one engine's formats the one with most rounds
    speaks, because the others may describe the same rounds; a row of unknown bonus convention is left out and said so."""
    if counted.empty:
        return None, counted, None
    engines = list(dict.fromkeys(counted["engine"]))
    if len(engines) > 1:
        text = f"Records of {' and '.join(engines)} are not added up: they are different servers. Read one at a time, or see groups."
        return None, counted, Diagnosis("mixed engines", True, text, {"engines": engines})
    unknown = counted["convention"] == "unknown"
    if unknown.any() and not unknown.all():
        notes.append(
            f"{int(unknown.sum()):,} of {len(counted):,} records do not tell whether their mean has the bonus token, and are left out"
        )
        counted = counted[~unknown]
    family = counted["format"].astype(object).map(lambda name: "vllm line" if name.startswith("vllm 0.") else name)
    sums = {name: total(rows) for name, rows in counted.groupby(family, sort=False)}
    name = max(sums, key=lambda n: (sums[n].rounds, sums[n].records))
    if len(sums) > 1:
        others = ", ".join(f"{n} ({t.rounds:,} rounds)" for n, t in sums.items() if n != name)
        notes.append(f"{name} speaks for the input ({sums[name].rounds:,} rounds); {others} may describe the same rounds and are not added")
    conventions = set(counted.loc[family == name, "convention"])
    if conventions >= {"bonus", "no bonus"}:
        notes.append(
            "some lines print the mean without the bonus token (vLLM 0.8.5), others with it: their counts are added, not their means"
        )
    sums[name].format = name
    return sums[name], counted[family == name], None


def _text(line: bytes) -> str:
    return " ".join(line[: 4 * WIDTH].decode("utf-8", "replace").split())[:WIDTH]
