"""Reports of several lines: vllm bench serve, SGLang's bench, speculators' text report and its acceptance.csv.

Each may stand behind a prefix and have other lines in between; a block ends at its closing rule, at the next block, or with the file.
"""

import csv
import math
import re

from k3lab.drafter.log_counts import BIGGEST, MOST_POSITIONS

_BENCH_HEAD = re.compile(rb"-{3,} ?Speculative Decoding ?-{3,}")
_REPORT_HEAD = b"=== Speculative Decoding Acceptance Report ==="
_FIELD = re.compile(
    rb"(Acceptance rate \(%\):|Acceptance length:?|Drafts:|Draft tokens:|Accepted tokens:|Num drafts|Num draft tokens|Num accepted tokens"
    rb"|Per-position acceptance \(%\):|Position (\d{1,3}):?)\s{0,80}(\d{1,15}(?:\.\d{1,15})?)?\s*$"
)
_NAMES = {
    b"Acceptance rate (%)": "rate", b"Acceptance length": "mean", b"Drafts": "drafts", b"Draft tokens": "drafted",
    b"Accepted tokens": "accepted", b"Num drafts": "drafts", b"Num draft tokens": "drafted", b"Num accepted tokens": "accepted",
}  # fmt: skip
_SGLANG = re.compile(rb"\bAccept length:\s{1,80}(\d{1,15}(?:\.\d{1,15})?)\s*$")
_CSV_KEYS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_LONGEST_BLOCK = 400  # lines


class Blocks:
    """Reports of one source. `open` while a block or table is not finished: every line is then to be offered."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.rows: list[dict] = []
        self.unread: list[tuple[int, str]] = []
        self.open = False
        self._fields: dict | None = None
        self._columns: list[str] | None = None

    def offer(self, line: bytes, number: int) -> bool:
        """True if the line belongs to a report."""
        if self._columns is not None:
            if self._table_row(line, number):
                return True
            self.close()
        kind = ""
        if b"Speculative Decoding" in line:
            kind = "speculators report" if _REPORT_HEAD in line else "vllm bench text" if _BENCH_HEAD.search(line) else ""
        if kind:
            self.close()
            self._fields, self.open = {"kind": kind, "line": number, "at": {}}, True
            return True
        if self._fields is not None:
            if number - self._fields["line"] > _LONGEST_BLOCK:
                self.close()
            elif m := _FIELD.search(line):
                if m[2] is not None and m[3] is not None:
                    self._fields["at"][int(m[2])] = float(m[3])
                elif m[3] is not None:
                    self._fields[_NAMES[m[1].rstrip(b":")]] = float(m[3])
                return True
            elif b"======" in line:
                self.close()
                return True
        if b"Accept length:" in line and (m := _SGLANG.search(line)):
            self.rows.append(self._row(number, "sglang", "sglang bench text", "gauge", reported_mean=float(m[1])))
            return True
        if b"num_drafts,num_draft_tokens,num_accepted_tokens" in line:
            cells = _split(line)
            if set(_CSV_KEYS) <= set(cells):
                self._columns, self.open = cells, True
                return True
        return False

    def close(self) -> None:
        """End what is open; a report without its counts is not understood."""
        fields, self._fields, self._columns, self.open = self._fields, None, None, False
        if fields is None:
            return
        if not {"drafts", "drafted", "accepted"} <= set(fields):
            self.unread.append((fields["line"], f"a {fields['kind']} without drafts, draft tokens and accepted tokens"))
            return
        scale = 100 if fields["kind"] == "vllm bench text" else 1
        rates = [fields["at"][j] / scale for j in range(len(fields["at"])) if j in fields["at"]]
        engine = "vllm" if scale == 100 else "speculators"
        self._counted(fields["line"], engine, fields["kind"], fields, rates, 0.00005)

    def _table_row(self, line: bytes, number: int) -> bool:
        cells = _split(line)
        if len(cells) != len(self._columns) or cells == self._columns:
            return cells == self._columns
        record = dict(zip(self._columns, cells, strict=True))
        try:
            values = {k: float(record[n]) for k, n in zip(("drafts", "drafted", "accepted"), _CSV_KEYS, strict=True)}
            mean = record.get("acceptance_length")
            values |= {"mean": float(mean)} if mean else {}
            at = [record.get(f"acceptance_at_pos_{j}") for j in range(len(record))]
            rates = [float(x) for x in at[: at.index(None) if None in at else len(at)] if x]
        except ValueError:
            self.unread.append((number, "a row of acceptance.csv with a cell that is no number"))
            return True
        model = " ".join(record[c] for c in ("subset", "strategy", "target_rate") if record.get(c))[:200]
        self._counted(number, "speculators", "speculators csv", values, rates, 0.0, stream=model)
        return True

    def _counted(self, number: int, engine: str, form: str, values: dict, rates: list[float], half: float, stream: str = "") -> None:
        drafts, drafted, accepted = values["drafts"], values["drafted"], values["accepted"]
        whole = all(math.isfinite(n) and 0 <= n < BIGGEST and n == int(n) for n in (drafts, drafted, accepted))
        if not whole or accepted > drafted or not all(0 <= r <= 1 for r in rates) or len(rates) > MOST_POSITIONS:
            self.unread.append(
                (number, f"a {form} whose counts or rates cannot be: {drafts:g} drafts, {accepted:g} of {drafted:g} accepted")
            )
            return
        k = max(len(rates), math.ceil(drafted / drafts - 1e-9)) if drafts else len(rates)  # a report may be cut after some positions
        row = self._row(number, engine, form, "bench", reported_mean=values.get("mean", math.nan), k=k or math.nan)
        row |= {"drafts": drafts, "drafted": drafted, "accepted": accepted, "emitted": drafts + accepted, "stream": stream}
        row |= {f"accepted_{j}": round(r * drafts) for j, r in enumerate(rates)}
        row["reported_rate"] = values["rate"] / 100 if "rate" in values else math.nan
        if rates and drafts and len(rates) == k:
            row |= {"residual": 1 + sum(rates) - (1 + accepted / drafts), "tolerance": len(rates) * half + 1e-6}
        self.rows.append(row)

    def _row(self, number: int, engine: str, form: str, scope: str, **values: object) -> dict:
        return {"source": self.source, "line": number, "engine": engine, "stream": "", "model": "", "format": form, "scope": scope,
                "convention": "bonus", **values}  # fmt: skip


def _split(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode("utf-8", "replace").strip()]), [])
    except csv.Error:
        return []
