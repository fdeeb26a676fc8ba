"""The panels of the notebooks: the batch that is made, the map and its window, the cell that is chosen, and what is refused."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import traitlets

from k3lab import explore, figures, nonfinite
from k3lab.errors import BadInput
from k3lab.kda.layer import kda_layer_step
from k3lab.panels import nan_panel, race_panel
from k3lab.panels.grid import Grid
from k3lab.races import events
from k3lab.races.matrix import CONFIGS, INPUTS, matrix_builds, read_journal
from k3lab.testing import random_call

DATA = Path(__file__).parents[1] / "data"
MATRIX, EVENTS = DATA / "race_matrix.jsonl", DATA / "race_events.jsonl"


@pytest.fixture
def call():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return random_call((1, 1, 63, 64, 70), heads=2, head_dim=64, seed=seed)


def finding(fig) -> str:
    return " ".join(next(t.get_text() for t in fig.texts if t.get_gid() == "finding").split())


# ---------------------------------------------------------------- 01


def test_a_batch_is_cut_from_the_sequences_of_the_call(call):
    """Decodes in turn with their states, the prefill the head of the longest sequence, then the tokens behind it."""
    made = nan_panel.make_batch(call, 3, 75).check()
    assert made.lengths.tolist() == [1, 1, 1, 75]
    assert made.num_decodes == 3
    start = int(call.cu_seqlens[4])
    rows = [0, 1, 0, *range(start, start + 70), 0, 1, *range(2, 5)]
    assert torch.equal(made.q, call.q[rows])
    assert torch.equal(made.raw_beta, call.raw_beta[rows])
    assert torch.equal(made.state_vk(), call.state_vk()[[0, 1, 0, 4]])
    assert nan_panel.make_batch(call, 0, 1).lengths.tolist() == [1]
    assert nan_panel.make_batch(call, 2, 0).lengths.tolist() == [1, 1]


def test_without_decodes_the_first_tokens_are_taken():
    call = random_call((5, 70), head_dim=64)
    made = nan_panel.make_batch(replace(call, num_decodes=0), 3, 0)
    assert torch.equal(made.k, call.k[[0, 5, 0]])


def test_speculative_and_null_slot_sequences_are_left_out():
    call = replace(random_call((1, 1, 40, 90), head_dim=64), spec_mask=torch.tensor([True, False, False, False]))
    call = replace(call, state_indices=torch.tensor([1, 2, 3, 0]))
    made = nan_panel.make_batch(call, 2, 40)
    assert torch.equal(made.v, call.v[[1, 1, *range(2, 42)]])
    assert made.spec_mask is None
    assert made.state_indices is None
    with pytest.raises(BadInput, match="every sequence"):
        nan_panel.make_batch(replace(call, spec_mask=torch.ones(4, dtype=torch.bool)), 1, 0)


@pytest.mark.parametrize(("decodes", "prefill"), [(0, 0), (-1, 5), (129, 0), (1, 513)])
def test_an_empty_or_boundless_batch_is_refused(call, decodes, prefill):
    with pytest.raises(BadInput, match="batch"):
        nan_panel.draw(call, decodes=decodes, prefill=prefill)


def test_a_head_alone_is_that_head_of_the_whole(call):
    whole = kda_layer_step(call, "chunk_all")
    for head in range(2):
        alone = kda_layer_step(nan_panel.one_head(call, head), "chunk_all")
        torch.testing.assert_close(alone.o[:, 0], whole.o[:, head])
        torch.testing.assert_close(alone.final_state[:, 0], whole.final_state[:, head])


@pytest.mark.parametrize("route", ["chunk_all", "split"])
def test_the_map_is_what_the_trace_says(call, route):
    """The first value of the trace is the first of its tensor's map; what is lost in o or state is lost in their maps."""
    report = nonfinite.trace(call, kda_layer_step(call, route, padding="nan"))
    first = report.first
    chosen = {"batch": "captured", "route": route, "padding": "nan"}
    fig, frame = nan_panel.draw(call, tensor=first.tensor, head=first.head, zoom="first", **chosen)
    row = frame.set_index("sequence").loc[first.sequence]
    assert (row["first_row"], row["first_channel"]) == (first.row, first.channel)
    assert f"first prefill {first.sequence} ({first.length} tokens) at row {first.row}, channel {first.channel}" in finding(fig)
    assert figures.problems(fig) == []
    lost = set()
    for tensor in ("o", "final_state"):
        frame = nan_panel.draw(call, tensor=tensor, **chosen)[1]
        lost |= set(frame[frame["values_not_finite"] > 0]["sequence"])
    assert sorted(lost) == report.nonfinite_sequences


