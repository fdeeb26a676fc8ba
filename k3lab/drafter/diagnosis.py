"""What summed acceptance says about a drafter, in words, with the numbers that it rests on.

Thresholds lie between figures of drafters that are fed right and of drafters that are fed wrong:

  published, right    Inferact/Kimi-K3.1-Pro-DSpark-preview: survival at position 0 is 0.76 (HumanEval) to 0.86 (GSM8K); ATOM PR 1899:
                      0.93-0.94. Pooled conditional rates of later positions stay at 0.93 or more of the rate at position 0
  measured, tiny K3   DFlash drafters, block 8, three seeds, on an H200 (data/drafter_counts.csv): fed the stream of training 0.78 to 0.84
                      at position 0, mean 4.14 and 4.52; fed the other 0.47 to 0.63, mean 1.98 and 2.49; fed zeros, mean 1.22 and 1.25
  published, long     Kimi-K3-DSpark-Block5: GSM8K 4.581, AA-LCR at 100K 3.052, BEAM at 1M 2.569; tokenspeed 924: 4.369 below 4096
                      output tokens, about 1.0 on long ones
None of them is proof for another drafter: a text names the figure that it compares with.
"""

from dataclasses import asdict, dataclass, field

import numpy as np
import pandas as pd

from k3lab.drafter.log_totals import STEPS_PER_LINE, Totals, Z

LOWEST_PUBLISHED_AT_0 = 0.76  # HumanEval of Kimi-K3.1-Pro-DSpark-preview
COLLAPSED_AT_0 = 0.65  # above 0.63, the most that the wrong stream left in the tiny K3, and below 0.76
FED_ZEROS_MEAN = 1.25
WRONG_AT_0, RIGHT_AT_0 = "0.47 to 0.63", "0.78 to 0.84"  # position 0 of the tiny K3's drafters, as above
FAST_DECAY = 0.75  # of the rate at position 0; 0.93 is the lowest published for a drafter that works
CLIFF = 1 / 3  # of the accepted drafts per round; 0.44 is the lowest published (1M against GSM8K), tokenspeed 924 about 0
ENOUGH_ROUNDS = 100  # a survival of one half is then known to +- 0.10, the distance from 0.65 to either side
PUBLISHED = "published Kimi-K3 drafters: 0.76 to 0.94"


@dataclass
class Diagnosis:
    """One statement. finding: something is wrong or cannot be trusted; evidence: the numbers in the text."""

    kind: str
    finding: bool
    text: str
    evidence: dict = field(default_factory=dict)

    def as_dict(self) -> dict:
        return asdict(self)


def diagnose(totals: Totals | None, rows: pd.DataFrame, simulated: list[str] = (), mode: str | None = None) -> list[Diagnosis]:
    """Statements about one engine's totals, the weightiest first; never empty.

    totals, rows: from log_totals (rows: the records that were summed, in file order); simulated: where a log says that acceptance is
    made up; mode: "prefix", "mixture" or None, what the log says the drafter is fed.
    """
    out = []
    if simulated:
        out.append(Diagnosis("simulated", True, f"Acceptance is simulated ({simulated[0]}): the figures say nothing about the drafter.",
                             {"where": list(simulated[:5])}))  # fmt: skip
    out.extend(_inconsistent(rows))
    if totals is None or totals.mean_emitted is None:
        return out or [_no_mean(totals)]
    if not totals.rounds:
        return [*out, _lone_mean(totals) if totals.estimated else _idle()]
    if totals.rounds < ENOUGH_ROUNDS:
        return [*out, _too_few(totals)]
    if (totals.emitted is not None and totals.accepted == 0) or (totals.estimated and totals.mean_emitted <= 1.0):
        return [*out, _nothing_accepted(totals)]
    cliff = _cliff(rows)
    start = _start(totals, mode)
    if start.kind == "healthy" and (decay := _decay(totals)):
        start = decay
    return [*out, *([cliff] if cliff else []), *([start] if not cliff or start.finding else [])]


