"""Acceptance out of counts: ratios at the end, 95% intervals by bootstrap over prompts, paired comparisons, a guard against loops.

A counts frame has one row per prompt and configuration, with integer columns

    drafts       rounds that drafted (vLLM: num_drafts)
    drafted      draft tokens proposed
    accepted     draft tokens accepted, without the bonus token
    emitted      accepted plus bonus tokens
    accepted_j   rounds in which the draft at 0-based position j and all before it were accepted

and key columns such as drafter, seed, stream, offset, domain, prompt. A value that is not known is missing (NaN), never 0.
Tokens of one prompt resemble each other, so prompts are resampled, not tokens: an interval over tokens is far too narrow.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from k3lab.errors import BadInput

COUNTS = ("drafts", "drafted", "accepted", "emitted")
CONFIGURATION = ("drafter", "seed", "stream", "offset")  # never summed over: a sum over two of them describes neither
UNIT = ("domain", "prompt")  # what is resampled: prompts, numbered within a domain
RESAMPLES = 4000
CONFIDENCE = 0.95
DEFINED = 0.95  # an interval needs this share of resamples in which the ratio is defined
_RESULTS = {"prompts", "drafts", "value", "low", "high", "a", "b", "uniqueness"} | {
    f"{q}{end}" for q in ("difference", "ratio") for end in ("", "_low", "_high")
}
_BATCH = 1 << 22  # weights made at once: 32 MiB


def positions(counts: pd.DataFrame) -> int:
    """k, the number of columns accepted_0 ... accepted_{k-1}. Raises BadInput if they have a gap."""
    found = sorted(int(m[1]) for c in map(str, counts.columns) if (m := re.fullmatch(r"accepted_(0|[1-9][0-9]{0,5})", c)))
    if found != list(range(len(found))):
        raise BadInput(f"counts: columns accepted_j for j = {found}; expected 0 to {found[-1]} without a gap")
    return len(found)


def check_counts(counts: pd.DataFrame) -> None:
    """Raise BadInput for the first row that is no counts row: wrong columns, negative, or against the identities.

        accepted_0 <= drafts,  accepted_j <= accepted_{j-1},  accepted <= drafted,  accepted <= emitted <= accepted + drafts

    and, where a column `prompt` says that they were counted and not worked back from printed rates, sum_j accepted_j = accepted.
    """
    missing = [c for c in COUNTS if c not in counts]
    if missing:
        raise BadInput(f"counts: no column {missing[0]!r}; a counts frame has {', '.join(COUNTS)}, accepted_0, ...")
    k = positions(counts)
    columns = [*COUNTS, *(f"accepted_{j}" for j in range(k))]
    try:
        n = dict(zip(columns, counts[columns].to_numpy(dtype=float, na_value=np.nan).T, strict=True))
    except (TypeError, ValueError) as e:
        raise BadInput(f"counts: a count is not a number: {e}") from e
    chain = [n["drafts"], *(n[f"accepted_{j}"] for j in range(k))]
    wrong = [(f"{c} is negative or no whole number", (n[c] < 0) | ((n[c] % 1) != 0) & ~np.isnan(n[c])) for c in columns]
    wrong += [(f"accepted_{j} exceeds {f'accepted_{j - 1}' if j else 'drafts'}", chain[j + 1] > chain[j]) for j in range(k)]
    wrong += [
        ("accepted exceeds drafted", n["accepted"] > n["drafted"]),
        ("emitted is less than accepted", n["emitted"] < n["accepted"]),
        ("emitted exceeds accepted + drafts, one bonus token a round", n["emitted"] > n["accepted"] + n["drafts"]),
    ]
    if k and "prompt" in counts:
        total = np.sum(chain[1:], axis=0)
        wrong.append(("the sum of accepted_j is not accepted", ~np.isnan(total) & ~np.isnan(n["accepted"]) & (total != n["accepted"])))
    for why, rows in wrong:
        if rows.any():
            raise BadInput(f"counts row {int(np.flatnonzero(rows)[0])}: {why}; {int(rows.sum())} of {len(counts)} rows")


def summarize(
    counts: pd.DataFrame, by: Sequence[str] = (), *, unit: Sequence[str] = UNIT, resamples: int = RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """Acceptance per group of the columns `by`, with 95% percentile intervals by bootstrap over prompts.

        mean_emitted = sum emitted / sum drafts (with bonus)        mean_accepted = sum accepted / sum drafts (without)
        acceptance_rate = sum accepted / sum drafted
        survival_j = sum accepted_j / sum drafts                    conditional_j = sum accepted_j / sum accepted_{j-1}

    Sums run over the prompts of a group, then the ratio is taken: means of prompts are never averaged. One row per (group,
    metric, position): *by, metric, position (0-based, missing for the first three), value, low, high, prompts, drafts, and
    uniqueness (mean of the group's prompts) where counts have that column.
    `unit` names what is resampled; without its last column (a log has no prompts) low and high are NaN, as they are for a
    single prompt. A ratio with denominator 0 is NaN. The same counts and seed give the same numbers.
    Raises BadInput for rows that are no counts, and for a group that mixes drafters, training seeds, streams or offsets.
    """
    return _summary(_groups(counts, by, unit), by, positions(counts), resamples, seed)


def beside_low_repetition(
    counts: pd.DataFrame, by: Sequence[str] = (), *, at_least: float = 0.85, unit: Sequence[str] = UNIT, resamples: int = RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """summarize() twice: over all prompts, and over those whose output does not loop (column `uniqueness` at least `at_least`).

    A looping output is easy to draft and raises acceptance without any merit of the drafter. Columns as in summarize, after a
    first column `subset` ("all", "low repetition"); a group without such a prompt keeps its rows, with prompts 0
    and NaN. Raises BadInput as summarize, and without that column.
    """
    if "uniqueness" not in counts:
        raise BadInput("counts: no column 'uniqueness'; add acceptance.uniqueness(tokens) of each prompt's output")
    kept = counts["uniqueness"] >= at_least
    parts = []
    for subset, where in (("all", None), ("low repetition", kept)):
        parts.append(_summary(_groups(counts, by, unit, where), by, positions(counts), resamples, seed))
        parts[-1].insert(0, "subset", subset)
    return pd.concat(parts, ignore_index=True)


def compare(
    counts: pd.DataFrame, a: Mapping[str, object], b: Mapping[str, object], by: Sequence[str] = (), *, unit: Sequence[str] = UNIT,
    resamples: int = RESAMPLES, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Paired difference b - a and ratio b / a of two selections over the same prompts, which are resampled together.

    a, b: column values that select the rows, e.g. {"stream": "mixture", "offset": 0}. One row per (group of `by`, metric,
    position): *by, metric, position, a, b, difference, difference_low, difference_high, ratio, ratio_low, ratio_high, prompts.
    A prompt that both find hard moves both, so the paired interval is narrower than one made of two separate ones.
    Raises BadInput as summarize, and if a selection is empty or the two do not hold the same prompts in every group.
    """
    k = positions(counts)
    sides = []
    for name, chosen in (("a", a), ("b", b)):
        absent = [c for c in chosen if c not in counts]
        if absent:
            raise BadInput(f"compare: counts have no column {absent[0]!r}, which {name} selects by")
        rows = counts[np.logical_and.reduce([np.ones(len(counts), bool), *(counts[c] == v for c, v in chosen.items())])]
        if rows.empty:
            raise BadInput(f"compare: no row matches {name} = {dict(chosen)}")
        sides.append({g.key: g for g in _groups(rows, by, unit)})
    if any(g.units is None for side in sides for g in side.values()):
        raise BadInput(f"compare: counts have none of the columns {', '.join(unit)}: without prompts there are no pairs")
    odd = [key for key in {**sides[0], **sides[1]} if key not in sides[0] or key not in sides[1]]
    if odd:
        raise BadInput(f"compare: group {_named(by, odd[0])} is in one selection only")
    pairs = []
    for key, left in sides[0].items():
        right = sides[1][key]
        lone = left.units.symmetric_difference(right.units)
        if len(lone):
            first = _named([c for c in unit if c in counts], lone[0])
            raise BadInput(f"compare: {len(lone)} prompts are in one selection only, the first {first}; compare the same prompts")
        pairs.append((left, right, np.hstack([left.table, right.table[right.units.get_indexer(left.units)]])))
    width = 4 + k
    drawn = _resampled([table for _, _, table in pairs], resamples, seed)
    parts = []
    for (left, right, table), sums in zip(pairs, drawn, strict=True):
        total = table.sum(0)
        va, vb = _metrics(total[:width], k), _metrics(total[width:], k)
        ra, rb = _metrics(sums[:, :width], k), _metrics(sums[:, width:], k)
        part = _rows(left.key, by, k)
        part["a"], part["b"] = va, vb
        for name, value, draws in (("difference", vb - va, rb - ra), ("ratio", _over(vb, va), _over(rb, ra))):
            part[name] = value
            part[f"{name}_low"], part[f"{name}_high"] = _interval(draws, len(table))
        part["prompts"] = len(table)
        parts.append(part[~(_never(left.table) & _never(right.table))])
    return pd.concat(parts, ignore_index=True)


def over_seeds(summary: pd.DataFrame, value: str = "value") -> pd.DataFrame:
    """Training seeds side by side: mean over seeds, each seed's own value, and how far they lie apart.

    summary: from summarize, beside_low_repetition or compare with `seed` among `by`; value: the column to pool ("difference" or
    "ratio" of compare). Columns: the other keys, metric, position, value (mean over seeds, each seed counted once), lowest,
    highest, spread (standard deviation over seeds, NaN for one), seeds, and one column "seed s" per seed. There is no interval:
    two or three seeds do not carry one, and an interval over prompts holds for the drafters that were trained, not for others.
    """
    if "seed" not in summary:
        raise BadInput("over_seeds: the summary has no column 'seed'; summarize with seed among `by`")
    if value not in summary:
        raise BadInput(f"over_seeds: the summary has no column {value!r}; it has {', '.join(map(str, summary.columns))}")
    keys = [c for c in summary.columns if c != "seed" and c not in _RESULTS]
    flat = summary.assign(position=summary["position"].fillna(-1))  # a missing position would not match itself
    order = flat[keys].drop_duplicates()
    table = flat.pivot(index=keys, columns="seed", values=value).reindex(pd.MultiIndex.from_frame(order))
    out = order.reset_index(drop=True)
    out["position"] = out["position"].where(out["position"] >= 0)
    for name, column in (("value", table.mean(axis=1)), ("lowest", table.min(axis=1)), ("highest", table.max(axis=1))):
        out[name] = column.to_numpy()
    out["spread"], out["seeds"] = table.std(axis=1, ddof=1).to_numpy(), table.notna().sum(axis=1).to_numpy()
    for s in table.columns:
        out[f"seed {s}"] = table[s].to_numpy()
    return out


def uniqueness(tokens: Iterable[int] | bytes | str, n: int = 16) -> float:
    """Unique n-grams / all n-grams of one output: 1.0 without repetition, near 0 in a loop; NaN for fewer than n tokens.

    tokens: [T] token ids (sequence, array or tensor), or text, whose characters are counted. Raises BadInput for more than one axis.
    """
    if n < 1:
        raise BadInput(f"uniqueness: n = {n}; expected 1 or more")
    if isinstance(tokens, str):
        tokens = [ord(c) for c in tokens]
    ids = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.asarray(tokens)
    if ids.ndim != 1:
        raise BadInput(f"uniqueness: tokens have shape {ids.shape}; expected [T], the output of one prompt")
    if len(ids) < n:
        return float("nan")
    grams = np.lib.stride_tricks.sliding_window_view(ids, n)
    return len(np.unique(grams, axis=0)) / len(grams)


class _Group:
    """Rows of one group and their counts summed per prompt: table [prompts, 4 + k] float64, units (None without prompts)."""

    def __init__(self, key: tuple, rows: pd.DataFrame, columns: list[str], unit: list[str]) -> None:
        values = rows[columns].to_numpy(dtype=float, na_value=np.nan)
        self.key, self.rows, self.units, self.table = key, rows, None, values
        if unit:
            at, self.units = pd.MultiIndex.from_frame(rows[unit]).factorize()
            self.table = np.zeros((len(self.units), len(columns)))
            np.add.at(self.table, at, values)  # unlike pandas' sum, keeps a missing count missing


def _groups(counts: pd.DataFrame, by: Sequence[str], unit: Sequence[str], where: pd.Series | None = None) -> list[_Group]:
    check_counts(counts)
    if counts.empty:
        raise BadInput("counts: no rows")
    absent = [c for c in by if c not in counts]
    if absent:
        raise BadInput(f"counts: no column {absent[0]!r} to group by; there are {', '.join(map(str, counts.columns))}")
    columns = [*COUNTS, *(f"accepted_{j}" for j in range(positions(counts)))]
    present = [c for c in unit if c in counts] if unit and unit[-1] in counts else []
    grouped = counts.groupby(list(by), sort=False, dropna=False, observed=True) if by else [((), counts)]
    groups = []
    for key, rows in grouped:
        for c in CONFIGURATION:
            if c in rows and rows[c].nunique(dropna=False) > 1:
                mixed = ", ".join(map(str, rows[c].unique()))
                hint = "; over_seeds pools them afterwards" if c == "seed" else ""
                raise BadInput(f"counts: a group holds {c} {mixed}; add {c!r} to `by` or select one{hint}")
        rows = rows if where is None else rows[where.loc[rows.index]]
        groups.append(_Group(tuple(key), rows, columns, present))
    return groups


def _summary(groups: list[_Group], by: Sequence[str], k: int, resamples: int, seed: int) -> pd.DataFrame:
    parts = []
    tables = [g.table if g.units is not None else g.table[:0] for g in groups]  # rows of a log are no prompts: nothing to draw
    for g, sums in zip(groups, _resampled(tables, resamples, seed), strict=True):
        total = g.table.sum(0)
        part = _rows(g.key, by, k)
        part["value"] = _metrics(total, k)
        part["low"], part["high"] = _interval(_metrics(sums, k), len(g.table) if g.units is not None else 0)
        part["prompts"], part["drafts"] = (len(g.table) if g.units is not None else 0), total[0]
        if "uniqueness" in g.rows:
            part["uniqueness"] = g.rows["uniqueness"].mean()
        parts.append(part[~_never(g.table)])
    return pd.concat(parts, ignore_index=True)


def _rows(key: tuple, by: Sequence[str], k: int) -> pd.DataFrame:
    metric = ["mean_emitted", "mean_accepted", "acceptance_rate", *["survival"] * k, *["conditional"] * k]
    position = pd.array([None] * 3 + list(range(k)) * 2, dtype="Int64")
    return pd.DataFrame({**dict(zip(by, key, strict=True)), "metric": metric, "position": position})


def _never(table: np.ndarray) -> np.ndarray:
    """Rows of positions that are not known for any prompt: a frame may hold drafters of different k."""
    never = np.isnan(table[:, 4:]).all(0) & (len(table) > 0)
    return np.concatenate([np.zeros(3, bool), never, never])


def _named(names: Iterable[str], key: tuple) -> str:
    return ", ".join(f"{n} {v}" for n, v in zip(names, key, strict=True))


def _over(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.divide(x, y, out=np.full(np.broadcast_shapes(x.shape, y.shape), np.nan), where=y != 0)


def _metrics(sums: np.ndarray, k: int) -> np.ndarray:
    """[..., 4 + k] summed counts -> [..., 3 + 2k] ratios, NaN where a denominator is 0."""
    drafts, drafted, accepted, emitted = (sums[..., i : i + 1] for i in range(4))
    reached = sums[..., 4 : 4 + k]
    before = np.concatenate([drafts, reached[..., :-1]], -1) if k else reached
    ratios = [_over(emitted, drafts), _over(accepted, drafts), _over(accepted, drafted), _over(reached, drafts), _over(reached, before)]
    return np.concatenate(ratios, -1)


def _resampled(tables: list[np.ndarray], resamples: int, seed: int) -> list[np.ndarray]:
    """Column sums over prompts drawn with replacement: [prompts, C] each -> [resamples, C] each.

    A draw of n prompts is a row of multinomial weights, so one matrix product sums every count of every group of n prompts.
    scipy.stats.bootstrap gathers each column for each statistic and group instead: the same interval at 10 times the price.
    """
    out: list[np.ndarray] = [np.full((resamples, t.shape[1]), np.nan) for t in tables]
    for n in {len(t) for t in tables} - {0, 1}:
        same = [i for i, t in enumerate(tables) if len(t) == n]
        wide = np.hstack([tables[i] for i in same])
        rng = np.random.default_rng([seed, n])  # of n as well: a group's interval does not depend on the other groups
        step = max(1, _BATCH // n)
        drawn = np.vstack(
            [rng.multinomial(n, np.full(n, 1 / n), min(step, resamples - at)).astype(float) @ wide for at in range(0, resamples, step)]
        )
        for i, part in zip(same, np.split(drawn, np.cumsum([tables[i].shape[1] for i in same])[:-1], axis=1), strict=True):
            out[i] = part
    return out


def _interval(draws: np.ndarray, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of each column of [resamples, M]; NaN for one prompt, or a ratio that too many resamples leave undefined."""
    low, high = np.full((2, draws.shape[1]), np.nan)
    ends = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    for m, column in enumerate(draws.T if prompts > 1 else ()):
        defined = column[~np.isnan(column)]
        if len(defined) >= DEFINED * len(column):
            low[m], high[m] = np.quantile(defined, ends)
    return low, high
