"""The layer step by every route against float64: outputs, states, stitching, and what each route leaves exposed."""

from dataclasses import replace

import pytest
import torch

from k3lab import nonfinite
from k3lab.errors import BadInput
from k3lab.kda import reference
from k3lab.kda.layer import kda_layer_step, plan
from k3lab.testing import LENGTH_MIXES, assert_within_budget, low_precision_reference, random_call

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's under the interpreter, of inf and NaN that a select drops
BATCH = (1, 1, 1, 63, 64, 65, 1)  # three decodes, then prefills, one of them a single token


def finite_sequences(result) -> list[bool]:
    return torch.isfinite(result.final_state).flatten(1).all(1).tolist()


def interleaved():
    """Speculative rows (3 tokens each) between plain decodes, a ragged prefill and a full chunk."""
    call = random_call((1, 3, 1, 3, 70, 1, 64), head_dim=64)
    return replace(call, num_decodes=0, spec_mask=torch.tensor([0, 1, 0, 1, 0, 0, 0]).bool())


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", ["chunk_all", "split", "gather_split"])
@pytest.mark.parametrize("lengths", [*LENGTH_MIXES.values(), BATCH], ids=[*LENGTH_MIXES, "decode first"])
def test_every_route_is_within_the_float64_budget(lengths, route, dtype, layout):
    call = random_call(lengths, dtype=dtype, state_layout=layout, head_dim=64)
    truth, low, got = reference.recurrent_kda(call), low_precision_reference(call, dtype), kda_layer_step(call, route)
    assert_within_budget("o", got.o, truth["o"], low["o"], dtype)
    assert_within_budget("final_state", got.final_state, truth["final_state"], low["final_state"], dtype)