def _no_mean(totals: Totals | None) -> Diagnosis:
    if totals is None or totals.accepted is None or not totals.drafted:
        if totals is not None and totals.drafts == 0:
            return _idle()
        return Diagnosis("undecided", False, "No record gives both rounds and accepted tokens.")
    share = f"{totals.accepted:,} of {totals.drafted:,} drafted tokens were accepted ({totals.accepted / totals.drafted:.1%})"
    text = f"{share}; the number of rounds is not printed, so there is no mean length."
    return Diagnosis("undecided", False, text, {"accepted": totals.accepted, "drafted": totals.drafted})


def _lone_mean(t: Totals) -> Diagnosis:
    text = f"One printed mean of {t.mean_emitted:.2f} ({t.format}) and no counts: how many rounds it stands for is not known."
    return Diagnosis("undecided", False, text, {"mean_emitted": t.mean_emitted})


def _idle() -> Diagnosis:
    text = "No draft was made in any record: speculation is configured and idle, or switched off."
    return Diagnosis("not drafting", True, text, {"drafts": 0})


def _mean(t: Totals) -> str:
    about = "about " if t.estimated else ""
    interval = f", 95% interval {t.low:.2f} to {t.high:.2f}" if t.low is not None else ""
    how = " (printed means weighted by running requests)" if t.estimated else ""
    return f"mean {t.mean_emitted:.2f} with bonus in {about}{t.rounds:,} rounds{interval}{how}"


def _evidence(t: Totals, **more: object) -> dict:
    return {"mean_emitted": t.mean_emitted, "drafts": t.drafts, "estimated_drafts": t.estimated_drafts, "survival": t.survival, **more}


def _too_few(t: Totals) -> Diagnosis:
    at_0 = ""
    if t.survival:
        low, high = wilson(t.accepted_at[0], t.drafts_at[0], t.design_effect)
        at_0 = f"; position 0: {t.survival[0]:.2f}, 95% interval {low:.2f} to {high:.2f}"
    return Diagnosis("too few drafts", False, f"Too few rounds to say: {_mean(t)}{at_0}. {ENOUGH_ROUNDS} rounds give position 0 to 0.10.",
                     _evidence(t))  # fmt: skip


def _nothing_accepted(t: Totals) -> Diagnosis:
    bound = f"; the true rate at position 0 is below {3 / t.drafts:.2g} with 95% confidence" if not t.estimated else ""
    return Diagnosis(
        "exactly 1.0", True,
        f"Exactly 1.0: nothing was accepted in {'about ' if t.estimated else ''}{t.rounds:,} rounds{bound}. A drafter that is fed zeros "
        f"still reaches 1.22 to {FED_ZEROS_MEAN} (tiny K3), so this is no weak drafter: drafts are not made, are NaN, belong to another "
        "vocabulary, or are all rejected.",
        _evidence(t),
    )  # fmt: skip


