"""Records of logs summed to totals: intervals added, cumulative twins and repeated scrapes not counted twice, engines kept apart."""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from k3lab.drafter.log_counts import COUNTS
from k3lab.errors import BadInput

Z = 1.96
FEWEST_UNITS = 8  # records that an interval between records needs
STEPS_PER_LINE = 40  # SGLang's default decode_log_interval
_PROMETHEUS = ("prometheus", "prometheus V0")


@dataclass
class Totals:
    """Summed counts of records that may be added: one engine, one format. None where nothing tells.

    drafted, accepted without and emitted with the bonus tokens; accepted_at[j] of drafts_at[j] rounds accepted the draft at 0-based
    position j and all before it. estimated: no counts were printed; mean_emitted is then the printed means weighted by the requests that
    ran, and estimated_drafts the rounds that this stands for at SGLang's default of 40 steps a line. low, high: 95% interval of the mean.
    design_effect: its variance over that of rounds on their own, 1 or more; so many rounds say as much as one.
    """

    engine: str
    format: str
    sources: list[str]
    records: int
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    emitted: int | None = None
    accepted_at: list[int] = field(default_factory=list)
    drafts_at: list[int] = field(default_factory=list)
    k: int | None = None
    mean_emitted: float | None = None
    low: float | None = None
    high: float | None = None
    estimated: bool = False
    estimated_drafts: int | None = None
    design_effect: float = 1.0

    @property
    def rounds(self) -> int:
        """drafts, or what is estimated in their place, or 0."""
        return self.drafts or self.estimated_drafts or 0

    @property
    def survival(self) -> list[float]:
        """accepted_j / drafts per position, unconditional."""
        return [a / d for a, d in zip(self.accepted_at, self.drafts_at, strict=True) if d]


