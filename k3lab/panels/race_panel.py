"""Notebook 02, live: the grid of configs by verdict, and the way of a tile through LDS in the cell that is chosen.

cells = race_panel.load("../data/race_matrix.jsonl", "../data/race_events.jsonl")
race_panel.show(cells, shown)              pictures for the cells that the notebook discusses, and controls in a live session
fig, frame = race_panel.draw(cells, triton="3.7.1", pointer_range=False, padding="undefined", given="full", config=(4, 4))
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from k3lab import figures, race_figures
from k3lab.errors import BadInput
from k3lab.explore import explore
from k3lab.races.events import unpack
from k3lab.races.matrix import KEYS, read_journal

if TYPE_CHECKING:
    from ipywidgets import Widget

Cells = Mapping[tuple, dict]
AXES = ("triton", "pointer_range", "padding", "input")


def load(matrix: str | os.PathLike, events: str | os.PathLike) -> dict[tuple, dict]:
    """Rows of a race matrix by (triton, pointer_range, padding, input, (warps, stages)), with their events.

    Both files are journals of the same builds; rows of the matrix without events (another target, no asynchronous copy) are left out.
    Raises BadInput if a file cannot be read, if the two disagree on a verdict, or if they have no row in common.
    """
    verdicts = {tuple(r[k] for k in KEYS): r for r in read_journal(matrix)}
    out = {}
    for row in read_journal(events):
        of = verdicts.get(tuple(row[k] for k in KEYS))
        if of is None:
            continue
        if of["verdict"] != row["verdict"]:
            raise BadInput(f"{events}: {row['verdict']} where {matrix} has {of['verdict']}, for {[row[k] for k in KEYS]}; make both again")
        out[(*(row[k] for k in AXES), (row["warps"], row["stages"]))] = {**of, **row}
    if not out:
        raise BadInput(f"{events}: has no row of {matrix}; make it with data/make_race_events.py")
    return out


def draw(
    cells: Cells,
    *,
    triton: str = "3.7.1",
    pointer_range: bool = False,
    padding: str = "undefined",
    given: str = "full",
    config: tuple[int, int] = (4, 4),
) -> tuple[Figure, pd.DataFrame]:
    """Left the configs by verdict at one input, right the copies, waits, barriers and reads of the chosen one, a column per wave.

    given is the input's name, config (num_warps, num_stages). Frame: the events of every wave, as race_figures.Timeline says.
    Raises BadInput for a cell that is not among cells.
    """
    chosen = (triton, pointer_range, padding, given)
    row = cells.get((*chosen, tuple(config)))
    if row is None:
        raise BadInput(f"cell {(*chosen, tuple(config))}: no such row; there are {', '.join(_axis(cells, i) for i in range(4))}")
    frame = unpack(row)
    name = f"w{config[0]}s{config[1]}"
    kernel, target = row["kernel"], row["target"].removeprefix("hip:")
    ran = (
        f"tile {row['tile']} of {kernel}, Triton {triton}, {target}, async copy {row['async']}, "
        f"pointer_range {'on' if pointer_range else 'off'}, masked rows {padding}, input {given}; compiled code, no card was used; "
        "bar: copy in flight, until the wait that retires it"
    )
    rows = int(frame["row"].max()) + 1
    fig, (grid, ax) = figures.new(_finding(row, frame, name), ran, (8.4, max(3.2, 0.24 * rows + 0.9)), 1, 2, width_ratios=[1, 2.1])
    _grid(grid, cells, chosen, config)
    race_figures.draw_timeline(ax, race_figures.Timeline(frame, name))
    race_figures.event_legend(fig, [frame])
    return fig, frame


def _axis(cells: Cells, i: int) -> str:
    return f"{AXES[i]} {', '.join(str(x) for x in dict.fromkeys(key[i] for key in cells))}"


def _finding(row: dict, frame: pd.DataFrame, name: str) -> str:
    """The hazard in words, with its lines; what is ordered says so."""
    stale = frame[frame["uninitialised"]]
    unwritten = f"{name} reads LDS that nothing wrote at line{'s' * (stale['line'].nunique() > 1)} " + ", ".join(
        str(n) for n in sorted(stale["line"].unique())
    )
    if row["verdict"] == "ordered":
        return f"{name}: ordered, every copy has landed before its read"
    if row["verdict"] == "uninitialised":
        return unwritten
    racing = frame[frame["racing"]]
    lines = {e: ", ".join(str(n) for n in sorted(racing[racing["event"] == e]["line"].unique())) for e in ("copy", "read")}
    waits = "; ".join(
        f"{w['counter']}({w['allows']}) at line {w['line']} should be {w['counter']}({w['enough']})"
        if w["allows"] is not None
        else f"{w['counter']}({w['enough']}) is missing before line {w['line']}"
        for w in row.get("waits", [])
    )
    text = f"{name} races: reads at {lines['read']} against copies at {lines['copy']}" if lines["copy"] else f"{name} races"
    return text + (f"; {waits}" if waits else "") + (", and reads what nothing wrote" if len(stale) else "")


def _grid(ax, cells: Cells, chosen: tuple, config: tuple[int, int]) -> None:
    configs = sorted({key[4] for key in cells if key[:4] == chosen})
    warps, stages = sorted({w for w, _ in configs}), sorted({s for _, s in configs})
    rows = {c: cells[(*chosen, c)] for c in configs}
    verdicts = np.array([[rows[(w, s)]["verdict"] if (w, s) in rows else "error" for s in stages] for w in warps])
    texts = np.array([[_letter(rows.get((w, s))) for s in stages] for w in warps])
    race_figures.draw_grid(ax, verdicts, texts)
    y, x = warps.index(config[0]), stages.index(config[1])
    ax.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, edgecolor="black", linewidth=2, zorder=4))
    ax.set_xticks(range(len(stages)), [f"s{s}" for s in stages])
    ax.set_yticks(range(len(warps)), [f"w{w}" for w in warps])
    ax.set_title("R n: n racing pairs · U: uninitialised", loc="left", fontsize=8)


def _letter(row: dict | None) -> str:
    if row is None:
        return "?"
    return race_figures.LETTER[row["verdict"]] + (f" {row['race']}" if row["verdict"] == "race" and row.get("race") else "")


def show(cells: Cells, shown: Sequence[Mapping[str, Any]]) -> None:
    """Pictures for the cells in shown, and in a live session a panel in which a click on the grid chooses the cell."""
    explore(
        partial(draw, cells), shown, partial(controls, cells, dict(shown[0])), "02_panel", partial(adapt, cells),
        "k3lab.panels.race_panel.draw(cells, ",
    )  # fmt: skip


def controls(cells: Cells, start: Mapping[str, Any]) -> dict[str, "Widget"]:
    """The widgets, at the values of start where it has them."""
    import ipywidgets as w

    from k3lab.panels.grid import Grid

    def dropdown(i: int, text: str) -> "Widget":
        options = [({False: "off", True: "on"}.get(x, x), x) for x in dict.fromkeys(key[i] for key in cells)]
        return w.Dropdown(options=options, description=text, style={"description_width": "7em"}, layout=w.Layout(width="17em"))

    configs = sorted({key[4] for key in cells})
    out = {
        "triton": dropdown(0, "Triton"),
        "pointer_range": dropdown(1, "pointer_range"),
        "padding": dropdown(2, "masked rows"),
        "given": dropdown(3, "input"),
        "config": Grid({c: f"w{c[0]}s{c[1]}" for c in configs}, columns=len({s for _, s in configs})),
    }
    for key, value in start.items():
        out[key].value = value
    return out


def adapt(cells: Cells, widgets: Mapping[str, "Widget"]) -> None:
    """Colour the grid's buttons by the verdicts that the others choose."""
    chosen = tuple(widgets[key].value for key in ("triton", "pointer_range", "padding", "given"))
    for config, button in widgets["config"].buttons.items():
        row = cells.get((*chosen, config))
        button.style.button_color = race_figures.COLOR[row["verdict"] if row else "error"]
        button.style.text_color = "white" if row and row["verdict"] == "race" else "black"
        button.description = f"w{config[0]}s{config[1]} {_letter(row)}".strip()