def test_every_tensor_is_drawn_and_finite_with_zero_padding(call):
    for tensor in nan_panel.TENSORS:
        fig, frame = nan_panel.draw(call, decodes=2, prefill=70, route="split", padding="zero", tensor=tensor)
        assert frame["values_not_finite"].sum() == 0
        assert "finite in all" in finding(fig)
        assert finding(fig).endswith("that the chunk kernel takes") == (tensor not in nan_panel.EVERYWHERE)


def test_one_nan_among_more_rows_than_pixels_is_still_drawn():
    codes = np.zeros((5000, 3), np.int8)
    codes[3333, 1] = 3
    _, ax = figures.new("x", "y")
    nan_panel._paint(ax, codes, (0, 5000, 0, 3))
    image = ax.images[0].get_array()
    assert image.shape[0] <= nan_panel.PIXELS
    assert (image == 3).sum() == 1


def test_a_window_prints_its_values_and_one_outside_is_refused(call):
    chosen = {"decodes": 1, "prefill": 70, "padding": "zero", "tensor": "v"}
    fig, _ = nan_panel.draw(call, zoom="selected", rows=(1, 3), channels=(5, 6), **chosen)
    start = int(call.cu_seqlens[4])
    shown = [t.get_text() for t in fig.axes[1].texts]
    assert shown == [f"{x:.2g}" for x in call.v[start : start + 3, 0, 5:7].flatten().tolist()]
    assert [t.get_text() for t in fig.axes[1].get_yticklabels()] == ["1: 0", "1: 1", "1: 2"]
    for window in ({"rows": (0, 71), "channels": (0, 1)}, {"rows": (0, 1), "channels": (60, 64)}, {"rows": (2, 1), "channels": (0, 1)}):
        with pytest.raises(BadInput, match="is not a range within"):
            nan_panel.draw(call, zoom="selected", **window, **chosen)


@pytest.mark.parametrize("wrong", [{"tensor": "x"}, {"zoom": "x"}, {"batch": "x"}, {"route": "x"}, {"padding": "x"}, {"head": 2}])
def test_an_unknown_choice_is_named(call, wrong):
    with pytest.raises(BadInput, match=next(iter(wrong))):
        nan_panel.draw(call, **wrong)


def test_the_nan_panel_fits_its_sliders_and_shows_a_route_that_cannot_apply(call):
    spec = replace(call, spec_mask=torch.tensor([False, False, True, False, False]))
    widgets = nan_panel.controls(spec, {"decodes": 2, "prefill": 70})
    box = explore.panel(partial(nan_panel.draw, spec), widgets, adapt=partial(nan_panel.adapt, spec))
    message, picture = box.children[1:3]
    assert widgets["rows"].value == (0, 71)
    widgets["tensor"].value = "final_state"
    assert widgets["rows"].max == 3 * 64 - 1
    widgets["zoom"].value = "selected"
    widgets["rows"].value = (100, 180)
    widgets["tensor"].value = "u"
    assert (widgets["rows"].value, widgets["rows"].max) == ((0, 71), 71)
    assert not widgets["rows"].disabled
    widgets["route"].value = "split"
    assert picture.value
    widgets["batch"].value = "captured"
    assert "cannot apply" in message.value
    assert picture.value == ""
    widgets["route"].value = "gather_split"
    assert picture.value
    assert "alert" not in message.value


# ---------------------------------------------------------------- 02


@pytest.fixture(scope="module")
def cells():
    return race_panel.load(MATRIX, EVENTS)


def test_events_are_there_for_every_cell_and_their_marks_are_the_verdicts(cells):
    assert len(cells) == 4 * 2 * 2 * len(INPUTS) * len(CONFIGS)
    for key, row in cells.items():
        marks = {e[4] for e in row["events"]}
        assert bool({1, 3} & marks) == (row["verdict"] == "race"), key
        assert bool({2, 3} & marks) == bool(row.get("uninitialised")), key
        waves = {w for e in row["events"] for w in e[5]}
        assert max(waves) + 1 == row["warps"], key


def test_packing_loses_nothing(cells):
    for row in list(cells.values())[::7]:
        assert events.pack(events.unpack(row)) == {k: row[k] for k in ("rows", "events")}


def test_every_wait_that_is_blamed_stands_in_the_timeline(cells):
    blamed = 0
    for row in cells.values():
        lines = {line for line, text in row["rows"] if text.startswith("s_waitcnt")}
        for wait in row.get("waits", []):
            if wait["allows"] is not None:
                assert wait["line"] in lines
                blamed += 1
    assert blamed > 50


