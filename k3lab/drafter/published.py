"""Acceptance of Kimi-K3 drafters as others published it: data/published/*.csv, whose cards name the source of every figure."""

from os import PathLike
from pathlib import Path

import pandas as pd

from k3lab.errors import BadInput

PUBLISHED = Path(__file__).resolve().parents[2] / "data" / "published"
ACCEPTANCE, STREAMS = "drafter_acceptance.csv", "eagle3_streams.csv"
_YES_NO = {"yes", "no", "unknown"}
_KINDS = {"prefix", "mixture", "disputed", "unknown", "none"}


def published(
    drafter: str | None = None, dataset: str | None = None, metric: str | None = None, path: str | PathLike = PUBLISHED / ACCEPTANCE
) -> pd.DataFrame:
    """Published acceptance of drafters, one figure a row, filtered by exact drafter, dataset or metric.

    Columns: drafter, dataset, metric (mean_emitted, acceptance_rate, survival), position (0-based, of survival), value, value_high
    (of a published range), k, includes_bonus, stream (what the checkpoint expects), fed (what the engine fed), taps, engine,
    prompts, second_hand, source, note. "unknown" and "disputed" are values, not gaps. data/published/drafter_acceptance.md has the
    conventions. Raises BadInput for a name that is not there, or a file that is no such table.
    """
    frame = _read(path, ("drafter", "dataset", "metric", "value", "k", "includes_bonus", "stream", "fed", "taps", "second_hand", "source"))
    for column, kinds in (("includes_bonus", _YES_NO), ("second_hand", _YES_NO), ("stream", _KINDS), ("fed", _KINDS)):
        odd = set(frame[column]) - kinds
        if odd:
            raise BadInput(f"{path}: column {column!r} holds {sorted(map(str, odd))[0]!r}; expected one of {', '.join(sorted(kinds))}")
    for column, name in (("drafter", drafter), ("dataset", dataset), ("metric", metric)):
        if name is None:
            continue
        if name not in set(frame[column]):
            there = ", ".join(sorted(frame[column].unique()))
            raise BadInput(f"published: no {column} {name!r} among these rows; there are {there}")
        frame = frame[frame[column] == name]
    return frame.reset_index(drop=True)


def published_streams(path: str | PathLike = PUBLISHED / STREAMS) -> pd.DataFrame:
    """One EAGLE3 drafter fed two streams at three offsets, as published: fed, offset, vllm_ids, metric, position, value.

    mean_accepted is without the bonus token; `trained_offset` is the offset at which the ids name the layers it was trained on
    (vLLM counts one higher than its trainer). data/published/eagle3_streams.md has the setting.
    """
    return _read(path, ("fed", "offset", "vllm_ids", "metric", "value", "includes_bonus", "trained_offset"))


def _read(path: str | PathLike, columns: tuple[str, ...]) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype={"position": "Int64", "k": "Int64", "prompts": "Int64"})
    except (OSError, ValueError, TypeError, ArithmeticError) as e:
        raise BadInput(f"{path}: not a table of published figures ({e}); run from a clone of the repository, which holds data/") from e
    missing = [c for c in columns if c not in frame]
    if missing:
        raise BadInput(f"{path}: no column {missing[0]!r}; expected {', '.join(columns)}")
    return frame
