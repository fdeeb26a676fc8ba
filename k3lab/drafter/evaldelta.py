"""Two lm_eval result tables into what changed: z, p, the difference and the change in wrong answers, with intervals.

For k1 of n answers right before and k2 of m after, p1 = k1/n, p2 = k2/m, p = (k1 + k2)/(n + m):

    z      = (p2 - p1) / sqrt(p (1 - p) (1/n + 1/m))                       two-sided p from the normal distribution
    change = p2 - p1, interval by Newcombe from the two Wilson intervals
    ratio  = ((m - k2)/m) / ((n - k1)/n), wrong answers after over before, interval by Katz (log scale)

The test is unpaired. Both runs answer the same questions, but a table has no per-question results to pair. Answers to one
question usually agree between runs, so the unpaired interval is then the wider one.

lm_eval prints stderr = sqrt(p (1 - p) / (n - 1)) for a mean of 0/1 scores. Where n is not given it is inferred: the only n at
which every value of a task is a whole number of answers k/n and every stderr is that of k and n, both to the printed digits.
A metric that is no mean of 0/1 scores has no counts: z then comes from the two standard errors.

Sources: Newcombe, Statistics in Medicine 17 (1998) 873, method 10; Katz et al., Biometrics 34 (1978) 469; lm-evaluation-harness
lm_eval/api/metrics.py (mean_stderr) and utils.py (make_table).
"""

import csv
import io
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from k3lab.drafter.inputs import parse_json, read_text, shown_name
from k3lab.errors import BadInput

KEY = ["task", "filter", "n_shot", "metric"]
COLUMNS = [*KEY, "better", "value", "stderr", "digits", "n", "line"]
MOST_N = 10**7  # questions that a file or --n may name
LARGEST_N = 200_000  # questions; beyond it four printed digits do not tell one n from the next
COUNTED = ("acc", "acc_norm", "exact_match", "em", "pass@1", "mcc1")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_ARROWS = {"↑": "higher", "↓": "lower"}


@dataclass
class Table:
    """One results table: rows (COLUMNS), and the table lines that were not understood as (line, text)."""

    name: str
    rows: pd.DataFrame
    not_understood: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Delta:
    """rows: one per compared row; unmatched: (side, key) of rows in one table only; notes: how n was found, what is not independent."""

    rows: pd.DataFrame
    unmatched: list[tuple[str, str]]
    not_understood: list[tuple[str, int, str]]
    notes: list[str]

    @property
    def finding(self) -> bool:
        """A row is significantly worse, or differs where the table does not say which way is better."""
        return bool(self.rows["verdict"].isin(["worse", "differs"]).any())


def read_table(path: str | Path) -> Table:
    """Read lm_eval's printed table (anywhere in a text), its results JSON, or a CSV with the columns filter and stderr.

    A CSV may hold several runs in a column `run`: PATH:RUN names one. Raises BadInput for anything else.
    """
    text_path, _, run = str(path).rpartition(":")
    if text_path.endswith(".csv") and not Path(str(path)).exists():
        return _from_csv(read_text(text_path), text_path, run)
    text, name = read_text(path), shown_name(path)
    if str(path).endswith(".csv"):
        return _from_csv(text, name, None)
    if text.lstrip().startswith(("{", "[")):
        return _from_json(parse_json(text, path), name)
    return _from_text(text, name)


def compare(before: Table, after: Table, n: int | None = None, alpha: float = 0.05) -> Delta:
    """Compare the rows of two tables that agree in task, filter, n-shot and metric. n: questions per task, where it is not recorded.

    Raises BadInput if no row is in both.
    """
    if n is not None and not 2 <= n <= MOST_N:
        raise BadInput(f"--n {str(n)[:40]}: a standard error needs at least 2 questions, and no task has more than {MOST_N:,}")
    if not 0 < alpha < 1:
        raise BadInput(f"alpha {alpha}: not between 0 and 1")
    left, right = _by_key(before), _by_key(after)
    keys = [k for k in left if k in right]
    if not keys:
        raise BadInput(
            f"{before.name} and {after.name}: no row is in both; rows match by task, filter, n-shot and metric. "
            f"Before: {_some(left)}. After: {_some(right)}"
        )
    notes, sizes = _sizes([left[k] for k in keys] + [right[k] for k in keys], n)
    rows = [_row(k, left[k], right[k], sizes.get(k[0]), n, alpha) for k in keys]
    unmatched = [("before", _words(k)) for k in left if k not in right] + [("after", _words(k)) for k in right if k not in left]
    if len({k[:1] + k[2:] for k in keys}) < len(keys):
        notes.append("rows of one task that differ in the filter alone score the same answers: they are not independent evidence")
    notes.append(
        "unpaired: both runs answer the same questions, but a table has no per-question results to pair; "
        "answers to one question usually agree between runs, and the intervals are then wider than paired ones"
    )
    lost = [(t.name, line, text) for t in (before, after) for line, text in t.not_understood]
    return Delta(pd.DataFrame(rows), unmatched, lost, notes)


