"""Log lines of vLLM, SGLang and ATOM that state speculative acceptance, parsed to rows and rows to counts.

vLLM (vllm/v1/spec_decode/metrics.py), values of one interval; the mean is a ratio of the interval's sums:
  0.8.x    SpecDecoding metrics: Draft acceptance rate: 100.0%, Accepted: 66 tokens, Drafted: 66 tokens                (PR 15902)
  0.8.5-   the same with Mean acceptance length and Per-position acceptance rate; 0.8.5: accepted / drafts, 0.9.0: 1 + accepted / drafts
  0.10.2-  SpecDecoding metrics: Mean acceptance length: …, …, Per-position acceptance rate: …, Avg Draft acceptance rate: 9.1%
  V0       Speculative metrics: Draft acceptance rate: 0.642, System efficiency: 0.598, Number of …              (vLLM issue 9539)
SGLang (scheduler metrics), one interval: Decode batch, #running-req: 8, …, accept len: 3.56, accept rate: 0.37, …  (no counts)
ATOM (SpecStats): [MTP Stats Interval] Average toks/fwd: 1.73, …, and its cumulative twin [MTP Stats         ] …
"""

import re

import numpy as np
import pandas as pd

from k3lab.drafter.log_counts import MOST_POSITIONS, rates_matrix, residual, rounds, survivors

_NUM = rb"(?:nan|\d{1,15}(?:\.\d{1,15})?)"
_INT = rb"\d{1,12}"
_VLLM = re.compile(
    rb"SpecDecoding metrics: (?:Draft acceptance rate: (NUM)%, )?(?:Mean acceptance length: (NUM), )?"
    rb"(?:Accepted throughput: (?:inf|NUM) ?tokens/s, Drafted throughput: (?:inf|NUM) ?tokens/s, )?"
    rb"Accepted: (INT) tokens, Drafted: (INT) tokens"
    rb"(?:, Per-position acceptance rate: (NUM(?:, ?NUM)*))?(?:, Avg Draft acceptance rate: (NUM)%)?".replace(b"NUM", _NUM).replace(
        b"INT", _INT
    )
)
_V0 = re.compile(
    rb"Speculative metrics: Draft acceptance rate: (NUM), System efficiency: (NUM), Number of speculative tokens: (INT), "
    rb"Number of accepted tokens: (INT), Number of draft tokens: (INT), Number of emitted tokens: (INT)".replace(b"NUM", _NUM).replace(
        b"INT", _INT
    )
)
_ATOM = re.compile(
    rb"\[MTP Stats( Interval)? {0,40}\] Average toks/fwd: (NUM), Accepted/Total Draft tokens: (INT)/(INT), Acceptance rate: (NUM)%"
    rb"(?:, Accepted tokens distribution: \{ ?([^{}]{0,4000}?) ?\})?".replace(b"NUM", _NUM).replace(b"INT", _INT)
)
_SHARE = re.compile(rb"(\d{1,3}): '(\d{1,3}(?:\.\d{1,6})?)%'")
_TIME = re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d|\d\d-\d\d \d\d:\d\d:\d\d|\d\d:\d\d:\d\d")
_PROCESS = re.compile(rb"Engine \d{3}|(?:APIServer|EngineCore|Worker)\w{0,24}(?: pid=\d{1,10})?")
_BATCH = re.compile(rb"Decode batch(?: \[\d{1,12}\])?[.,] #running-req: (\d{1,9})\b(?:, #(?:full )?token: (\d{1,15})\b)?")
_LENGTH = re.compile(
    rb"accept len: (\d{1,15}(?:\.\d{1,15})?)(?:, (?:valid draft len: [\d.]{1,20}, )?accept rate: (\d{1,15}(?:\.\d{1,15})?))?"
)
_SGLANG_HEAD = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: (?:DP|PP|TP|EP)\d{1,4})*)\] ")
_RANKS = re.compile(rb"\b(?:DP|PP|TP|EP)\d{1,4}\b")
_AUX = re.compile(rb"Kimi-K3 aux hidden capture: layers=[(\[]([\d, ]{0,400})[)\]] mode=(\w{1,40})")
_EAGLE3 = re.compile(rb"Using Eagle3 auxiliary layers from (config|model): [(\[]([\d, ]{0,400})[)\]]")
MODES = {b"attn_res_stream": "mixture", b"prefix_only": "prefix"}
SURVIVAL_HALF, SHARE_HALF = 0.0005, 0.00005  # half a printed digit: %.3f, %.2f%%