@pytest.mark.parametrize("padding", ["undefined", "zero", "nan"])
@pytest.mark.parametrize("route", ["chunk_all", "split", "gather_split"])
@pytest.mark.parametrize("lengths", [*LENGTH_MIXES.values(), BATCH], ids=[*LENGTH_MIXES, "decode first"])
def test_what_padding_leaves_finite_is_right(lengths, route, padding):
    """A sequence is lost whole tiles at a time; every row and state that stays finite is within the float64 budget."""
    call = random_call(lengths, head_dim=64)
    truth, low, got = (
        reference.recurrent_kda(call),
        low_precision_reference(call, torch.float32),
        kda_layer_step(call, route, padding=padding),
    )
    chunked = {n for launch in got.launches if launch.kernel == "chunk" for n in launch.sequences}
    for n, (first, length) in enumerate(zip(call.cu_seqlens.tolist(), lengths, strict=False)):
        ragged = padding != "zero" and n in chunked and length % 64 != 0
        kept = slice(first, first + (length // 64 * 64 if ragged else length))
        assert torch.isfinite(got.o[kept]).all()
        assert not torch.isfinite(got.o[kept.stop : first + length]).any()
        if kept.stop > kept.start:
            assert_within_budget(f"o of sequence {n}", got.o[kept], truth["o"][kept], low["o"][kept], torch.float32)
        if not ragged:
            state = (x["final_state"][n] for x in (truth, low))
            assert_within_budget(f"state of sequence {n}", got.final_state[n], *state, torch.float32)


@pytest.mark.parametrize("route", ["chunk_all", "split", "gather_split"])
def test_triton_takes_every_route(route, device):
    """Within the float64 budget, and NaN in masked rows first at the place where the torch stages have it."""
    call = replace(random_call((1, 1, 17, 65), heads=1, head_dim=64), layer=2).to(device)
    truth, low, got = reference.recurrent_kda(call), low_precision_reference(call, torch.float32), kda_layer_step(call, route, "triton")
    assert_within_budget("o", got.o, truth["o"], low["o"], torch.float32)
    assert_within_budget("final_state", got.final_state, truth["final_state"], low["final_state"], torch.float32)
    ours, twin = (nonfinite.trace(call, kda_layer_step(call, route, impl, "nan")) for impl in ("triton", "torch"))
    assert ours.first == twin.first
    assert ours.nonfinite_sequences == twin.nonfinite_sequences == ([0, 1, 2, 3] if route == "chunk_all" else [2, 3])
    assert ours.stages.equals(twin.stages)


def test_split_saves_decodes_but_not_ragged_prefills_and_zero_padding_closes_both():
    call = random_call(BATCH, head_dim=64)
    everything = [True] * 7
    full_chunk_only = [False, False, False, False, True, False, False]
    decodes_and_full_chunk = [True, True, True, False, True, False, False]
    assert finite_sequences(kda_layer_step(call, "chunk_all", padding="nan")) == full_chunk_only
    assert finite_sequences(kda_layer_step(call, "split", padding="nan")) == decodes_and_full_chunk
    for route in ("chunk_all", "split"):
        assert finite_sequences(kda_layer_step(call, route, padding="zero")) == everything


def test_interleaved_batch_needs_the_gather_route():
    call = interleaved()
    with pytest.raises(BadInput, match="gather_split"):
        kda_layer_step(call, "split")
    assert finite_sequences(kda_layer_step(call, "chunk_all", padding="nan")) == [False, True, False, True, False, False, True]
    assert finite_sequences(kda_layer_step(call, "gather_split", padding="nan")) == [True, True, True, True, False, True, True]


@pytest.mark.parametrize("route", ["chunk_all", "gather_split"])
@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
def test_speculative_rows_return_the_state_after_each_token(route, impl, device):
    """What rollback to the last accepted token reads; rows of plain sequences stay NaN so that nobody reads them."""
    call = interleaved().to(device)
    truth = reference.recurrent_kda(call, token_states=True)
    got = kda_layer_step(call, route, impl)
    spec = call.spec_mask.repeat_interleave(call.cu_seqlens.diff())
    assert torch.isfinite(got.states[spec]).all()
    assert torch.isnan(got.states[~spec]).all()
    low = low_precision_reference(call, torch.float32)
    assert_within_budget("o", got.o, truth["o"], low["o"], torch.float32)
    error = (got.states[spec].double() - truth["states"][spec]).abs().max()
    assert error <= 2 * (low["final_state"].double() - truth["final_state"]).abs().max()


def test_null_slots_are_skipped_and_give_zeros():
    call = replace(random_call((1, 1, 65), head_dim=64), state_indices=torch.tensor([4, 0, 7]))
    got = kda_layer_step(call, "split", padding="zero")
    assert not got.o[1].any()
    assert torch.equal(got.final_state[1], call.state_vk()[1])
    prefill, rows = call.select([2])
    truth, low = reference.recurrent_kda(prefill), low_precision_reference(prefill, torch.float32)
    assert_within_budget("o", got.o[rows], truth["o"], low["o"], torch.float32)


def test_all_null_batch_gives_zeros():
    call = replace(random_call((1, 2), head_dim=64), state_indices=torch.tensor([0, -1]))
    assert not kda_layer_step(call, "split").o.any()


def test_output_norm_and_gate():
    call = random_call((1, 5), head_dim=64, dtype=torch.float64)
    got = kda_layer_step(call, "split", "reference")
    o, w = reference.recurrent_kda(call)["o"], call.norm_weight.double()
    want = o / (o.square().mean(-1, keepdim=True) + call.eps).sqrt() * w * torch.sigmoid(call.output_gate)
    assert torch.allclose(got.y, want, rtol=1e-12, atol=1e-14)
    assert kda_layer_step(replace(call, output_gate=None), "split").y is None


def test_plan_names_the_launches():
    call = random_call(BATCH, head_dim=64)
    assert plan(call, "chunk_all") == [("chunk", [0, 1, 2, 3, 4, 5, 6])]
    assert plan(call, "split") == [("recurrent", [0, 1, 2]), ("chunk", [3, 4, 5, 6])]
    assert plan(call, "gather_split") == [("recurrent", [0, 1, 2, 6]), ("chunk", [3, 4, 5])]


def test_undefined_workgroups_follow_their_sequence_through_a_route():
    call = random_call(BATCH, head_dim=64)
    undefined = torch.zeros(7, 2, dtype=torch.bool)
    undefined[0, 0] = undefined[5, 1] = True
    assert finite_sequences(kda_layer_step(call, "chunk_all", padding=undefined)) == [False, True, True, True, True, False, True]
    assert finite_sequences(kda_layer_step(call, "split", padding=undefined)) == [True, True, True, True, True, False, True]


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"route": "splits"}, "route"),
        ({"impl": "cuda"}, "impl"),
        ({"padding": "none"}, "padding"),
        ({"padding": None}, "padding"),
        ({"padding": {"invers": "nan"}}, "padding: 'invers' is not a stage"),
        ({"padding": torch.zeros(1, 2, dtype=torch.bool)}, "padding: shape"),
        ({"impl": "reference", "padding": "nan"}, "padding"),
        ({"impl": "triton", "padding": torch.zeros(2, 2, dtype=torch.bool)}, "padding"),
    ],
)
def test_unknown_names_are_refused(kwargs, named):
    with pytest.raises(BadInput, match=named):
        kda_layer_step(random_call((1, 2), head_dim=64), **kwargs)


