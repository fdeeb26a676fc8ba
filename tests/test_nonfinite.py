"""Provenance of the first NaN, observed against exposed, and triage from token ids alone."""

from dataclasses import replace

import pytest
import torch

from k3lab import nonfinite
from k3lab.capture.format import Capture
from k3lab.errors import BadInput
from k3lab.kda.layer import kda_layer_step
from k3lab.testing import random_call

BATCH = (1, 1, 63, 64, 130)


def report(call, route="chunk_all", padding="nan", impl="torch"):
    return nonfinite.trace(call, kda_layer_step(call, route, impl, padding))


@pytest.mark.parametrize(
    ("n", "stage", "tensor", "row"),
    [(1, "recompute_w_u", "w", 0), (16, "recompute_w_u", "w", 0), (3, "inverse", "A", 2), (63, "inverse", "A", 48)],
)
def test_first_names_the_stage_that_padding_reaches(n, stage, tensor, row):
    """Row 2 is the first that forward substitution touches; at 63 the ragged 16-row block starts at row 48."""
    r = report(random_call((n,), head_dim=64))
    assert (r.first.stage, r.first.tensor, r.first.sequence, r.first.length, r.first.row) == (stage, tensor, 0, n, row)
    assert r.fed_by["valid_rows"] == n
    assert r.fed_by["masked_rows"] == (n, 63)
    assert tensor not in r.fed_by["tensors"]


def test_spread_stays_in_its_sequence_and_the_state_is_lost():
    r = report(replace(random_call(BATCH, head_dim=64), layer=7))
    assert r.first.layer == 7
    assert r.nonfinite_sequences == r.state_lost == [0, 1, 2, 4]
    assert r.neighbours_finite == [3]
    first = r.stages.drop_duplicates("sequence").set_index("sequence")
    assert first.loc[0, "stage"] == "recompute_w_u"
    assert first.loc[2, "stage"] == "inverse"
    assert first.loc[4, "first_row"] == 128, "the two full chunks before the ragged one are clean"


def test_full_chunks_are_clean_by_any_padding():
    assert report(random_call((64, 128), head_dim=64)).finite


def test_an_input_nan_is_the_first_cause():
    call = random_call(BATCH, head_dim=64)
    v = call.v.clone()
    v[5, 1, 9] = float("inf")
    r = report(replace(call, v=v), padding="zero")
    assert (r.first.stage, r.first.tensor, r.first.sequence, r.first.row, r.first.head, r.first.channel) == ("input", "v", 2, 3, 1, 9)
    assert r.first.value == "inf"
    assert r.fed_by is None
    assert r.nonfinite_sequences == [2]


def test_a_lost_state_never_recovers():
    """Decode on by the fixed route from the state that the fault left behind: NaN for ever."""
    call = random_call((1, 1), heads=1, head_dim=64)
    broken = kda_layer_step(call, "chunk_all", padding=torch.tensor([[True], [False]]))
    after = random_call((1, 1), heads=1, head_dim=64, seed=1)
    after = replace(after, initial_state=broken.final_state, has_initial_state=torch.ones(2, dtype=torch.bool))
    r = report(after, "split", "zero")
    assert (r.first.stage, r.first.tensor) == ("input", "initial_state")
    assert r.nonfinite_sequences == [0]


def test_length_map_depends_on_the_length_modulo_64_alone():
    m = nonfinite.length_map([1, 3, 16, 64, 65, 67, 80, 128])
    by = m.pivot(index="length", columns="padding", values="first_stage")
    assert (by["zero"] == "").all()
    assert by["nan"].tolist() == ["recompute_w_u", "inverse", "recompute_w_u", ""] * 2
    assert by["undefined"].equals(by["nan"]), "torch has no undefined value: it is NaN there"
    assert (m["state_lost"] == (m["first_stage"] != "")).all()


