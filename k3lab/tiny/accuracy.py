"""Served accuracy out of data/accuracy.json: rates with intervals, and the p at which a route loses a given share."""

import json
from os import PathLike
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from k3lab.errors import BadInput

NEVER = "zero padding"


def wilson(correct: int, total: int) -> tuple[float, float]:
    """The 95% Wilson interval of a rate."""
    ci = binomtest(int(correct), int(total)).proportion_ci(0.95, "wilson")
    return float(ci.low), float(ci.high)


def load(path: str | PathLike) -> pd.DataFrame:
    """The counts of data/measure_accuracy.py, summed over seeds, one row per (route, p).

    Columns: route, padding (NEVER or "nan with p"), p (0 for zero padding), correct, total, rate, low, high (95% Wilson),
    expected (rate that exposure counts alone predict), exposures (median workgroups with undefined rows per request).
    Raises BadInput if the file is not such a record.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        for r in record["rows"]:
            _check(r)
        rows = pd.DataFrame(
            [
                {
                    "route": r["route"], "padding": NEVER if r["p"] is None else "nan with p", "p": r["p"] or 0.0,
                    "correct": r["correct"], "total": r["total"], "expected": r["expected_correct"],
                    "exposures": r["exposures_per_request"]["median"],
                }
                for r in record["rows"]
            ]
        )  # fmt: skip
        if rows.empty:
            raise ValueError("no rows")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise BadInput(
            f"{path}: not an accuracy record of data/measure_accuracy.py ({type(e).__name__}: {e}); make it with that script"
        ) from e
    keys = ["route", "padding", "p"]
    frame = rows.groupby(keys, sort=False).agg(
        correct=("correct", "sum"), total=("total", "sum"), expected=("expected", "sum"), exposures=("exposures", "median")
    )
    frame = frame.reset_index()
    frame["rate"] = frame["correct"] / frame["total"]
    frame["expected"] /= frame["total"]
    frame[["low", "high"]] = [wilson(c, t) for c, t in zip(frame["correct"], frame["total"], strict=True)]
    return frame


def _check(row: dict) -> None:
    """Raise ValueError for a row whose counts or rates are none."""
    p, correct, total = row["p"], row["correct"], row["total"]
    if not isinstance(row["route"], str) or not (p is None or (_is_number(p) and 0 <= p <= 1)):
        raise ValueError(f"route {str(row['route'])[:40]!r} with p {str(p)[:40]}")
    if type(correct) is not int or type(total) is not int or not 0 <= correct <= total or not 0 < total < 2**53:
        raise ValueError(f"{str(correct)[:40]} correct of {str(total)[:40]}")
    numbers = row["expected_correct"], row["exposures_per_request"]["median"]
    if not all(_is_number(x) and 0 <= x < 2**53 for x in numbers):
        raise ValueError(f"expected_correct or the median of exposures is none: {str(numbers)[:80]}")


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def p_of_ratio(frame: pd.DataFrame, route: str, ratio: float) -> float:
    """The p at which the route's expected accuracy is `ratio` times its own at p = 0, interpolated in log p.

    Raises BadInput if the measured p values do not enclose it.
    """
    part = frame[(frame["route"] == route) & (frame["padding"] != NEVER)].sort_values("p")
    clean = part[part["p"] == 0]["expected"]
    part = part[part["p"] > 0]
    if clean.empty or part.empty:
        raise BadInput(f"route {route!r}: needs p = 0 and at least one p above it")
    share = (part["expected"] / clean.iloc[0]).to_numpy()
    if not share.min() <= ratio <= share.max():
        raise BadInput(f"ratio {ratio:.4f} is outside the measured range {share.min():.4f} to {share.max():.4f} of route {route!r}")
    return float(np.exp(np.interp(-ratio, -share, np.log(part["p"].to_numpy()))))


def disagreement(frame: pd.DataFrame) -> float:
    """Smallest two-sided binomial p-value of the measured counts against their expected rates, times the number of rows.

    A sum of unequal chances varies less than the binomial, so a small value means more, never less, than it says.
    """
    p = [
        binomtest(int(c), int(t), min(1.0, max(0.0, e))).pvalue
        for c, t, e in zip(frame["correct"], frame["total"], frame["expected"], strict=True)
    ]
    return min(1.0, len(p) * min(p))
