"""Integer counts worked back from the rounded ratios that engines print."""

from itertools import accumulate

import numpy as np

COUNTS = ("drafts", "drafted", "accepted", "emitted")
BIGGEST = 10**12  # a count above it is no count; a million of them still fit int64
MOST_POSITIONS = 64  # drafts a round; more is no drafter, and a column each


def rates_matrix(lists: list[bytes]) -> np.ndarray:
    """Comma-separated rates, one text a row, as [N, K] float64; rows with fewer than K positions end in NaN, an empty text is all NaN."""
    lengths = np.array([t.count(b",") + 1 if t else 0 for t in lists], dtype=int)
    out = np.full((len(lists), lengths.max(initial=0)), np.nan)
    flat = b",".join(t for t in lists if t)
    if flat:
        out[np.arange(out.shape[1]) < lengths[:, None]] = np.array(flat.split(b",")).astype(float)
    return out


def rounds(accepted: np.ndarray, drafted: np.ndarray, extra: np.ndarray, survival: np.ndarray, half_rate: float) -> np.ndarray:
    """Draft rounds [N] from accepted / drafts = extra (two decimals) and the printed survival [N, K]; NaN where nothing tells.

    extra and sum_j survival_j are both accepted / drafts, each known to half a printed digit: rounds lie in
    accepted / (extra +- 0.005) and in accepted / (sum +- K half_rate). drafted / K, exact when every round drafted K, is taken
    if it is an integer inside; otherwise the nearest integer to what the narrower of the two says. With nothing accepted it is
    drafted / K, the fewest rounds that can have drafted that many; so it is if the printed mean is 1.00 and tells no number.
    """
    k = (~np.isnan(survival)).sum(1)
    total = np.where(k > 0, np.nansum(survival, 1), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        slack = k * half_rate
        low = np.fmax(accepted / (extra + 0.00501), accepted / (total + slack + 1e-6))
        high = np.fmin(accepted / np.maximum(extra - 0.00501, 0), accepted / np.maximum(total - slack - 1e-6, 0))
        full = np.where(k > 0, drafted / k, np.nan)
        whole = (full == np.rint(full)) & (full >= low) & (full <= high)
        guess = accepted / np.where((k > 0) & (slack < 0.005), total, extra)
        inside = np.where(low <= high, np.clip(guess, np.ceil(low), np.maximum(np.floor(high), np.ceil(low))), guess)
        n = np.where(accepted == 0, full, np.where(whole, full, inside))
    n = np.where(np.isfinite(n) | np.isnan(extra), n, full)
    n = np.where((accepted == 0) & (drafted == 0), 0.0, n)
    return np.where(np.isfinite(n) & (n >= 0), np.rint(n), np.nan)


def survivors(survival: np.ndarray, drafts: np.ndarray, accepted: np.ndarray, half_rate: float) -> np.ndarray:
    """accepted_j [N, K] as float64 integers (NaN where unknown) from printed survival_j = accepted_j / drafts.

    drafts * survival_j is rounded to the nearest integer, which is exact below 1000 rounds in three decimals. Where the integers
    do not sum to `accepted` although the rates agree with it within half a printed digit per position, they are scaled to it and
    rounded so that they do (largest remainders get the missing units). Rates that rise from one
    position to the next, or exceed 1, are no survival: such a row has no positions.
    """
    padded = np.nan_to_num(survival, nan=0.0)
    wrong = (np.diff(padded, axis=1, prepend=1.0) > 0).any(1)
    survival = np.where(wrong[:, None], np.nan, survival)
    real = survival * drafts[:, None]
    k = (~np.isnan(real)).sum(1)
    total = np.nansum(real, 1)
    one = np.nansum(survival, 1)  # drafts is an integer itself
    agrees = (np.abs(total - accepted) <= k * half_rate * drafts + one + 1e-6) & (k > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(agrees & (total > 0), accepted / total, 1.0)
    nearest = np.minimum(np.rint(real), drafts[:, None])
    agrees &= np.nansum(nearest, 1) != accepted
    real = np.minimum(real * scale[:, None], drafts[:, None])
    floor = np.floor(real + 1e-9)
    missing = np.where(agrees, accepted - np.nansum(floor, 1), 0)
    order = np.argsort(-np.nan_to_num(real - floor, nan=-1.0), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(order.shape[1]), order.shape).copy(), axis=1)
    exact = np.minimum(floor + ((rank < missing[:, None]) & ~np.isnan(real)), drafts[:, None])
    return np.where(agrees[:, None], exact, nearest)


def histogram_survivors(histogram: list[int]) -> list[int]:
    """accepted_j = rounds that accepted more than j drafts, from histogram[i] = rounds that accepted exactly i; k = len - 1."""
    return list(accumulate(reversed(histogram)))[-2::-1]


def residual(survival: np.ndarray, extra: np.ndarray, complete: np.ndarray) -> np.ndarray:
    """sum_j survival_j - accepted / drafts [N], which is (1 + sum of rates) - mean; NaN where positions or the mean are missing."""
    known = (~np.isnan(survival)).any(1) & complete
    return np.where(known, np.nansum(survival, 1) - extra, np.nan)
