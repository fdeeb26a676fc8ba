"""The recurrent decode kernel: against float64, in place by slot, the null slot, speculative rows.

Without a GPU it runs under the interpreter in fp32 and fp16; with one, natively.
"""

from dataclasses import replace

import pytest
import torch

from k3lab.errors import BadInput, Unsupported
from k3lab.kda import reference
from k3lab.testing import assert_within_budget, random_call

TOKENS = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")


def check_against_float64(call, got, dtype):
    truth = reference.recurrent_kda(call, token_states="states" in got)
    low = reference.recurrent_kda(call, torch.float32, token_states="states" in got)
    assert got.keys() == truth.keys()
    for name in truth:
        assert_within_budget(name, got[name], truth[name], low[name], dtype if name == "o" else torch.float32)


def pool_of(slots, heads, head_dim, device, seed=0):
    """A state pool of random finite states: what a slot held before shows if it is touched."""
    gen = torch.Generator().manual_seed(seed)
    return (0.3 * torch.randn(slots, heads, head_dim, head_dim, generator=gen)).to(device)


def decode(call, pool, indices, accepted=None, **kw):
    from k3lab.kda.triton_recurrent import fused_recurrent_kda

    device = call.q.device
    accepted = None if accepted is None else torch.tensor(accepted, device=device)
    return fused_recurrent_kda(
        *(getattr(call, n) for n in TOKENS), pool, torch.tensor(indices, device=device), call.cu_seqlens, call.lower_bound,
        call.state_layout, accepted, **kw,
    )  # fmt: skip


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("decay", ["mixed", "strong", "weak"])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_recurrence_is_within_budget(lower_bound, decay, state_layout, device):
    """o, the final state and the state after every token, decodes and short runs."""
    from k3lab.kda.triton_recurrent import recurrent_kda

    call = random_call((1, 1, 3, 9), heads=2, head_dim=64, decay=decay, lower_bound=lower_bound, state_layout=state_layout).to(device)
    check_against_float64(call, recurrent_kda(call), torch.float32)
    check_against_float64(call, recurrent_kda(call, token_states=True), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dim_128(dtype, device):
    from k3lab.kda.triton_recurrent import recurrent_kda

    call = random_call((1, 1, 4), heads=1, head_dim=128, dtype=dtype, seed=3).to(device)
    check_against_float64(call, recurrent_kda(call, config={"BV": 64}), dtype)


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_only_the_named_slots_change(state_layout, device):
    """Decodes write their own slot in place; a null slot (0 or -1) gives zero rows; every other slot keeps its bits."""
    call = random_call((1, 1, 2, 1), heads=2, head_dim=64, state_layout=state_layout, seed=8).to(device)
    pool = pool_of(7, 2, 64, device)
    pool[0] = float("nan")
    before = pool.clone()
    o = decode(call, pool, [5, 0, 2, -1])
    assert not o[1].any()
    assert not o[4].any()
    for slot in (0, 1, 3, 4, 6):
        assert torch.equal(pool[slot].nan_to_num(7.0), before[slot].nan_to_num(7.0)), slot
    live = replace(call, initial_state=before[[5, 1, 2, 1]], has_initial_state=None)
    truth, low = reference.recurrent_kda(live), reference.recurrent_kda(live, torch.float32)
    rows, seqs = [0, 2, 3], [0, 2]
    assert_within_budget("o", o[rows], truth["o"][rows], low["o"][rows], torch.float32)
    after = pool[[5, 2]] if state_layout == "vk" else pool[[5, 2]].transpose(-1, -2)
    assert_within_budget("state", after, truth["final_state"][seqs], low["final_state"][seqs], torch.float32)


def test_speculative_rows_write_a_state_each(device):
    """Token t goes to state_indices[n, t], the start comes from the last accepted token's slot, and a null target is skipped."""
    call = random_call((3, 1, 2), heads=1, head_dim=64, seed=9).to(device)
    pool = pool_of(12, 1, 64, device)
    before = pool.clone()
    indices, accepted = [[1, 2, 3], [4, 5, 6], [7, 0, 9]], [2, 3, 1]
    o = decode(call, pool, indices, accepted)
    live = replace(call, initial_state=before[[2, 6, 7]], has_initial_state=None)
    truth, low = (reference.recurrent_kda(live, d, token_states=True) for d in (torch.float64, torch.float32))
    assert_within_budget("o", o, truth["o"], low["o"], torch.float32)
    tokens, slots = [0, 1, 2, 3, 4], [1, 2, 3, 4, 7]  # token 5 had the null slot
    assert_within_budget("states", pool[slots], truth["states"][tokens], low["states"][tokens], torch.float32)
    for slot in (0, 5, 6, 8, 9, 10, 11):
        assert torch.equal(pool[slot], before[slot]), slot


def test_a_null_start_skips_a_speculative_sequence(device):
    call = random_call((2, 2), heads=1, head_dim=64).to(device)
    pool = pool_of(6, 1, 64, device)
    before = pool.clone()
    o = decode(call, pool, [[1, 0], [3, 4]], [2, 1])
    assert not o[:2].any()
    assert o[2:].any()
    assert torch.equal(pool[[0, 1, 2, 5]], before[[0, 1, 2, 5]])


def test_an_accepted_prefix_continues_as_if_decoded_one_by_one(device):
    """Speculate 3 tokens, accept 2, go on from there: the same states as a plain decode of the accepted tokens."""
    call = random_call((3,), heads=1, head_dim=64, seed=12).to(device)
    spec = pool_of(4, 1, 64, device)
    plain = spec.clone()
    decode(call, spec, [[1, 2, 3]], [1])
    two = replace(call.select([0])[0], **{n: getattr(call, n)[:2] for n in TOKENS[:5]}, cu_seqlens=torch.tensor([0, 2], device=device))
    decode(two, plain, [1])
    assert torch.equal(spec[2], plain[1])
    a, b = decode(call, spec, [[1, 2, 3]], [2]), decode(call, plain, [1])
    assert torch.equal(a, b)


def test_no_sequences_is_no_work(device):
    one = random_call((1,), heads=1, head_dim=64).to(device)
    none = replace(one, **{n: getattr(one, n)[:0] for n in TOKENS[:5]}, cu_seqlens=one.cu_seqlens[:1])
    pool = pool_of(2, 1, 64, device)
    before = pool.clone()
    from k3lab.kda.triton_recurrent import fused_recurrent_kda

    tokens = [getattr(none, n) for n in TOKENS]
    o = fused_recurrent_kda(*tokens, pool, torch.zeros(0, dtype=torch.int32, device=device), none.cu_seqlens)
    assert o.shape == (0, 1, 64)
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("indices", "accepted", "why"),
    [
        ([1, 9], None, "holds 9, but state_pool has 6 slots"),
        ([2, 2], None, r"slots \[2\] are used by more than one row"),
        ([1], None, r"expected \[2\] or"),
        ([[1, 2], [3, 4]], None, "num_accepted_tokens goes with"),
        ([1, 2], [1, 1], "num_accepted_tokens goes with"),
        ([[1], [3]], [1, 1], "has 2 tokens, but state_indices has 1"),
        ([[1, 2], [3, 4]], [0, 1], r"0..1 is outside 1..2"),
        ([[1, 2], [3, 4]], [1], r"num_accepted_tokens: shape \(1,\)"),
    ],
)
def test_slots_that_do_not_fit_are_refused(indices, accepted, why, device):
    """Before anything is written."""
    call = random_call((1, 2), heads=1, head_dim=64).to(device)
    pool = pool_of(6, 1, 64, device)
    before = pool.clone()
    with pytest.raises(BadInput, match=why):
        decode(call, pool, indices, accepted)
    assert torch.equal(pool, before)