def newcombe(k1: int, n1: int, k2: int, n2: int, level: float = 0.95) -> tuple[float, float]:
    """Interval of k2/n2 - k1/n1: Newcombe's method 10, from the two Wilson intervals."""
    a = stats.binomtest(k1, n1).proportion_ci(level, method="wilson")
    b = stats.binomtest(k2, n2).proportion_ci(level, method="wilson")
    p1, p2 = k1 / n1, k2 / n2
    low = p2 - p1 - math.hypot(p2 - b.low, a.high - p1)
    high = p2 - p1 + math.hypot(b.high - p2, p1 - a.low)
    return low, high


def whole_answers(value: float, stderr: float | None, n: int, digits: int) -> int | None:
    """The count k with k/n = value and, if given, sqrt(p (1-p) / (n-1)) = stderr, both to the printed digits; None if there is none."""
    half = 0.5 * 10.0**-digits * (1 + 1e-6)
    spans = [(value - half, value + half)]
    if stderr is not None:
        # where p (1 - p) lies between (stderr -+ half)^2 (n - 1): two spans, so that few k are tried however coarse the digits
        spread = [min(0.25, max(0.0, x) * max(0.0, x) * (n - 1)) for x in (stderr - half, stderr + half)]
        a, b = ((1 - math.sqrt(1 - 4 * x)) / 2 for x in spread)
        spans = [(max(value - half, low), min(value + half, high)) for low, high in ((a, b), (1 - b, 1 - a))]
    for low, high in spans:
        first, last = (math.floor(min(2.0, max(-1.0, p)) * n) for p in (low, high))
        for k in range(max(0, first - 1), min(n, last + 2) + 1):
            p = k / n
            if abs(p - value) <= half and (stderr is None or abs(math.sqrt(p * (1 - p) / (n - 1)) - stderr) <= half):
                return k
    return None


def sizes_that_fit(values: list[tuple[float, float, int]]) -> list[int]:
    """Every n up to LARGEST_N at which each (value, stderr, printed digits) is a whole number of answers with that stderr."""
    fit = np.arange(2, LARGEST_N + 1)
    for value, stderr, digits in values:
        half = 0.5 * 10.0**-digits * (1 + 1e-6)
        # p moves by at most `half`, so this keeps every n that could fit; the exact test follows
        p = np.clip([value - half, value + half], 0, 1)
        spread = p * (1 - p)
        top = 0.25 if p[0] <= 0.5 <= p[1] else spread.max()
        se = np.sqrt(np.array([[spread.min()], [top]]) / (fit - 1))
        fit = fit[(se[0] <= stderr + half) & (se[1] >= stderr - half)]
    return [int(n) for n in fit if all(whole_answers(v, s, int(n), d) is not None for v, s, d in values)]


def _row(key: tuple, a: dict, b: dict, inferred: int | None, given: int | None, alpha: float) -> dict:
    n1, n2 = a["n"] or given or inferred, b["n"] or given or inferred
    source = "recorded" if a["n"] and b["n"] else "given" if given else "inferred" if inferred else "unknown"
    better = a["better"] if a["better"] == b["better"] else a["better"] or b["better"]
    k1 = whole_answers(a["value"], a["stderr"], n1, a["digits"]) if n1 else None
    k2 = whole_answers(b["value"], b["stderr"], n2, b["digits"]) if n2 else None
    row = dict(zip(KEY, key, strict=True)) | {"before": a["value"], "after": b["value"], "change": b["value"] - a["value"]}
    if k1 is not None and k2 is not None:
        row |= _counted(k1, n1, k2, n2, 1 - alpha) | {"n_source": source, "basis": "counts"}
    else:
        row |= _from_errors(a, b, alpha) | {"n_before": n1, "n_after": n2, "n_source": source}
    row["verdict"] = _verdict(row["p"], row["change"], better, alpha)
    return row