def countable(records: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """The rows whose counts may be added up: scrapes turned into differences, twins and repetitions left out. Adds to notes."""
    parts = [_scrape_steps(records[records["format"].isin(_PROMETHEUS)], notes)]
    rest = records[~records["format"].isin(_PROMETHEUS)]
    rest = _last_of_a_request(_one_rank(rest, notes), notes)
    gone = []
    for (source, stream, form), rows in rest[rest["format"].isin(("atom", "vllm V0"))].groupby(
        ["source", "stream", "format"], sort=False, observed=True
    ):
        summed, running = rows[rows["scope"] == "interval"], rows[rows["scope"] == "cumulative"]
        gone.extend(running.index)
        if summed.empty:
            parts.append(_segments(running))
        elif len(running):
            last = running.iloc[-1]
            more = int(last["accepted"]) - int(summed["accepted"].sum())
            if more:
                notes.append(f"{source}: the cumulative {form} line {last['line']} has {more:+,} accepted tokens against the sum of the "
                             f"intervals{f' of {stream}' if stream else ''}; intervals are counted")  # fmt: skip
    parts.append(rest.drop(index=gone))
    parts = [p for p in parts if len(p)]
    return pd.concat(parts).sort_index() if parts else records.iloc[:0]


def _one_rank(records: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Tensor-parallel ranks take part in the same rounds: of SGLang's lines and gauges keep the lowest rank of each group."""
    ours = records[records["format"].isin(("sglang line", "sglang gauge"))]
    if ours.empty:
        return records
    names = pd.Series(list(ours["stream"].unique()), dtype=object)
    rank = dict(zip(names, names.str.extract(r"(?:\bTP|tp_rank=)(\d+)")[0].astype(float).fillna(0), strict=True))
    other = dict(zip(names, names.str.replace(r"(?:\b[TE]P|moe_ep_rank=|tp_rank=)\d+", "", regex=True), strict=True))
    if not any(rank.values()):
        return records
    ranks = ours["stream"].astype(object).map(rank).astype(float)
    lowest = ranks.groupby([ours["source"], ours["format"], ours["stream"].astype(object).map(other)], observed=True).transform("min")
    again = ours.index[ranks > lowest]
    if len(again):
        notes.append(f"{len(again):,} SGLang records of further tensor-parallel ranks describe the same rounds and are not added")
    return records.drop(index=again)


def _last_of_a_request(records: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """The chunks of a streamed response repeat their request's counts so far: the last one has them all."""
    named = records["request"] != ""
    if not named.any():
        return records
    again = records.index[named & records.duplicated(["format", "source", "request"], keep="last")]
    if len(again):
        notes.append(f"{len(again):,} records are earlier states of a request that comes again, and are not added")
    return records.drop(index=again)


def _segments(running: pd.DataFrame) -> pd.DataFrame:
    """Of cumulative rows, the last before each restart (a count that falls) and the last of all."""
    falls = running["drafted"].astype(float).diff().fillna(0) < 0
    last = falls.shift(-1, fill_value=True)
    last.iloc[-1] = True
    return running[last]


def _scrape_steps(scrapes: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Differences of consecutive scrapes of a series, in the order given; a lone scrape counts from the start of its server.

    A counter that fell was reset: the later scrape then counts from zero. Raises BadInput if the counters fell although their
    _created time did not change, which no restart does: the scrapes are in the wrong order.
    """
    if scrapes.empty:
        return scrapes
    steps = []
    columns = [c for c in scrapes if c in COUNTS or c.startswith("accepted_")]
    for (engine, stream, model, _), rows in scrapes.groupby(["engine", "stream", "model", "format"], sort=False, observed=True):
        values = rows[columns].to_numpy(dtype=float, na_value=np.nan)
        if len(rows) == 1:
            steps.append(rows)
            continue
        change = np.diff(values, axis=0)
        fell = (change < 0).any(1)
        for i in np.flatnonzero(fell):
            before, after = rows.iloc[i], rows.iloc[i + 1]
            if before["created"] == after["created"]:
                raise BadInput(
                    f"{after['source']}, line {after['line']}: counters are below those of {before['source']}, line {before['line']}, with "
                    f"the same _created time: give the earlier scrape first"
                )
            notes.append(
                f"{after['source']} line {after['line']}: counters were reset since {before['source']} line {before['line']} (or the "
                "scrapes are in the wrong order); what was counted in between is lost"
            )
        step = rows.iloc[1:].copy()
        for name, column in zip(columns, np.where(fell[:, None], values[1:], change).T, strict=True):
            step[name] = pd.array(column, dtype="Int64")
        steps.append(step)
        named = f"{rows.iloc[0]['source']} line {rows.iloc[0]['line']} to {rows.iloc[-1]['source']} line {rows.iloc[-1]['line']}"
        notes.append(f"{len(rows)} scrapes of {model or engine}{f', {stream}' if stream else ''} are read as one series, {named}")
    return pd.concat(steps)


def total(rows: pd.DataFrame) -> Totals:
    """Totals of countable rows of one engine and format."""
    out = Totals(rows["engine"].iloc[0], rows["format"].iloc[0], sorted(set(rows["source"])), len(rows))
    if rows["k"].notna().any():
        out.k = int(rows["k"].max())
    counted = rows[rows["drafts"].notna() & rows["accepted"].notna()]
    if len(counted):
        out.drafts, out.accepted, out.emitted = (int(counted[c].sum()) for c in ("drafts", "accepted", "emitted"))
        out.drafted = int(counted["drafted"].sum()) if counted["drafted"].notna().all() else None
        for j in range(sum(c.startswith("accepted_") for c in rows)):
            known = counted[counted[f"accepted_{j}"].notna()]
            if known.empty:
                break
            out.accepted_at.append(int(known[f"accepted_{j}"].sum()))
            out.drafts_at.append(int(known["drafts"].sum()))
        if out.drafts:
            out.mean_emitted = out.emitted / out.drafts
            out.low, out.high = _interval(out, counted["drafts"].to_numpy(float), counted["emitted"].to_numpy(float))
        return out
    known = rows[["accepted", "drafted"]].notna().all(axis=1)
    if known.any():
        out.accepted, out.drafted = int(rows.loc[known, "accepted"].sum()), int(rows.loc[known, "drafted"].sum())
    means = rows[rows["reported_mean"].notna()]
    if len(means) and (means["scope"] == "interval").all() and (means["running"] > 0).any():
        weight = means["running"].fillna(0).to_numpy(float)
        out.estimated = True
        out.estimated_drafts = int(STEPS_PER_LINE * weight.sum())
        out.mean_emitted = float(weight @ means["reported_mean"] / weight.sum())
        out.low, out.high = _interval(out, STEPS_PER_LINE * weight, STEPS_PER_LINE * weight * means["reported_mean"].to_numpy(float))
    elif len(means) == 1:
        out.mean_emitted, out.estimated = float(means["reported_mean"].iloc[0]), True
    return out


def _interval(t: Totals, drafts: np.ndarray, emitted: np.ndarray) -> tuple[float | None, float | None]:
    """95% interval of sum emitted / sum drafts: between records if there are enough, and never narrower than rounds on their own.

    Between records (lines, requests) it is the ratio estimator's, sqrt(n / (n - 1) sum (emitted_i - mean drafts_i)^2) / sum drafts;
    rounds on their own have the variance of the accepted length, sum (2 j + 1) survival_j - (sum survival_j)^2, or without positions the
    largest that a length in 0 .. k with that mean can have.
    """
    n, mean = len(drafts), t.mean_emitted
    squares = []
    if n >= FEWEST_UNITS:
        squares.append(n / (n - 1) * float(((emitted - mean * drafts) ** 2).sum()) / t.rounds**2)
    extra = mean - 1
    if len(t.survival) and len(t.survival) == t.k:
        s = np.array(t.survival)
        squares.append(max(0.0, float((2 * np.arange(len(s)) + 1) @ s - s.sum() ** 2)) / t.rounds)
    elif t.k and not t.estimated:
        squares.append(max(0.0, extra * (t.k - extra)) / t.rounds)
    if not squares:
        return None, None
    if len(squares) == 2 and squares[1] > 0:
        t.design_effect = max(squares) / squares[1]
    half = Z * max(squares) ** 0.5
    return max(1.0, mean - half) if mean >= 1 else mean - half, mean + half
