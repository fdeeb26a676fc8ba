"""From the rows of a sweep to one verdict per (kernel, config, input), each with the rate of deviation that it excludes."""

from collections import Counter
from collections.abc import Iterable, Mapping

import pandas as pd

from k3lab.errors import BadInput
from k3lab.races.sweep import SKIPPED

DIFFERS = "differs run to run"
MEMORY = "depends on initial memory"
WRONG = "same but wrong"
ROUNDING = "different rounding between configs"
CLEAN = "no difference"
FAILED = ("crash", "illegal access", "hang", "out of memory", "error")
FINDINGS = (DIFFERS, MEMORY, WRONG, "crash", "illegal access", "hang")
RACECHECK = "racecheck"


def excluded_rate(runs: int, confidence: float = 0.95) -> float:
    """The deviation rate above which `runs` runs would have shown a difference: R = 1 - (1 - confidence)^(1/runs), about 3/runs.

    A run that deviates with probability p stays hidden in all of them with probability (1 - p)^runs; R is where that is 5%.
    It is the upper end of the exact (Clopper-Pearson) one-sided interval at no deviation seen.
    """
    if runs < 1:
        raise BadInput(f"runs is {runs}; a rate needs at least one")
    return 1.0 - (1.0 - confidence) ** (1.0 / runs)


def config_name(config: Mapping) -> str:
    """Such as "w4s2 undefined" or "w4 BV=16"."""
    c = dict(config)
    head = "".join(f"{letter}{c.pop(key)}" for letter, key in (("w", "num_warps"), ("s", "num_stages")) if key in c)
    padding = c.pop("padding", "")
    return " ".join(filter(None, [head, *(f"{k}={v}" for k, v in sorted(c.items())), padding])) or "default"


def judge(rows: Iterable[Mapping]) -> pd.DataFrame:
    """One line per (kernel, config, input, load): verdict, whether it is a finding, what it rests on.

    verdict    the first that holds: a failure of any fill; "differs run to run" (more than one result at one fill);
               "depends on initial memory" (one result per fill, not the same); "same but wrong" (outside the float64 budget);
               "different rounding between configs" (steady and right, but not the bits that most configs give);
               "no difference"; "skipped: budget" where a fill was not run
    finding    True for a race, memory dependence, a wrong result, a crash, an illegal access or a hang
    runs       launches over both fills, fill_runs at one of them
    excluded_rate  of these runs, see there; None unless every one of them gave the same right bits
    distinct, deviating, differing, big, nonfinite, outside, first_diff, error, budget: at the worse fill
    racecheck  compute-sanitizer's verdict on the same kernel, config and input, where it was asked
    Raises BadInput for rows that a sweep did not write.
    """
    try:
        return _judged(rows)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise BadInput(
            f"rows of a sweep: not as races.sweep writes them ({type(error).__name__}: {error}); make the journal again"
        ) from error


def _judged(rows: Iterable[Mapping]) -> pd.DataFrame:
    groups: dict[tuple, list[Mapping]] = {}
    checks: dict[tuple, str] = {}
    for r in rows:
        name = config_name(r["config"])
        if r["fill"] == RACECHECK:
            checks[r["kernel"], name, r["input"]] = racecheck_words(r)
        else:
            groups.setdefault((r["kernel"], name, r["input"], bool(r.get("load"))), []).append(r)
    lines = [{"kernel": k, "config": c, "input": i, "load": load, **_one(rs)} for (k, c, i, load), rs in groups.items()]
    _compare_configs(lines)
    for line in lines:
        line["finding"] = line["verdict"] in FINDINGS
        line["sentence"] = _sentence(line)
        line["racecheck"] = checks.get((line["kernel"], line["config"], line["input"]), "")
        line.pop("same")
    return pd.DataFrame(lines)


def racecheck_words(row: Mapping) -> str:
    """compute-sanitizer's verdict in a few words."""
    if row["status"] != "ok":
        return f"did not run: {row.get('error') or row['status']}"
    return f"{row['hazards']} hazards ({row['errors']} errors, {row['warnings']} warnings)" if row["hazards"] else "0 hazards"


def _one(rows: list[Mapping]) -> dict:
    """The verdict of one config on one input from its fills alone."""
    ok = [r for r in rows if r["status"] == "ok"]
    line = {"verdict": CLEAN, "runs": sum(r["runs"] for r in ok), "fill_runs": max((r["runs"] for r in ok), default=0), "same": None,
            "detail": "; ".join(dict.fromkeys(r["error"] for r in rows if r.get("error")))}  # fmt: skip
    line |= {k: max((r[k] for r in ok), default=None) for k in ("distinct", "deviating", "differing", "big", "nonfinite", "outside")}
    line["first_diff"] = next((r["first_diff"] for r in ok if r["first_diff"]), {})
    worst = max((o for r in ok for o in r["outputs"].values()), key=_share, default={})
    line |= {"error": worst.get("error"), "budget": worst.get("budget"), "excluded_rate": None}
    hashes = {r["hashes"][0] for r in ok}
    if failed := [r["status"] for r in rows if r["status"] in FAILED]:
        line["verdict"] = min(failed, key=FAILED.index)
    elif any(r["distinct"] > 1 for r in ok):
        line["verdict"] = DIFFERS
    elif len(hashes) > 1:
        line["verdict"] = MEMORY
    elif not all(r["ok"] for r in ok):
        line["verdict"] = WRONG
    elif any(r["status"] == SKIPPED for r in rows):
        line["verdict"] = SKIPPED
    else:
        line["excluded_rate"] = excluded_rate(line["runs"])
        line["same"] = (ok[0]["inputs"], ok[0]["hashes"][0])
    return line


def _share(output: Mapping) -> float:
    """Error over budget; a result that is not finite comes first."""
    if output["error"] is None or output["rms_error"] is None:
        return float("inf")
    return output["error"] / output["budget"] if output["budget"] else (float("inf") if output["error"] else 0.0)


def _compare_configs(lines: list[dict]) -> None:
    """Name the clean configs whose bits are not those of the most configs of the kernel on the very same input bytes."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        if line["same"]:
            groups.setdefault((line["kernel"], line["input"], line["load"], line["same"][0]), []).append(line)
    for members in groups.values():
        usual = Counter(m["same"][1] for m in members).most_common(1)[0][0]  # the first seen, of equals
        for m in members:
            if m["same"][1] != usual:
                m["verdict"] = ROUNDING


def _sentence(line: Mapping) -> str:
    """The verdict as a sentence that carries its own numbers."""
    verdict, counts = line["verdict"], f"{line['big']} above 1e30, {line['nonfinite']} not finite"
    if verdict == DIFFERS:
        where = ", ".join(f"{n} at {tuple(at)}" for n, at in line["first_diff"].items())
        apart = f"{line['distinct']} distinct results in {line['fill_runs']} runs at one fill"
        apart += f", up to {line['differing']} elements apart, first in {where}"
        return f"{verdict}: {apart}; {line['outside']} elements outside the float64 budget, {counts}"
    if verdict in (MEMORY, WRONG):
        return f"{verdict}: {line['outside']} elements outside the float64 budget in each of {line['runs']} runs, {counts}"
    if verdict in (CLEAN, ROUNDING):
        rate = f"a deviation rate above {line['excluded_rate']:.2%} would have shown with 95% confidence"
        return f"no difference in {line['runs']} runs ({rate})" + (f"; {verdict}" if verdict == ROUNDING else "")
    return line["verdict"] + (f": {line['detail']}" if line["detail"] else "")