def test_padding_is_checked_also_where_no_launch_reads_it():
    """A batch of decodes alone never meets the chunk kernel; a misspelt padding is an error all the same."""
    with pytest.raises(BadInput, match="padding: 'zeroes'"):
        kda_layer_step(random_call((1, 1), head_dim=8), "split", padding="zeroes")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cu_seqlens": [0, 1, 3]}, "cu_seqlens: is a list, expected a tensor"),
        ({"cu_seqlens": torch.tensor([0, 1, 3], dtype=torch.complex64)}, "cu_seqlens: .*complex64"),
        ({"k": None}, "k: is a NoneType"),
        ({"q": torch.empty(3, 2, 8, device="meta")}, "q: is on the meta device"),
        ({"raw_g": torch.zeros(3, 2, 8).to(torch.float8_e4m3fn)}, "raw_g: dtype torch.float8_e4m3fn"),
        ({"state_indices": torch.tensor([1.0, float("nan")])}, "state_indices: .*whole numbers"),
        ({"spec_mask": torch.tensor([0.0, 1.0])}, "spec_mask: "),
        ({"lower_bound": 5.0}, "lower_bound: 5.0 is not a negative number"),
        ({"lower_bound": float("nan")}, "lower_bound: nan"),
        ({"lower_bound": "-5"}, "lower_bound: '-5'"),
        ({"num_decodes": 1.0}, "num_decodes: 1.0"),
    ],
)
def test_a_malformed_call_is_refused_by_name(change, reason):
    with pytest.raises(BadInput, match=f"^{reason}"):
        kda_layer_step(replace(random_call((1, 2), heads=2, head_dim=8), **change))


def test_an_empty_axis_is_refused():
    call = random_call((1, 2), heads=2, head_dim=8)
    empty = {n: getattr(call, n)[..., :0] for n in ("q", "k", "raw_g", "dt_bias", "initial_state")}
    with pytest.raises(BadInput, match="H, K and V must be at least 1"):
        kda_layer_step(replace(call, **empty))


@pytest.mark.parametrize("route", ["chunk_all", "split", "gather_split"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (16, 48), (5, 3), (1, 1)])
def test_any_head_width_with_k_apart_from_v(K, V, layout, route):
    wide, narrow = (random_call((1, 1, 70), heads=1, head_dim=d) for d in (K, V))
    state = wide.k.new_tensor(0.3).expand(3, 1, *((V, K) if layout == "vk" else (K, V)))
    call = replace(
        wide, v=narrow.v, output_gate=narrow.output_gate, norm_weight=narrow.norm_weight, initial_state=state, state_layout=layout
    )
    truth, low = reference.recurrent_kda(call), low_precision_reference(call, torch.float32)
    result = kda_layer_step(call, route)
    for name in ("o", "final_state"):
        assert_within_budget(name, getattr(result, name), truth[name], low[name], torch.float32)


@pytest.mark.parametrize("route", ["chunk_all", "split", "gather_split"])
@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
@pytest.mark.parametrize("slots", [[1, 2, 3], [0, 2, 0], [0, 0, 0]])
def test_a_step_leaves_the_call_as_it_was(slots, impl, route, device):
    """Without has_initial_state the starting state is the call's own tensor: a replay must not change what the next one reads."""
    call = random_call((1, 1, 5), heads=1, head_dim=64, device=device)
    call = replace(call, has_initial_state=None, state_indices=torch.tensor(slots, device=device))
    before = {f: x.clone() for f, x in vars(call).items() if isinstance(x, torch.Tensor)}
    result = kda_layer_step(call, route, impl)
    result.final_state.fill_(float("nan"))
    result.o.fill_(float("nan"))
    for name, x in before.items():
        assert torch.equal(getattr(call, name), x), name


def test_split_refuses_a_batch_that_is_not_decode_first():
    with pytest.raises(BadInput, match="decode-first"):
        kda_layer_step(replace(random_call((2, 1), head_dim=64), num_decodes=1), "split")
