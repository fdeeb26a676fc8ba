"""How long a panel takes from a changed control to the new picture, on this machine: python bench/panels.py

Each line is one change, made through the widget as a browser does it: adapting the controls, computing, drawing, PNG. The floor is a
captioned figure with empty axes, drawn and encoded the same way in the same run; the network and the browser come on top.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from k3lab import explore, figures, provenance
from k3lab.capture import Capture
from k3lab.panels import drafter_panel, nan_panel, race_panel

DATA = Path(__file__).parents[1] / "data"
NAN = [
    ("decodes", 6), ("prefill", 131), ("route", "split"), ("padding", "zero"), ("padding", "nan"), ("tensor", "A"),
    ("tensor", "final_state"), ("head", 1), ("route", "chunk_all"), ("zoom", "first"), ("zoom", "selected"), ("rows", (40, 90)),
    ("zoom", "whole"), ("batch", "captured"), ("batch", "made"), ("tensor", "u"), ("decodes", 128), ("prefill", 512),
]  # fmt: skip
RACE = [
    ("config", (8, 4)), ("config", (2, 2)), ("given", "length1"), ("given", "full"), ("triton", "3.8.0"), ("config", (8, 3)),
    ("padding", "zero"), ("pointer_range", True), ("config", (2, 4)),
]  # fmt: skip
DRAFTER = [
    ("stream", "mixture"), ("offset", -1), ("domain", "code"), ("drafter", "prefix"), ("log", str(DATA / "drafter_fed_prefix.log")),
    ("stream", "zeros"), ("domain", "all"), ("drafter", "mixture"), ("stream", "prefix"),
]  # fmt: skip


def seconds(action) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def floor() -> None:
    explore.image(figures.new("An empty figure with a finding as its title", "what ran", (8.4, 3.6))[0])


def changes(name: str, draw, controls: dict, adapt, steps: list, repeats: int, base: float) -> float:
    message = explore.panel(draw, controls, adapt=adapt).children[1]
    start = {key: control.value for key, control in controls.items()}
    times: dict = {}
    for _ in range(repeats):
        for key, value in steps:
            times.setdefault((key, value), []).append(seconds(lambda key=key, value=value: controls[key].set_trait("value", value)))
            if "alert" in message.value:
                raise SystemExit(f"{name}, {key} {value}: {message.value}")
        for key, value in start.items():
            controls[key].value = value
    for (key, value), taken in times.items():
        middle = statistics.median(taken)
        print(f"{name:6s} {key:14s} {value!s:12s} {1000 * middle:6.0f} ms  {middle / base:4.1f} x floor")
    return max(statistics.median(taken) for taken in times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(provenance.versions())
    floor()
    base = statistics.median(seconds(floor) for _ in range(2 * args.repeats))
    print(f"floor: {1000 * base:.0f} ms")
    call = Capture.load(DATA / "captures" / "mixed_split_layer1.safetensors").kda_call()
    cells = race_panel.load(DATA / "race_matrix.jsonl", DATA / "race_events.jsonl")
    first = {"triton": "3.7.1", "config": (4, 4)}
    nan = (partial(nan_panel.draw, call), nan_panel.controls(call, {}), partial(nan_panel.adapt, call))
    race = (partial(race_panel.draw, cells), race_panel.controls(cells, first), partial(race_panel.adapt, cells))
    counts = drafter_panel.load(DATA / "drafter_counts.csv")
    drafter = (partial(drafter_panel.draw, counts), drafter_panel.controls(counts, {}), drafter_panel.adapt)
    panels = {"01": (*nan, NAN), "02": (*race, RACE), "03": (*drafter, DRAFTER)}
    worst = max(changes(name, *panel, args.repeats, base) for name, panel in panels.items())
    print(f"slowest change: {1000 * worst:.0f} ms, {worst / base:.1f} x floor")


if __name__ == "__main__":
    main()