def recorded(call, route, padding, **change):
    r = kda_layer_step(call, route, padding=padding)
    tensors = {"o": r.o, "final_state": r.final_state} | change
    return Capture.from_call(call, o=tensors["o"], final_state=tensors["final_state"])


def test_a_length_map_refuses_a_sequence_of_no_tokens():
    with pytest.raises(BadInput, match="lengths: -1"):
        nonfinite.length_map([1, -1])


def test_observed_is_apart_from_exposed():
    call = random_call(BATCH, head_dim=64)
    healthy = nonfinite.investigate(recorded(call, "split", "zero"))
    assert healthy["finite"]
    assert not healthy["finding"]
    assert healthy["observed"]["away_sequences"] == []
    assert healthy["exposed"]["chunk_all"]["sequences"] == [0, 1, 2, 4]
    assert healthy["exposed"]["split"]["sequences"] == [2, 4]
    assert healthy["exposed"]["chunk_all"]["first"]["stage"] == "inverse"

    sick = nonfinite.investigate(recorded(call, "chunk_all", "nan"))
    assert sick["finding"]
    assert sick["finite"] is False
    assert sick["nonfinite_sequences"] == [0, 1, 2, 4]
    assert sick["first"]["stage"] == "recorded"
    assert sick["relative_error"] < 1e-5, "the rows that are finite are right"


def test_observed_finds_finite_garbage():
    """Values of 1e38 are finite; only the comparison with float64 can see them."""
    call = random_call(BATCH, head_dim=64)
    o = kda_layer_step(call, "split").o.clone()
    o[1, 0, 5] = 1e38
    seen = nonfinite.investigate(recorded(call, "split", "zero", o=o))
    assert seen["finite"]
    assert seen["finding"]
    assert seen["observed"]["away_sequences"] == [1]


def test_nothing_recorded_is_said():
    call = random_call((1, 2), head_dim=64)
    seen = nonfinite.investigate(Capture.from_call(call))
    assert seen["finite"] is None
    assert seen["observed"]["recorded"] == []
    assert not seen["finding"]


def test_recorded_kv_state_is_read_in_its_layout():
    call = random_call((1, 70), head_dim=64, state_layout="kv")
    r = kda_layer_step(call, "split")
    c = Capture.from_call(call, o=r.o, final_state=r.final_state.transpose(-1, -2).contiguous())
    assert nonfinite.observed(c)["away_sequences"] == []
    wrong = Capture.from_call(call, o=r.o, final_state=r.final_state)
    assert nonfinite.observed(wrong)["away_sequences"] == [0, 1]


def test_null_slot_is_judged_as_zero():
    call = replace(random_call((1, 1, 5), head_dim=64), state_indices=torch.tensor([3, 0, 1]))
    r = kda_layer_step(call, "split")
    seen = nonfinite.observed(Capture.from_call(call, o=r.o, final_state=r.final_state))
    assert seen["away_sequences"] == []


def test_replay_reports_the_route_that_was_asked_for():
    c = Capture.from_call(random_call(BATCH, head_dim=64))
    assert nonfinite.replay(c, "split", "nan")["nonfinite_sequences"] == [2, 4]
    assert nonfinite.replay(c, "chunk_all", "zero")["finite"]
    exact = nonfinite.replay(c, "split", "zero", "reference")
    assert exact["relative_error"] < 1e-12