class LineTable:
    """Rows of one format: (source, line, stream, ts, value, …), a tuple each, because a 50 MB log has 200,000 of them."""

    def __init__(self) -> None:
        self.rows: list[tuple] = []

    def add(self, source: str, line: int, prefix: bytes, values: tuple) -> None:
        """A row whose prefix names a process (vLLM) and a time, in any form or not at all."""
        time, found = _TIME.search(prefix), _PROCESS.findall(prefix)
        self.rows.append((source, line, found[-1] if found else b"", time[0] if time else b"", *values))

    def frame(self, engine: str, form: list[str] | str, scope: list[str] | str, convention: list[str] | str) -> tuple[pd.DataFrame, list]:
        """The key columns, those of few values as categories, and the value columns."""
        source, line, stream, ts, *values = zip(*self.rows, strict=True)
        keys = {"source": source, "engine": engine, "stream": stream, "model": "", "format": form, "scope": scope,
                "convention": convention, "ts": ts}  # fmt: skip
        frame = pd.DataFrame({name: _category(x, len(line)) for name, x in keys.items()})
        frame["line"] = np.array(line)
        return frame, values


def _category(values: tuple | list | str, n: int) -> pd.Categorical:
    """Texts, or bytes to decode, of few distinct values."""
    if isinstance(values, str):
        return pd.Categorical.from_codes(np.zeros(n, np.int8), [values])
    index: dict = {}
    codes = [index.setdefault(x, len(index)) for x in values]
    return pd.Categorical.from_codes(codes, [x.decode("utf-8", "backslashreplace") if isinstance(x, bytes) else str(x) for x in index])


def parse_vllm(line: bytes, source: str, number: int, table: LineTable) -> str:
    """Add the SpecDecoding records of a line. Returns "" or why the line was not understood."""
    end = 0
    for m in _VLLM.finditer(line):
        if m[1] is None and m[6] is None:
            return "the line ends before 'Avg Draft acceptance rate'"
        if int(m[3]) > int(m[4]):
            return "more accepted than drafted tokens"
        if m[5] is not None and m[5].count(b",") >= MOST_POSITIONS:
            return f"rates of more than {MOST_POSITIONS} positions"
        table.add(source, number, line[end : m.start()], m.group(1, 2, 3, 4, 5, 6))
        end = m.end()
    return "" if end else "not one of the known forms of a SpecDecoding line"


def parse_v0(line: bytes, source: str, number: int, table: LineTable) -> str:
    """Add the record of a Speculative metrics line. Returns "" or why the line was not understood."""
    m = _V0.search(line)
    if m is None:
        return "not one of the known forms of a Speculative metrics line"
    if int(m[3]) == 0 or not int(m[5]) // int(m[3]) <= int(m[6]) <= int(m[5]) + int(m[5]) // int(m[3]):
        return "more emitted tokens than drafts and bonus tokens, or fewer than rounds"
    table.add(source, number, line[: m.start()], m.group(1, 2, 3, 4, 5, 6))
    return ""


def parse_sglang(line: bytes, source: str, number: int, table: LineTable) -> str:
    """Add the accept len of a Decode batch line; -1 stands for a field that is not there."""
    at = line.find(b"Decode batch")
    batch = _BATCH.match(line, at)
    means = _LENGTH.match(line, line.find(b"accept len: ", at))
    if batch is None or means is None:
        return "a Decode batch line without a number for accept len or #running-req"
    head = _SGLANG_HEAD.match(line)
    if head is not None and head.end() <= at:
        ts, stream = head[1], head[2]
    else:
        time = _TIME.search(line, 0, at)
        ts, stream = time[0] if time else b"", b" ".join(_RANKS.findall(line, 0, at))
    table.rows.append((source, number, stream, ts, means[1], means[2] or b"-1", batch[1], batch[2] or b"-1"))
    return ""