def test_pools_and_dtypes_that_do_not_fit_are_refused(device):
    call = random_call((1, 2), heads=1, head_dim=64).to(device)
    pool = pool_of(3, 1, 64, device)
    with pytest.raises(BadInput, match=r"state_pool: shape .* expected \[slots, 1, 64, 64\]"):
        decode(call, pool[..., :32], [1, 2])
    with pytest.raises(BadInput, match="contiguous fp32"):
        decode(call, pool.transpose(-1, -2), [1, 2])
    with pytest.raises(BadInput, match="contiguous fp32"):
        decode(call, pool.half(), [1, 2])
    with pytest.raises(BadInput, match="state_layout"):
        decode(replace(call, state_layout="hv"), pool, [1, 2])
    with pytest.raises(BadInput, match=r"k: shape \(2, 1, 64\)"):
        decode(replace(call, k=call.k[:2]), pool, [1, 2])
    with pytest.raises(Unsupported, match="head_dim K = 32"):
        decode(random_call((1, 2), heads=1, head_dim=32).to(device), pool_of(3, 1, 32, device), [1, 2])
    if device == "cpu":
        with pytest.raises(Unsupported, match="bfloat16"):
            decode(call.to(dtype=torch.bfloat16), pool, [1, 2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gpu_128_decodes(lower_bound, state_layout, dtype):
    """The K3 TP8 decode batch: 128 sequences, 12 heads, K = V = 128, one token and then four speculative ones."""
    from k3lab.kda.triton_recurrent import recurrent_kda

    for lengths, states in (((1,) * 128, False), ((4,) * 128, True)):
        call = random_call(lengths, heads=12, head_dim=128, dtype=dtype, lower_bound=lower_bound, state_layout=state_layout).to("cuda")
        check_against_float64(call, recurrent_kda(call, token_states=states), dtype)


@pytest.mark.gpu
def test_gpu_every_config_gives_the_same_result_within_budget():
    from k3lab.kda.triton_recurrent import CONFIGS, recurrent_kda

    call = random_call((1,) * 16, heads=4, head_dim=128, dtype=torch.bfloat16).to("cuda")
    for config in CONFIGS:
        check_against_float64(call, recurrent_kda(call, config=config), torch.bfloat16)