def _counted(k1: int, n1: int, k2: int, n2: int, level: float) -> dict:
    pooled = (k1 + k2) / (n1 + n2)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / n1 + 1 / n2))
    z = (k2 / n2 - k1 / n1) / spread if spread else 0.0
    low, high = newcombe(k1, n1, k2, n2, level)
    w1, w2 = n1 - k1, n2 - k2
    ratio = ratio_low = ratio_high = None
    if w1 and w2:  # the log interval needs a wrong answer on either side
        risk = stats.contingency.relative_risk(w2, n2, w1, n1)
        ci = risk.confidence_interval(level)
        ratio, ratio_low, ratio_high = float(risk.relative_risk), float(ci.low), float(ci.high)
    elif w1:
        ratio = 0.0
    return {
        "change_low": low, "change_high": high, "z": z, "p": float(2 * stats.norm.sf(abs(z))),
        "p_exact": float(stats.fisher_exact([[k1, w1], [k2, w2]]).pvalue), "n_before": n1, "n_after": n2, "wrong_before": w1,
        "wrong_after": w2, "wrong_ratio": ratio, "wrong_ratio_low": ratio_low, "wrong_ratio_high": ratio_high,
    }  # fmt: skip


def _from_errors(a: dict, b: dict, alpha: float) -> dict:
    """A metric without counts: normal approximation from the two printed standard errors."""
    none = dict.fromkeys(("p_exact", "wrong_before", "wrong_after", "wrong_ratio", "wrong_ratio_low", "wrong_ratio_high"))
    if a["stderr"] is None or b["stderr"] is None or not (spread := math.hypot(a["stderr"], b["stderr"])):
        return none | dict.fromkeys(("change_low", "change_high", "z", "p")) | {"basis": "none: no standard error and no n"}
    change, reach = b["value"] - a["value"], stats.norm.isf(alpha / 2) * spread
    z = change / spread
    return none | {"change_low": change - reach, "change_high": change + reach, "z": z, "p": float(2 * stats.norm.sf(abs(z))),
                   "basis": "standard errors"}  # fmt: skip


def _verdict(p: float | None, change: float, better: str, alpha: float) -> str:
    if p is None:
        return "not tested"
    if p >= alpha:
        return "no difference shown"
    if not better:
        return "differs"
    return "better" if (change > 0) == (better == "higher") else "worse"