def _start(t: Totals, mode: str | None) -> Diagnosis:
    """The first position: collapse, in between, or normal. Without positions it is bounded, (mean - 1) / k <= survival_0 <= mean - 1."""
    extra = t.mean_emitted - 1
    if t.survival:
        low, high = wilson(t.accepted_at[0], t.drafts_at[0], t.design_effect)
        seen, least, most = (
            f"position 0 is accepted in {t.survival[0]:.1%} of rounds ({low:.1%} to {high:.1%})",
            t.survival[0],
            t.survival[0],
        )
    else:
        low = least = extra / t.k if t.k else 0.0
        high = most = min(1.0, extra)
        seen = f"no positions are printed; position 0 lies between {least:.2f} and {most:.2f}"
    fed = f" The log says the drafter is fed the {mode} stream: compare with what its checkpoint expects." if mode else ""
    known = f"{_mean(t)}; {seen}"
    evidence = _evidence(t, position_0=[low, high])
    if high < COLLAPSED_AT_0:
        text = (
            f"Collapse at position 0: {known}. A drafter fed the wrong stream kept {WRONG_AT_0} there (tiny K3; {RIGHT_AT_0} with its "
            f"own); {PUBLISHED}. Check the stream, the layer index (off by one) and the checkpoint, in that order.{fed} A drafter that "
            "is weak on this text looks the same."
        )
        return Diagnosis("collapse at position 0", True, text, evidence)
    if low < COLLAPSED_AT_0 or least < LOWEST_PUBLISHED_AT_0:
        if not t.survival:
            text = f"Undecided: {known}, which does not tell a good start from a wrong stream. Metrics per request do.{fed}"
            return Diagnosis("undecided", False, text, evidence)
        text = (
            f"Undecided: {known}. That lies between what a wrong stream left ({WRONG_AT_0}, tiny K3) and what is normal ({PUBLISHED}), or "
            f"its interval does. Compare streams and layer offsets on the same prompts.{fed}"
        )
        return Diagnosis("undecided", False, text, evidence)
    return Diagnosis("healthy", False, f"No fault seen: {known}; {PUBLISHED}.{fed}", evidence)


def _decay(t: Totals) -> Diagnosis | None:
    """A normal position 0 and conditional rates far below it: sum_(j>0) accepted_j / sum_(j<k-1) accepted_j against survival_0."""
    if len(t.accepted_at) < 2 or (t.k and len(t.accepted_at) < t.k) or len(set(t.drafts_at)) > 1:
        return None
    if t.drafted is not None and t.drafted < 0.99 * t.drafts * len(t.accepted_at):
        return None  # rounds of different lengths: a later position is lower because it was not always drafted
    reached, kept = sum(t.accepted_at[:-1]), sum(t.accepted_at[1:])
    low, high = wilson(kept, reached, t.design_effect)
    ratio = (kept / reached) / t.survival[0]
    if reached < ENOUGH_ROUNDS or high / t.survival[0] >= FAST_DECAY:
        return None
    text = (
        f"Normal start, fast decay: position 0 holds at {t.survival[0]:.2f}, and each later position keeps {kept / reached:.2f} of the one "
        f"before, {ratio:.2f} of the first (drafters that work: 0.93 or more). Survival {', '.join(f'{s:.2f}' for s in t.survival)}. Look "
        "past the stream: positions inside the block (RoPE, mask), the drafter's own cache, or a longer k than it was trained for."
    )
    return Diagnosis("fast decay", True, text, _evidence(t, conditional=kept / reached, interval=[low, high]))


def _inconsistent(rows: pd.DataFrame) -> list[Diagnosis]:
    if rows.empty or "residual" not in rows:
        return []
    off = rows[rows["residual"].abs() > rows["tolerance"] + 1e-9]
    checked = int(rows["residual"].notna().sum())
    if off.empty:
        return []
    worst = off.loc[off["residual"].abs().idxmax()]
    text = (
        f"Inconsistent: 1 + sum of the rates is not the mean in {len(off):,} of {checked:,} records; {worst['source']} line "
        f"{worst['line']} is off by {worst['residual']:+.3f} where printed digits allow {worst['tolerance']:.3f}. Lines are cut or "
        "edited, or the engine counts otherwise."
    )
    return [Diagnosis("inconsistent", True, text, {"records": len(off), "checked": checked, "worst": float(worst["residual"])})]


