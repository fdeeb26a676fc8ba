"""The six torch stages against float64, and the signature of masked rows stage by stage."""

from dataclasses import replace

import pytest
import torch

from k3lab.errors import BadInput
from k3lab.kda import reference, stages
from k3lab.testing import LENGTH_MIXES, assert_within_budget, low_precision_reference, random_call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("decay", ["mixed", "strong", "weak"])
@pytest.mark.parametrize("lengths", LENGTH_MIXES.values(), ids=LENGTH_MIXES)
def test_stages_are_within_the_float64_budget(lengths, decay, lower_bound, dtype):
    call = random_call(lengths, decay=decay, lower_bound=lower_bound, dtype=dtype, seed=sum(lengths))
    truth, low, got = reference.recurrent_kda(call), low_precision_reference(call, dtype), stages.chunk_kda(call)
    assert_within_budget("o", got["o"], truth["o"], low["o"], dtype)
    assert_within_budget("final_state", got["final_state"], truth["final_state"], low["final_state"], dtype)


def test_each_stage_is_its_equation():
    """Every stage recomputed in float64 from the definition, over one ragged sequence, from float64 inputs."""
    call = random_call((130,), head_dim=64, dtype=torch.float64)
    out = stages.chunk_kda(call)
    q, k, beta = reference.l2norm(call.q) * 64**-0.5, reference.l2norm(call.k), torch.sigmoid(call.raw_beta)
    g = reference.log_decay(call.raw_g, call.A_log.double(), call.dt_bias.double(), call.lower_bound)
    S = call.state_vk().double()[0].transpose(-1, -2)
    for c, rows in enumerate((slice(0, 64), slice(64, 128), slice(128, 130))):
        n = rows.stop - rows.start
        G = g[rows].cumsum(0)
        pair = (G[:, None] - G[None]).clamp(max=0.0).exp()
        Aqk = torch.einsum("ihk,jhk,ijhk->ihj", q[rows], k[rows], pair).transpose(0, 1).tril().transpose(0, 1)
        Akk = torch.einsum("ihk,jhk,ijhk->ihj", k[rows] * beta[rows][..., None], k[rows], pair).transpose(0, 1).tril(-1).transpose(0, 1)
        A = torch.linalg.inv(torch.eye(n).double() + Akk.transpose(0, 1)).transpose(0, 1)
        u = torch.einsum("ihj,jhv->ihv", A, call.v[rows] * beta[rows][..., None])
        w = torch.einsum("ihj,jhk->ihk", A, k[rows] * beta[rows][..., None] * G.exp())
        kg = k[rows] * (G[-1:] - G).exp()
        v_new = u - torch.einsum("ihk,hkv->ihv", w, S)
        o = torch.einsum("ihk,hkv->ihv", q[rows] * G.exp(), S) + torch.einsum("ihj,jhv->ihv", Aqk, v_new)
        want = {"g": G * stages.RCP_LN2, "Aqk": Aqk, "Akk": Akk, "A": A, "u": u, "w": w, "kg": kg, "v_new": v_new, "o": o}
        for name, x in want.items():
            got = out[name][rows]
            assert torch.allclose(got[..., : x.shape[-1]], x, rtol=1e-11, atol=1e-12), name
            assert not got[..., x.shape[-1] :].any(), f"{name}: columns beyond the chunk are not zero"
        assert torch.allclose(out["h"][c].transpose(-1, -2), S, rtol=1e-11, atol=1e-12)
        S = G[-1].exp()[..., None] * S + torch.einsum("jhk,jhv->hkv", kg, v_new)
    assert torch.allclose(out["final_state"][0].transpose(-1, -2), S, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65])
def test_nan_padding_reaches_exactly_the_known_stages(n):
    """One stage's masked rows at NaN, the others zero (facts of vLLM PR 50649's kernels: which stage is hit at which n)."""
    call = random_call((n,), heads=1, head_dim=64)
    tail = n % 64 or 64
    hit = {}
    for stage in stages.STAGES:
        out = stages.chunk_kda(call, padding={stage: "nan"})
        hit[stage] = {name for name in stages.STAGE_OUTPUTS[stage] if not torch.isfinite(out[name]).all()}
    ragged = tail < 64
    assert hit["gate_cumsum"] == hit["intra"] == set()
    assert hit["inverse"] == ({"A"} if ragged and tail not in (1, 2, 16, 32, 48) else set())
    assert hit["recompute_w_u"] == ({"w", "u"} if ragged else set())
    assert hit["state"] == ({"final_state"} if ragged else set())
    assert hit["output"] == ({"o"} if ragged else set())


def test_undefined_workgroups_hit_only_their_own_sequence_and_head():
    call = random_call((1, 1, 40, 64), head_dim=64)
    undefined = torch.zeros(4, 2, dtype=torch.bool)
    undefined[1, 0] = undefined[2, 1] = undefined[3, 0] = True
    out = stages.chunk_kda(call, padding=undefined)
    bad = ~torch.isfinite(out["final_state"]).flatten(2).all(-1)
    undefined[3, 0] = False  # a full chunk has no masked row
    assert torch.equal(bad, undefined)


def test_zero_padding_equals_no_padding_at_all():
    """A ragged batch gives each sequence what it gets alone."""
    call = random_call((1, 63, 65), head_dim=64)
    whole = stages.chunk_kda(call)
    for n in range(3):
        part, rows = call.select([n])
        truth, alone = reference.recurrent_kda(part), stages.chunk_kda(part)
        assert_within_budget("o", whole["o"][rows], truth["o"], alone["o"], torch.float32)


def test_a_wide_gate_bound_does_not_overflow():
    """A row block splits its exponents at its middle row: 8 rows at -20 would be exp2(231)."""
    call = random_call((1, 63, 65), head_dim=32, lower_bound=-20.0, decay="strong")
    truth, low = reference.recurrent_kda(call), low_precision_reference(call, torch.float32)
    got = stages.chunk_kda(call)
    for name in ("o", "final_state"):
        assert_within_budget(name, got[name], truth[name], low[name], torch.float32)


@pytest.mark.parametrize(
    "padding",
    ["zeros", {"output": "NaN"}, {"outputs": "nan"}, None, torch.zeros(2, 1, dtype=torch.bool), torch.zeros(3, 1), torch.tensor(True)],
)
def test_bad_padding_is_refused(padding):
    with pytest.raises(BadInput, match=r"^padding:"):
        stages.chunk_kda(random_call((1, 2), head_dim=64), padding=padding)


def test_chunk_index_counts_chunks():
    got = stages.chunk_index(torch.tensor([0, 1, 65, 194]))
    assert got.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [2, 2]]


def test_inputs_are_left_alone():
    call = random_call((1, 65), head_dim=64)
    before = replace(call, initial_state=call.initial_state.clone(), q=call.q.clone())
    stages.chunk_kda(call)
    assert torch.equal(before.initial_state, call.initial_state)
    assert torch.equal(before.q, call.q)