def parse_atom(line: bytes, source: str, number: int, table: LineTable) -> str:
    """Add the MTP Stats records of a line, the distribution as survival. Returns "" or why the line was not understood."""
    end = 0
    for m in _ATOM.finditer(line):
        if int(m[3]) > int(m[4]):
            return "more accepted than drafted tokens"
        shares = b""
        if m[6]:
            pairs = [(int(i), float(p)) for i, p in _SHARE.findall(m[6])]
            if [i for i, _ in pairs] != list(range(len(pairs))) or not 0 < len(pairs) <= MOST_POSITIONS:
                return f"the distribution is not 0, 1, 2, … up to {MOST_POSITIONS} with a share each"
            left = np.cumsum([p for _, p in pairs[::-1]])[::-1][1:]
            shares = b",".join(b"%.6f" % (x / 100) for x in left)
        table.add(source, number, line[end : m.start()], (*m.group(1, 2, 3, 4, 5), shares))
        end = m.end()
    return "" if end else "not one of the known forms of an MTP Stats line"


def parse_aux(line: bytes) -> tuple[list[int], str, str] | None:
    """(layers, mode, kind) of a line that says what the drafter is fed; mode is "prefix", "mixture" or "" if the line does not say."""
    if m := _AUX.search(line):
        return (_ints(m[1]), MODES[m[2]], "kimi-k3") if m[2] in MODES else None
    if m := _EAGLE3.search(line):
        return _ints(m[2]), "", f"eagle3 from {m[1].decode()}"
    return None


def _ints(text: bytes) -> list[int]:
    return [int(x) for x in re.findall(rb"\d{1,9}", text)]


def vllm_frame(table: LineTable) -> pd.DataFrame:
    """Counts of SpecDecoding lines. The bonus convention of a line that gives the rate first (0.8.5 or 0.9) is read off

        sum of rates = mean  (no bonus, 0.8.5)   or   1 + sum of rates = mean  (bonus, 0.9.0 on)

    and stays "unknown" if neither holds; such a row keeps accepted and drafted, and no drafts.
    """
    _, _, _, _, first, mean, accepted, drafted, rates, avg = zip(*table.rows, strict=True)
    n = len(mean)
    mean = _floats(mean)
    accepted, drafted = _floats(accepted), _floats(drafted)
    survival = rates_matrix([(r or b"").replace(b" ", b"") for r in rates])
    k = (~np.isnan(survival)).sum(1)
    total, slack = np.nansum(survival, 1), k * SURVIVAL_HALF + 0.00501
    old = np.array([x is not None for x in first])
    none, bonus = np.abs(total - mean) <= slack, np.abs(total + 1 - mean) <= slack
    # without positions: a mean below 1 has no bonus, and drafts that were none have no convention to tell
    none |= (k == 0) & (mean < 1)
    convention = np.where(~old, "bonus", np.where(none & ~bonus, "no bonus", np.where(bonus & ~none, "bonus", "unknown")))
    extra = np.where(convention == "bonus", mean - 1, np.where(convention == "no bonus", mean, np.nan))
    drafts = rounds(accepted, drafted, extra, survival, SURVIVAL_HALF)
    drafts = np.where(convention == "unknown", np.where(drafted == 0, 0, np.nan), drafts)
    version = np.where(
        ~old, "vllm 0.10.2+", np.where(convention == "no bonus", "vllm 0.8.5", np.where(convention == "bonus", "vllm 0.9", "vllm 0.8-0.9"))
    )
    frame, _ = table.frame("vllm", list(version), "interval", list(convention))
    pct = [a if a is not None else f for a, f in zip(avg, first, strict=True)]
    _fill(frame, drafts, drafted, accepted, survival, SURVIVAL_HALF)
    frame["k"] = pd.array(np.where(k > 0, k, np.nan), dtype="Int64")
    frame["reported_mean"], frame["reported_rate"] = mean, _floats(pct) / 100
    frame["residual"] = residual(survival, extra, np.ones(n, bool))
    frame["tolerance"] = slack
    return frame


