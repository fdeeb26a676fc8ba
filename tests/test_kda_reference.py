"""The float64 recurrence is the truth here: two independent checks of it, and of the budget that judges the rest."""

from dataclasses import replace

import pytest
import torch

from k3lab.errors import BadInput
from k3lab.kda import reference
from k3lab.testing import LENGTH_MIXES, error_budget, random_call


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("decay", ["mixed", "strong", "weak"])
@pytest.mark.parametrize("lengths", LENGTH_MIXES.values(), ids=LENGTH_MIXES)
def test_chunked_twin_is_the_recurrence(lengths, decay, lower_bound):
    call = random_call(lengths, head_dim=64, decay=decay, lower_bound=lower_bound, seed=len(lengths))
    a, b = reference.recurrent_kda(call), reference.chunk_kda(call)
    for name in a:
        assert (a[name] - b[name]).norm() <= 1e-12 * a[name].norm(), name


@pytest.mark.parametrize("chunk", [16, 32])
def test_chunks_of_another_size_give_the_same_result(chunk):
    call = random_call((1, 63, 65), head_dim=64, seed=chunk)
    a, b = reference.recurrent_kda(call), reference.chunk_kda(call, chunk=chunk)
    for name in a:
        assert (a[name] - b[name]).norm() <= 1e-12 * a[name].norm(), name
    # in float32 exponents reach lower_bound * chunk / 2: at 64 they overflow
    assert torch.isfinite(reference.chunk_kda(random_call((130,), decay="strong", seed=chunk), torch.float32, chunk=chunk)["o"]).all()


def test_recurrence_is_the_published_formula():
    """One token by hand: S = (I - beta k k^T) Diag(exp g) S0 + beta k v^T in the [K, V] layout of the paper."""
    call = random_call((1,), heads=1, head_dim=64)
    call = replace(call, has_initial_state=torch.ones(1, dtype=torch.bool))
    out = reference.recurrent_kda(call)
    k = reference.l2norm(call.k[0, 0].double())
    q = reference.l2norm(call.q[0, 0].double()) * 64**-0.5
    g = -5.0 * torch.sigmoid(call.A_log.double().exp() * (call.raw_g[0, 0].double() + call.dt_bias[0].double()))
    beta = torch.sigmoid(call.raw_beta[0, 0].double())
    S0 = call.initial_state[0, 0].double().T
    S = (torch.eye(64).double() - beta * torch.outer(k, k)) @ torch.diag(g.exp()) @ S0 + beta * torch.outer(k, call.v[0, 0].double())
    assert torch.allclose(out["final_state"][0, 0].T, S, rtol=0, atol=1e-14)
    assert torch.allclose(out["o"][0, 0], S.T @ q, rtol=0, atol=1e-14)


def test_state_layouts_agree():
    call = random_call((1, 65), head_dim=64)
    other = replace(call, initial_state=call.initial_state.transpose(-1, -2), state_layout="kv")
    assert torch.equal(reference.recurrent_kda(call)["final_state"], reference.recurrent_kda(other)["final_state"])


def test_stale_slot_does_not_leak():
    """A sequence without initial state starts from zeros even if its slot holds NaN."""
    call = random_call((1, 5), head_dim=64)
    poisoned = call.initial_state.clone()
    poisoned[~call.has_initial_state] = float("nan")
    assert torch.isfinite(reference.recurrent_kda(replace(call, initial_state=poisoned))["o"]).all()


def test_token_states_end_in_the_final_state():
    out = reference.recurrent_kda(random_call((3, 2), head_dim=64), token_states=True)
    assert torch.equal(out["states"][2], out["final_state"][0])
    assert torch.equal(out["states"][4], out["final_state"][1])


def test_budget_rejects_a_systematic_error():
    """A small bias under the largest single error must still fail, by the root mean square."""
    gen = torch.Generator().manual_seed(0)
    truth = torch.randn(4096, generator=gen, dtype=torch.float64)
    low = truth.clone()
    low[0] += 0.1
    assert error_budget("same", truth, truth, low, torch.float32).ok
    assert not error_budget("biased", truth + 0.01, truth, low, torch.float32).ok
    assert not error_budget("nan", truth * float("nan"), truth, low, torch.float32).ok


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.zeros(5, 2)}, "q"),
        ({"v": torch.zeros(6, 2, 7, 1)}, "v"),
        ({"k": torch.zeros(6, 2, 32)}, "k"),
        ({"dt_bias": torch.zeros(64)}, "dt_bias"),
        ({"cu_seqlens": torch.tensor([0, 1, 5])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 6, 6])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0.0, 1.0, 6.0])}, "cu_seqlens"),
        ({"initial_state": torch.zeros(3, 2, 64, 64)}, "initial_state"),
        ({"state_layout": "hv"}, "state_layout"),
        ({"num_decodes": 3}, "num_decodes"),
        ({"k": torch.zeros(6, 2, 64, dtype=torch.long)}, "k"),
        ({"v": torch.zeros(6, 2, 64, dtype=torch.float16)}, "q, k, v"),
    ],
)
def test_bad_calls_are_named(change, named):
    call = replace(random_call((1, 5), head_dim=64), **change)
    with pytest.raises(BadInput, match=rf"^{named}:"):
        reference.recurrent_kda(call)