def _sizes(rows: list[dict], given: int | None) -> tuple[list[str], dict[str, int]]:
    """n per task where it is neither recorded nor given, and one note per task on how it was found."""
    notes, sizes = [], {}
    for task in dict.fromkeys(r["task"] for r in rows):
        mine = [r for r in rows if r["task"] == task]
        label = task or "unnamed task"
        if given or all(r["n"] for r in mine):
            bad = [r for r in mine if whole_answers(r["value"], r["stderr"], r["n"] or given, r["digits"]) is None]
            if bad:
                r = bad[0]
                notes.append(
                    f"{label}: {r['metric']} {r['value']:g} with stderr {r['stderr']} is no whole number of {r['n'] or given} answers "
                    f"with that binomial error: no counts for it (is n right, or is the metric no mean of 0/1 scores?)"
                )
            continue
        values = list({(r["value"], r["stderr"], r["digits"]) for r in mine if r["stderr"] and 0 < r["value"] < 1})
        fit = sizes_that_fit(values) if values else []
        if len(fit) == 1:
            sizes[task] = fit[0]
            notes.append(f"{label}: n = {fit[0]} is inferred: up to {LARGEST_N:,} the only n that fits every value and stderr")
        elif fit:
            sizes[task] = fit[len(fit) // 2]
            notes.append(
                f"{label}: n is inferred, {len(fit)} values from {fit[0]} to {fit[-1]} fit every value and stderr; {sizes[task]} is used, "
                "give --n to be exact"
            )
        else:
            notes.append(f"{label}: no n fits the values and standard errors as a mean of 0/1 scores; give --n if it is one")
    return notes, sizes


def _by_key(table: Table) -> dict[tuple, dict]:
    found: dict[tuple, dict] = {}
    for r in table.rows.to_dict("records"):
        key = tuple(r[c] for c in KEY)
        if key in found and any(found[key][c] != r[c] for c in ("value", "stderr")):
            raise BadInput(
                f"{table.name}, lines {found[key]['line']} and {r['line']}: {_words(key)} is there twice with different values; "
                "give one table a file"
            )
        found.setdefault(key, r)
    return found


def _words(key: tuple) -> str:
    task, filter_, shots, metric = key
    return ", ".join(w for w in (task, filter_, "" if shots is None else f"{shots}-shot", metric) if w)


def _some(found: dict) -> str:
    return "; ".join(_words(k) for k in list(found)[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _record(task: str, filter_: str, shots: int | None, metric: str, better: str, value: float, stderr: float | None, digits: int,
            n: int | None, line: int) -> dict:  # fmt: skip
    return dict(zip(COLUMNS, (task, filter_, shots, metric, better, value, stderr, digits, n, line), strict=True))


def _table(name: str, rows: list[dict], not_understood: list[tuple[int, str]], what: str) -> Table:
    if not rows:
        more = f"; line {not_understood[0][0]}: {not_understood[0][1]}" if not_understood else ""
        raise BadInput(f"{name}: no row of an lm_eval table{more}; expected {what}")
    frame = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
    return Table(name, frame, not_understood)


def _number(text: object) -> tuple[float, int] | None:
    """A finite number and its printed digits after the point."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    shown = str(text).strip()
    try:
        value = float(shown) if isinstance(text, str) else float(text)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(value):
        return None
    mantissa, _, exponent = shown.lower().partition("e")
    digits = len(mantissa.partition(".")[2]) - (int(exponent) if exponent else 0)
    return value, min(max(digits, 0), 15)


def _shots(text: object) -> int | None:
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    return int(text) if isinstance(text, str) and re.fullmatch(r"\d{1,4}", text.strip()) else None


def _from_text(text: str, name: str) -> Table:
    """Rows of every printed table in a text. A blank task cell repeats the task above, ` - ` marks a subtask."""
    rows, lost, head, task = [], [], None, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = _COLOR.sub("", raw)
        start = line.find("|")
        if start < 0:
            head = None
            continue
        cells = [c.strip() for c in line[start:].strip().strip("|").split("|")]
        names = [c.lower() for c in cells]
        if "metric" in names and "value" in names:
            head, task = names, ""
            continue
        if head is None or all(re.fullmatch(r":?-+:?", c) for c in cells):
            continue
        if len(cells) != len(head):
            lost.append((number, f"{len(cells)} cells under a head of {len(head)}: {line.strip()[:120]}"))
            continue
        cell = dict(zip(head, cells, strict=True))
        label = cell.get("tasks", cell.get("task", cell.get("groups", ""))) or ""
        task = re.sub(r"^(- ?)+", "", label).strip() or task
        value, stderr = _number(cell["value"]), _number(cell.get("stderr", ""))
        if value is None or not cell["metric"]:
            lost.append((number, f"no number as value: {line.strip()[:120]}"))
            continue
        after_metric = head.index("metric") + 1
        arrow = _ARROWS.get(cells[after_metric], "") if after_metric < len(cells) else ""
        filter_ = cell.get("filter", "none") or "none"
        rows.append(_record(task, filter_, _shots(cell.get("n-shot")), cell["metric"], arrow, value[0], (stderr and stderr[0]) or None,
                            min(value[1], stderr[1]) if stderr else value[1], None, number))  # fmt: skip
    return _table(name, rows, lost, "the table that lm_eval prints (|Tasks|Version|Filter|n-shot|Metric|…|), its results JSON, or a CSV")


def _from_json(value: dict, name: str) -> Table:
    """The results file of lm_eval: results -> task -> `metric,filter` with `metric_stderr,filter` beside it."""
    results = value.get("results")
    if not isinstance(results, dict):
        raise BadInput(f"{name}: no `results` object: not a results file of lm_eval; its keys are {', '.join(map(str, list(value)[:6]))}")
    rows, lost = [], []
    for task, found in results.items():
        if not isinstance(found, dict):
            lost.append((0, f"results.{task} is no object"))
            continue
        counts = _inner(value, "n-samples", task)
        n = counts.get("effective", found.get("sample_len")) if isinstance(counts, dict) else found.get("sample_len")
        n = n if isinstance(n, int) and not isinstance(n, bool) and 2 <= n <= MOST_N else None
        higher = _inner(value, "higher_is_better", task)
        for entry, raw in found.items():
            metric, _, filter_ = entry.partition(",")
            if entry in ("alias", "name", "sample_len", "sample_count") or metric.endswith("_stderr"):
                continue
            number = _number(raw)
            if number is None:
                if raw not in (None, " ", ""):
                    lost.append((0, f"results.{task}.{entry}: {str(raw)[:60]!r} is no finite number"))
                continue
            stderr = _number(found.get(f"{metric}_stderr,{filter_}", found.get(f"{metric}_stderr")))
            up = higher.get(metric) if isinstance(higher, dict) else None
            better = {True: "higher", False: "lower"}.get(up, "") if isinstance(up, bool) else ""
            # a full-precision file is compared to 9 digits: enough to tell counts, and safe from rounding in the last place
            rows.append(_record(task, filter_ or "none", _shots(_inner(value, "n-shot", task)), metric, better, number[0],
                                (stderr and stderr[0]) or None, 9 if number[1] > 8 else max(number[1], 4), n, 0))  # fmt: skip
    return _table(name, rows, lost, "results with numbers under keys such as exact_match,strict-match")


def _inner(value: dict, key: str, task: str) -> object:
    section = value.get(key)
    return section.get(task) if isinstance(section, dict) else None


def _from_csv(text: str, name: str, run: str | None) -> Table:
    """A CSV with the columns filter, stderr, one metric, and optionally run, task, n_shot, n."""
    try:
        lines = [(i, r) for i, r in enumerate(csv.reader(io.StringIO(text, newline="")), 1) if r]
    except csv.Error as error:
        raise BadInput(f"{name}: cannot be read as CSV: {error}") from None
    if not lines:
        raise BadInput(f"{name}: a CSV without a line that holds anything")
    head = [c.strip() for c in lines[0][1]]
    metrics = [c for c in head if c not in ("run", "task", "n_shot", "filter", "stderr", "n", "version")]
    if not {"filter", "stderr"} <= set(head) or len(metrics) != 1 or len(set(head)) < len(head):
        raise BadInput(f"{name}: a CSV of results has the columns filter, stderr and one metric (run, task, n_shot, n may be there); "
                       f"found {', '.join(head)[:200]}")  # fmt: skip
    records = [(i, dict(zip(head, r, strict=True))) for i, r in lines[1:] if len(r) == len(head)]
    lost = [(i, f"{len(r)} cells under a head of {len(head)}") for i, r in lines[1:] if len(r) != len(head)]
    runs = list(dict.fromkeys(r.get("run", "") for _, r in records))
    if run is None and len(runs) > 1:
        raise BadInput(f"{name}: holds {len(runs)} runs; name one as {name}:{runs[0]} (others: {', '.join(runs[1:6])})")
    if run is not None and run not in runs:
        raise BadInput(f"{name}: no run {run!r}; it holds {', '.join(runs) or 'none'}")
    rows = []
    for i, r in records:
        if run is not None and r.get("run", "") != run:
            continue
        value, stderr, n = _number(r[metrics[0]]), _number(r["stderr"]), _number(r.get("n", ""))
        if value is None:
            lost.append((i, f"no number as {metrics[0]}"))
            continue
        better = "higher" if metrics[0] in COUNTED else ""
        rows.append(_record(r.get("task", ""), r["filter"], _shots(r.get("n_shot")), metrics[0], better, value[0],
                            (stderr and stderr[0]) or None, min(value[1], stderr[1]) if stderr else value[1],
                            int(n[0]) if n and 2 <= n[0] <= MOST_N else None, i))  # fmt: skip
    return _table(f"{name}:{run}" if run else name, rows, lost, "rows with a number as value")