def _cliff(rows: pd.DataFrame) -> Diagnosis | None:
    """The mean falls to a third or less: with the tokens of a request where they are known, else along a log."""
    drafts, emitted = _weights(rows)
    if len(rows) < 2 or not drafts.sum() or emitted.sum() / drafts.sum() < 1.0:
        return None
    length = rows["length"].to_numpy(float)
    known = ~np.isnan(length) & (drafts > 0)
    if known.sum() >= 2:
        order = np.flatnonzero(known)[np.argsort(length[known], kind="stable")]
        found = best_split(drafts[order], emitted[order])
        if found and _fell(found):
            at, before, after = found
            limit = float(length[order[at]])
            text = (
                f"Long-context cliff: mean {before:.2f} in requests below {limit:,.0f} tokens, {after:.2f} from there on. A drafter that "
                "works keeps 0.44 of its accepted drafts even at 1M tokens (Kimi-K3-DSpark-Block5); tokenspeed 924 fell from 4.37 to "
                "1.0. Look at the drafter's maximum positions, its RoPE scaling and its cache."
            )
            return Diagnosis("long-context cliff", True, text, {"tokens": limit, "mean_before": before, "mean_after": after})
    for (source, stream), group in rows[rows["scope"] == "interval"].groupby(["source", "stream"], sort=False, observed=True):
        found = best_split(*_weights(group))
        if found and _fell(found):
            at, before, after = found
            row = group.iloc[at]
            where = f"line {row['line']}{f' ({row.ts})' if row['ts'] else ''} of {source}{f', {stream}' if stream else ''}"
            text = (
                f"The mean falls from {before:.2f} to {after:.2f} at {where}: long contexts, another kind of request or a changed "
                "deployment. These lines do not print how long a request is; metrics per request do."
            )
            evidence = {"line": int(row["line"]), "source": source, "mean_before": before, "mean_after": after}
            return Diagnosis("cliff in time", True, text, evidence)
    return None


def _weights(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and emitted tokens of each row, those of SGLang's lines in proportion to the running requests."""
    drafts, emitted = (rows[c].to_numpy(dtype=float, na_value=np.nan) for c in ("drafts", "emitted"))
    weight = STEPS_PER_LINE * rows["running"].to_numpy(dtype=float, na_value=np.nan)
    drafts = np.where(np.isnan(emitted), weight, drafts)
    emitted = np.where(np.isnan(emitted), weight * rows["reported_mean"].to_numpy(dtype=float, na_value=np.nan), emitted)
    good = ~np.isnan(drafts) & ~np.isnan(emitted)
    return np.where(good, drafts, 0.0), np.where(good, emitted, 0.0)


def _fell(found: tuple[int, float, float]) -> bool:
    _, before, after = found
    return before > FED_ZEROS_MEAN and after - 1 < CLIFF * (before - 1)


def best_split(drafts: np.ndarray, emitted: np.ndarray) -> tuple[int, float, float] | None:
    """(index of the first row after, mean before, mean after) of the split into two parts that differ most, each of at least
    ENOUGH_ROUNDS rounds: largest D_1 D_2 / (D_1 + D_2) (mean_1 - mean_2)^2. None if there is no such split."""
    d, e = np.cumsum(drafts)[:-1], np.cumsum(emitted)[:-1]
    rest, more = drafts.sum() - d, emitted.sum() - e
    fits = (d >= ENOUGH_ROUNDS) & (rest >= ENOUGH_ROUNDS)
    if not fits.any():
        return None
    before, after = e[fits] / d[fits], more[fits] / rest[fits]
    best = int(np.argmax(d[fits] * rest[fits] * (before - after) ** 2))
    return int(np.flatnonzero(fits)[best]) + 1, float(before[best]), float(after[best])


def wilson(hits: int, n: int, design_effect: float = 1.0) -> tuple[float, float]:
    """95% interval of hits / n (Wilson's score interval) from n / design_effect independent rounds."""
    if n == 0:
        return 0.0, 1.0
    p, n = hits / n, n / design_effect
    w = Z**2 / n
    middle, half = (p + w / 2) / (1 + w), Z * (p * (1 - p) / n + w / (4 * n)) ** 0.5 / (1 + w)
    return max(0.0, middle - half), min(1.0, middle + half)