@pytest.mark.slow
def test_shipped_events_are_those_of_the_compiled_code(cells, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", reason="Triton has no build for this platform")
    if triton.__version__ not in {key[0] for key in cells}:
        pytest.skip("no events of this Triton version are shipped")
    from k3lab.race_figures import timeline
    from k3lab.races.compiled import compile_builds

    monkeypatch.setenv("K3LAB_ARTEFACTS", str(tmp_path))
    kernel = compile_builds(matrix_builds(["installed"], ["hip:gfx950"], (False,), (True,), ("undefined",), [(4, 3)]))[0].kernel()
    for given in ("full", "tail"):
        row = cells[(triton.__version__, False, "undefined", given, (4, 3))]
        assert events.pack(timeline(kernel, given, "w4s3").frame) == {k: row[k] for k in ("rows", "events")}


def test_findings_name_the_hazard_and_the_wait_that_would_do(cells):
    fig, frame = race_panel.draw(cells, triton="3.7.1", given="full", config=(4, 4))
    assert "w4s4 races" in finding(fig)
    assert "vmcnt(4) at line" in finding(fig)
    assert "should be vmcnt(2)" in finding(fig)
    assert set(frame["wave"]) == {0, 1, 2, 3}
    assert "is missing before line" in finding(race_panel.draw(cells, triton="3.8.0", config=(8, 4))[0])
    assert "reads LDS that nothing wrote" in finding(race_panel.draw(cells, triton="3.9.0", given="tail", config=(2, 2))[0])
    assert "ordered" in finding(race_panel.draw(cells, triton="3.7.1", pointer_range=True, config=(2, 4))[0])


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_is_drawn_readably(cells, config):
    for given in ("full", "tail"):
        assert figures.problems(race_panel.draw(cells, triton="3.8.0", given=given, config=config)[0]) == []


def test_a_cell_that_is_not_there_is_named_with_what_is(cells):
    with pytest.raises(BadInput, match=r"3\.5\.1.*there are triton 3\.6\.0"):
        race_panel.draw(cells, triton="3.5.1")


def journal(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_journals_that_disagree_or_do_not_meet_are_refused(tmp_path):
    rows = read_journal(EVENTS)[:3]
    wrong = journal(tmp_path / "wrong.jsonl", [{**rows[0], "verdict": "race"}])
    with pytest.raises(BadInput, match="make both again"):
        race_panel.load(MATRIX, wrong)
    with pytest.raises(BadInput, match="has no row of"):
        race_panel.load(MATRIX, journal(tmp_path / "other.jsonl", [{**rows[0], "triton": "3.1.0"}]))
    with pytest.raises(BadInput, match="cannot be read"):
        race_panel.load(MATRIX, tmp_path / "absent.jsonl")


@pytest.mark.parametrize("damage", [{"events": None}, {"events": [[0, 9, 0, 0, 0, [0]]]}, {"rows": []}, {"events": [[1]]}])
def test_damaged_events_are_one_clear_error(cells, damage):
    key = ("3.7.1", False, "undefined", "full", (4, 4))
    with pytest.raises(BadInput, match="make_race_events"):
        race_panel.draw({**cells, key: {**cells[key], **damage}})


def test_a_click_on_the_grid_draws_the_cell_and_colours_follow_the_other_controls(cells):
    widgets = race_panel.controls(cells, {"triton": "3.7.1", "config": (4, 4)})
    box = explore.panel(partial(race_panel.draw, cells), widgets, adapt=partial(race_panel.adapt, cells))
    message, picture = box.children[1:3]
    before, buttons = picture.value, widgets["config"].buttons
    assert [b.description for b in buttons.values()][5] == "w4s4 R 16"
    buttons[(8, 2)].click()
    assert widgets["config"].value == (8, 2)
    assert 'alt="w8s2' in picture.value
    assert picture.value != before
    assert buttons[(8, 2)].layout.border_top != buttons[(4, 4)].layout.border_top
    widgets["triton"].value = "3.9.0"
    assert {b.style.button_color for b in buttons.values()} == {"#e8eef4"}
    assert "alert" not in message.value


def test_a_grid_takes_its_own_keys_alone():
    grid = Grid({1: "one", 2: "two"}, columns=2)
    assert grid.value == 1
    with pytest.raises(traitlets.TraitError):
        grid.value = 3
    assert grid.value == 1


@pytest.mark.parametrize("entry", [[0, 0, 0, 1, 0, [{}]], [0, 9, 0, 1, 0, [0]], [0, 0, "x", 1, 0, [0]], [10**30, 0, 0, 1, 0, [0]], {}])
def test_events_that_are_none_are_refused(entry):
    row = {"triton": "3.6.0", "warps": 2, "stages": 2, "input": "full", "rows": [[7, "s_barrier"]], "events": [entry]}
    with pytest.raises(BadInput, match="make_race_events"):
        events.unpack(row)