@pytest.mark.parametrize(
    ("ids", "suspicious", "engine", "start"),
    [
        ([5, 7, 9] + [0] * 20, True, "vLLM", 3),
        ([5, 7] + [163839] * 8, True, "SGLang", 2),
        ([5, 7] + [220] * 50, False, None, 2),
        ([5, 7, 0, 0], False, "vLLM", 2),
        ([0] * 9, True, "vLLM", 0),
    ],
)
def test_triage_of_token_streams(ids, suspicious, engine, start):
    t = nonfinite.triage_tokens(ids)
    assert (t["suspicious"], t["engine"], t["start"]) == (suspicious, engine, start)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("o", lambda x: x[:-1]), ("o", lambda x: x.flatten()[0]), ("o", lambda x: x.to(torch.float8_e4m3fn)), ("o", lambda x: x.int()),
        ("final_state", lambda x: x[..., :-1]), ("final_state", lambda x: x[0]), ("final_state", lambda x: torch.cat([x, x])),
        ("final_state", lambda x: x.flatten()[0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_recorded_results_of_another_call_are_refused(name, change, layout):
    """A result that does not fit the recorded inputs is bad input, named with its shape."""
    call = random_call((1, 5), heads=2, head_dim=8, state_layout=layout)
    result = kda_layer_step(call, "chunk_all")
    capture = Capture.from_call(call, result.o, result.final_state)
    capture.tensors[name] = change(capture.tensors[name])
    with pytest.raises(BadInput, match=rf"capture: {name}: shape .* does not fit the call"):
        nonfinite.observed(capture)


def test_counts_per_sequence_name_values_rows_and_the_first_row():
    call = random_call((3, 4, 2), heads=2, head_dim=8)
    v = call.v.clone()
    v[1, 0, :3] = v[2, 1, 5] = v[8, 0, 0] = float("nan")
    found = report(replace(call, v=v), padding="zero").stages.query("tensor == 'v'")
    assert found[["sequence", "length", "values", "rows", "first_row"]].to_numpy().tolist() == [[0, 3, 4, 2, 1], [2, 2, 1, 1, 1]]


@pytest.mark.parametrize("ids", [[], [0.5, 1.0], [[1, 2]], "abc", None, [2**70], [True] * 9])
def test_triage_refuses_what_is_not_a_token_stream(ids):
    with pytest.raises(BadInput, match="token_ids"):
        nonfinite.triage_tokens(ids)


def test_a_null_slot_does_not_widen_the_budget_of_the_others():
    """A null row is zero in the truth and in the low-precision reference; one wrong row beside it must still be seen."""
    call = replace(random_call((1, 1, 5), head_dim=64), state_indices=torch.tensor([3, 0, 1]))
    r = kda_layer_step(call, "split")
    o = r.o.clone()
    o[0] *= 1.2
    seen = nonfinite.observed(Capture.from_call(call, o=o, final_state=r.final_state))
    assert seen["away_sequences"] == [0]


@pytest.mark.parametrize(("name", "at", "head", "channel"), [("A_log", (1,), 1, 0), ("dt_bias", (1, 9), 1, 9), ("norm_weight", (7,), 0, 7)])
def test_a_parameter_that_is_not_finite_comes_first(name, at, head, channel):
    call = random_call(BATCH, head_dim=64)
    x = getattr(call, name).clone()
    x[at] = float("nan")
    r = report(replace(call, **{name: x}), "split", "zero")
    assert (r.first.stage, r.first.tensor, r.first.row, r.first.head, r.first.channel) == ("input", name, -1, head, channel)
    assert r.nonfinite_sequences == [0, 1, 2, 3, 4]


def test_the_first_input_in_batch_order_is_named_across_launches():
    call = random_call(BATCH, head_dim=64)
    v = call.v.clone()
    v[0] = v[2] = float("nan")
    r = report(replace(call, v=v), "split", "zero")
    assert (r.first.stage, r.first.sequence) == ("input", 0)


def test_the_output_gate_is_looked_at():
    call = random_call(BATCH, head_dim=64)
    gate = call.output_gate.clone()
    gate[1, 0, 3] = float("nan")
    r = report(replace(call, output_gate=gate), "split", "zero")
    assert (r.first.stage, r.first.tensor, r.first.sequence, r.first.channel) == ("input", "output_gate", 1, 3)
    assert r.nonfinite_sequences == [1]
    assert r.state_lost == []
    assert set(r.stages["stage"]) == {"input", "output_norm_gate"}
