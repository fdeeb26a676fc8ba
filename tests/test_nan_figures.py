"""Figures of notebook 01: the numbers in their frames, and that each can be drawn and saved."""

import json
from dataclasses import replace

import pytest
import torch

from k3lab import figures, nan_figures, nonfinite
from k3lab.errors import BadInput
from k3lab.testing import random_call
from k3lab.tiny import accuracy


@pytest.fixture
def call():
    return replace(random_call((1, 1, 63, 64, 70), head_dim=64), layer=3)


def test_tiles_count_rows(call, tmp_path):
    fig, frame = nan_figures.tiles_figure(call)
    assert frame["rows"].tolist() == [1, 1, 63, 64, 64, 6]
    assert frame["kind"].tolist() == ["decode"] * 2 + ["prefill"] * 4
    assert frame["chunk"].tolist() == [0, 0, 0, 0, 0, 1]
    assert len(figures.export(fig, frame, "tiles", tmp_path)) == 4
    assert figures.problems(fig) == []


def test_tiles_are_of_the_sequences_that_chunk_all_sends_there():
    """Speculative rows take the recurrent kernel, and a plain token between them is a decode."""
    call = replace(random_call((3, 1, 70), head_dim=64), num_decodes=0, spec_mask=torch.tensor([True, False, False]))
    _, frame = nan_figures.tiles_figure(call)
    assert frame["sequence"].tolist() == [1, 2, 2]
    assert frame["kind"].tolist() == ["decode", "prefill", "prefill"]


def test_routes_name_the_first_stage_of_every_sequence(call, tmp_path):
    frame = nan_figures.routes_frame(call, ("chunk_all", "split"), ("zero", "nan"))
    first = frame.set_index(["route", "padding", "sequence"])["first_stage"].unstack().to_dict("index")
    assert list(first["chunk_all", "nan"].values()) == ["recompute_w_u", "recompute_w_u", "inverse", "", "inverse"]
    assert list(first["split", "nan"].values()) == ["", "", "inverse", "", "inverse"]
    assert set(first["split", "zero"].values()) == {""}
    fig = nan_figures.routes_figure(frame, "test")
    assert len(figures.export(fig, frame, "routes", tmp_path)) == 4
    assert figures.problems(fig) == []


def test_many_sequences_are_drawn_without_labels():
    frame = nan_figures.routes_frame(random_call((1,) * 60, heads=1, head_dim=64), ("chunk_all",), ("nan",))
    assert "loses 60 of 60" in nan_figures.routes_figure(frame, "test").texts[0].get_text()


def test_provenance_follows_one_sequence_through_the_stages(call):
    frame = nan_figures.provenance_frame(call, "chunk_all", "nan", 4)
    value = frame.set_index(["tensor", "row"])["value"]
    assert (value["k"][:6] == "finite").all()
    assert (value["k"][6:] == "masked").all()
    assert value["A"].tolist()[:3] == ["finite", "finite", "not finite"]
    assert (value["final_state"] == "not finite").all()
    assert "NaN enters at inverse" in nan_figures.provenance_figure(frame, 4, 70, "test").texts[0].get_text()
    clean = nan_figures.provenance_frame(call, "chunk_all", "zero", 4)
    assert "every stage is finite" in nan_figures.provenance_figure(clean, 4, 70, "test").texts[0].get_text()


def test_a_decode_is_not_in_the_chunk_kernel_by_split(call):
    with pytest.raises(BadInput, match="sequence 0"):
        nan_figures.provenance_frame(call, "split", "nan", 0)


def test_chunked_sequences_are_named_shortest_first(call):
    assert nan_figures.chunked(call, "chunk_all") == [0, 1, 2, 3, 4]
    assert nan_figures.chunked(call, "split") == [2, 3, 4]
    assert nan_figures.chunked(random_call((1, 1), head_dim=64), "split") == []


def test_length_map_is_drawn_from_its_frame():
    frame = nonfinite.length_map([1, 3, 64], ("zero", "nan"))
    assert "2 of 3 lengths, all but 64; zeros reach 0" in nan_figures.length_map_figure(frame).texts[0].get_text().replace("\n", " ")


def record(tmp_path, rows):
    path = tmp_path / "accuracy.json"
    path.write_text(json.dumps({"rows": rows}))
    return path


def row(route, p, correct, expected, seed=0):
    return {
        "route": route, "p": p, "seed": seed, "correct": correct, "total": 100, "expected_correct": expected,
        "exposures_per_request": {"min": 1, "median": 18, "max": 30},
    }  # fmt: skip


def test_accuracy_sums_counts_over_seeds_and_finds_the_p_of_a_ratio(tmp_path):
    rows = [row("split", None, 100, 100), row("split", 0.0, 100, 100), row("split", 0.0, 98, 98, 1)]
    rows += [row("split", p, round(100 * (1 - p) ** 18), 100 * (1 - p) ** 18) for p in (1e-3, 1e-2, 1e-1)]
    frame = accuracy.load(record(tmp_path, rows))
    clean = frame[(frame["p"] == 0) & (frame["padding"] != accuracy.NEVER)].iloc[0]
    assert (clean["correct"], clean["total"], clean["rate"]) == (198, 200, 0.99)
    assert clean["low"] < 0.99 < clean["high"]
    at = frame[frame["p"] == 1e-2].iloc[0]
    assert accuracy.p_of_ratio(frame, "split", at["expected"] / clean["expected"]) == pytest.approx(1e-2)
    curve = frame.assign(series=frame["route"] + ", " + frame["padding"])
    fig = nan_figures.accuracy_figure(curve, "test", {"published": 0.9}, 1e-2)
    assert "Half the accuracy is lost by split at p = 3.1e-02; zero padding keeps 100.0%" in fig.texts[0].get_text().replace("\n", " ")
    with pytest.raises(BadInput, match="ratio"):
        accuracy.p_of_ratio(frame, "split", 0.01)
    assert accuracy.disagreement(frame) > 0.5
    off = frame.assign(expected=frame["expected"].where(frame["p"] != 1e-1, 0.9))
    assert accuracy.disagreement(off) < 1e-6
    with pytest.raises(BadInput, match="chunk_all"):
        accuracy.p_of_ratio(frame, "chunk_all", 0.9)


@pytest.mark.parametrize("text", ["", "{", '{"rows": []}', "[" * 100_000, '{"rows": [{}]}', "[]", '{"rows": 3}'])
def test_a_foreign_accuracy_file_is_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"a\.json"):
        accuracy.load(path)


def test_undefined_workgroups_can_be_drawn_too(call):
    undefined = torch.zeros(5, 2, dtype=torch.bool)
    undefined[2, 1] = True
    frame = nan_figures.provenance_frame(call, "chunk_all", undefined, 2)
    assert (frame["value"] == "not finite").any()