def v0_frame(table: LineTable) -> pd.DataFrame:
    """Counts of V0 lines, cumulative. V0 counts a draft as accepted wherever it stands, also behind a rejected one, so the accepted
    prefix is emitted - drafts, with drafts = draft tokens / k (System efficiency = emitted / (drafts (k + 1)) is the check)."""
    frame, values = table.frame("vllm", "vllm V0", "cumulative", "bonus")
    rate, efficiency, k, _, drafted, emitted = map(_floats, values)
    drafts = np.rint(drafted / k)
    _fill(frame, drafts, drafted, emitted - drafts, np.full((len(k), 0), np.nan), SURVIVAL_HALF)
    frame["k"] = pd.array(k, dtype="Int64")
    with np.errstate(divide="ignore", invalid="ignore"):
        frame["reported_mean"] = np.where(drafts > 0, emitted / drafts, np.nan)
        frame["residual"] = np.where(drafts > 0, emitted / drafts - efficiency * (k + 1), np.nan)
    frame["reported_rate"], frame["tolerance"] = rate, 0.00051 * (k + 1)
    return frame


def sglang_frame(table: LineTable) -> pd.DataFrame:
    """Means of Decode batch lines. They print no counts: a line covers the same number of steps as the next (decode_log_interval,
    40 unless set), so its rounds are in proportion to #running-req, kept as `running`; `length` is tokens in the cache per request."""
    frame, values = table.frame("sglang", "sglang line", "interval", "bonus")
    mean, rate, running, tokens = map(_floats, values)
    with np.errstate(divide="ignore", invalid="ignore"):
        k = np.where((rate > 0.05) & (mean > 1), np.rint((mean - 1) / rate), np.nan)
        length = np.where((tokens > 0) & (running > 0), tokens / running, np.nan)
    frame["k"] = pd.array(k, dtype="Int64")
    frame["reported_mean"], frame["reported_rate"] = mean, np.where(rate >= 0, rate, np.nan)
    frame["length"], frame["running"] = length, running
    return frame


def atom_frame(table: LineTable) -> pd.DataFrame:
    """Counts of MTP Stats lines, whose mean is 1 + accepted / drafts; the cumulative twin of an interval line is another scope."""
    kind, mean, accepted, drafted, rate, shares = list(zip(*table.rows, strict=True))[4:]
    mean, accepted, drafted = _floats(mean), _floats(accepted), _floats(drafted)
    survival = rates_matrix(list(shares))
    known = (~np.isnan(survival)).sum(1)
    drafts = rounds(accepted, drafted, mean - 1, survival, SHARE_HALF)
    frame, _ = table.frame("atom", "atom", ["interval" if i else "cumulative" for i in kind], "bonus")
    # a share of exactly i drafts is rounded, so survival_j, a sum of them, is off by up to half a digit for each
    half = SHARE_HALF * (known.max(initial=0) + 1)
    _fill(frame, drafts, drafted, accepted, survival, half)
    with np.errstate(divide="ignore", invalid="ignore"):
        k = np.where(known > 0, known, np.rint(drafted / drafts))
    frame["k"] = pd.array(np.where(np.isfinite(k), k, np.nan), dtype="Int64")
    frame["reported_mean"], frame["reported_rate"] = mean, _floats(rate) / 100
    frame["residual"] = residual(survival, mean - 1, np.ones(len(mean), bool))
    frame["tolerance"] = known * (known + 1) * SHARE_HALF + 0.00501
    return frame


def _floats(column: tuple) -> np.ndarray:
    return np.fromiter((np.nan if x is None else float(x) for x in column), float, len(column))


def _fill(frame: pd.DataFrame, drafts: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, survival: np.ndarray, half: float) -> None:
    for name, values in (("drafts", drafts), ("drafted", drafted), ("accepted", accepted), ("emitted", accepted + drafts)):
        frame[name] = pd.array(values, dtype="Int64")
    for j, column in enumerate(survivors(survival, drafts, accepted, half).T):
        frame[f"accepted_{j}"] = pd.array(column, dtype="Int64")
