"""The way of a tile through LDS as rows of a journal: what race_figures.timeline reads from compiled code, kept without the code.

A row has the keys and the verdict of a row of the race matrix, and two lists more:
    rows    [line, text] of every instruction, in program order
    events  [row, event (index in EVENTS), copy, landed, mark (1: racing, 2: uninitialised, 3: both), waves]; equal events of
            several waves are one entry
"""

import pandas as pd

from k3lab.errors import BadInput

EVENTS = ("copy", "wait", "barrier", "read")
COLUMNS = ("wave", "row", "line", "text", "event", "copy", "racing", "uninitialised", "landed")


def pack(frame: pd.DataFrame) -> dict:
    """The frame of a race_figures.Timeline as the lists "rows" and "events"."""
    lines = frame.drop_duplicates("row").sort_values("row")
    waves: dict[tuple, list[int]] = {}
    for e in frame.itertuples():
        key = (int(e.row), EVENTS.index(e.event), int(e.copy), int(e.landed), int(e.racing) + 2 * int(e.uninitialised))
        waves.setdefault(key, []).append(int(e.wave))
    return {
        "rows": [[int(e.line), e.text] for e in lines.itertuples()],
        "events": [[*key, waves[key]] for key in sorted(waves)],
    }


def unpack(row: dict) -> pd.DataFrame:
    """The frame that pack() was given, by wave and row. Raises BadInput for a row that holds no events."""
    try:
        out = []
        for at, event, copy, landed, mark, waves in row["events"]:
            line, text = row["rows"][at]
            if not all(type(x) is int for x in (at, line, copy, landed, mark, *waves)):
                raise TypeError("not a whole number")
            out += [(w, at, line, text, EVENTS[event], copy, bool(mark & 1), bool(mark & 2), landed) for w in waves]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        what = {k: row.get(k) for k in ("triton", "warps", "stages", "input")}
        raise BadInput(f"events of {what}: not as data/make_race_events.py writes them: {error!r}") from None
    return pd.DataFrame(out, columns=COLUMNS).sort_values(["wave", "row"], ignore_index=True)
