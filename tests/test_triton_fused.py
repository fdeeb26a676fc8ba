"""The fused chunk forward: within the float64 budget at every gate, length and layout, and what it refuses.

Without a GPU it runs under the interpreter in fp32 and fp16; with one, natively.
"""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from k3lab.capture import Capture
from k3lab.errors import BadInput, Unsupported
from k3lab.kda import reference
from k3lab.kda.layer import kda_layer_step
from k3lab.testing import LENGTH_MIXES, assert_within_budget, low_precision_reference, random_call, repeated_token

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the inf and NaN that a select then drops

CAPTURES = sorted((Path(__file__).parents[1] / "data" / "captures").glob("mixed_*.safetensors"))
DECAYS = ("mixed", "strong", "weak")


def poisoned(shape, dtype, device):
    """Like torch.empty, in the worst case: what is not written shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def check_result(call, dtype, **kw):
    from k3lab.kda.triton_fused import chunk_kda

    got = chunk_kda(call, empty=poisoned, **kw)
    assert got["o"].dtype == dtype
    assert got["final_state"].dtype == torch.float32
    truth, low = reference.recurrent_kda(call), low_precision_reference(call, dtype)
    for name in truth:
        assert_within_budget(name, got[name], truth[name], low[name], dtype)
    return got


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("lengths", LENGTH_MIXES.values(), ids=LENGTH_MIXES)
def test_within_budget_at_every_length_mix(lengths, decay, device):
    check_result(random_call(lengths, heads=1, head_dim=64, decay=decay, seed=7).to(device), torch.float32)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("lower_bound", [-20.0, None])
def test_within_budget_at_every_gate(lower_bound, decay, device):
    """Exponents over 64 rows reach 64 * 20 nats, or any number without a bound."""
    call = random_call((1, 63, 65), heads=1, head_dim=64, decay=decay, lower_bound=lower_bound, seed=8)
    check_result(call.to(device), torch.float32)


@pytest.fixture
def halves(monkeypatch, device):
    """What bfloat16 does on a device, in float32 under the interpreter: the kernel of one reference for each half of a chunk."""
    from k3lab.kda import triton_fused

    if device != "cpu":
        pytest.skip("a device's exp2 is not exact enough for the budget of float32; bfloat16 has its own tests there")
    monkeypatch.setattr(triton_fused, "halves_fit", lambda *_: True)


def test_halves_are_taken_as_far_as_their_factors_fit():
    """Half of 32 rows at lower_bound, in log2, is 115 at -5; a softer gate fits too, a stronger or unbounded one does not."""
    from k3lab.kda.triton_fused import halves_fit

    assert [halves_fit(b, torch.bfloat16) for b in (-0.1, -5.0, -5.1, -10.0, None)] == [True, True, False, False, False]
    assert not halves_fit(-5.0, torch.float16)
    assert not halves_fit(-5.0, torch.float32)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("lower_bound", [-5.0, -1.0])
def test_halves_are_within_the_budget_of_float32(lower_bound, decay, halves):
    check_result(random_call((17, 63, 64, 65), heads=1, head_dim=64, decay=decay, lower_bound=lower_bound, seed=9), torch.float32)


@pytest.mark.parametrize("after", [30, 31, 32, 33, 47])
def test_halves_where_the_decay_sets_in_within_a_chunk(after, halves):
    """No decay at all, then all of it: factors up to 2**115 on either side of a product, and differences of references below 2**-126."""
    call = random_call((64,), heads=1, head_dim=64, seed=12)
    call.raw_g[:] = 60.0
    call.raw_g[:after] = -60.0
    check_result(call, torch.float32)


@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_repeated_keys_without_decay(beta, fit, monkeypatch, device):
    """A run of one token: the terms of a row of A k cancel. float16 stands in for bfloat16, whose halves fit it at this soft a gate."""
    from k3lab.kda import triton_fused

    monkeypatch.setattr(triton_fused, "halves_fit", lambda *_: fit)
    for seed in range(3):
        call = random_call((130,), heads=1, head_dim=64, dtype=torch.float16, lower_bound=-0.3, seed=seed)
        check_result(repeated_token(call, beta).to(device), torch.float16)


def test_cu_seqlens_may_be_int64(device):
    call = random_call((1, 65), heads=1, head_dim=64).to(device)
    check_result(replace(call, cu_seqlens=call.cu_seqlens.long()), torch.float32)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("lengths", "cut"), [((400,), 3), ((400, 30), 3), ((129, 300), 2), ((65,), 5)])
def test_segments_change_nothing_but_rounding(lengths, cut, decay, monkeypatch, device):
    """Every segment starts from the states before it: of sequences shorter than their share, and of a last one of a row."""
    from k3lab.kda import triton_fused

    monkeypatch.setattr(triton_fused, "segments", lambda *_: cut)
    check_result(random_call(lengths, heads=1, head_dim=64, decay=decay, seed=13).to(device), torch.float32)


def test_few_long_sequences_are_cut_into_segments(monkeypatch):
    from k3lab.kda.triton_fused import segments

    bf16 = torch.bfloat16
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert segments(1, 24, 8192, bf16) == 1
    monkeypatch.setattr(torch.version, "hip", None)
    assert segments(1, 24, 8192, bf16) == 5  # 12 heads of two programs: as many segments as fit on 132 multiprocessors
    assert segments(1, 24, 700, bf16) == segments(129, 3096, 4224, bf16) == segments(1, 24, 8192, torch.float32) == 1
    assert segments(2, 48, 8192, bf16) == 2


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 128), (torch.float16, 128), (torch.float16, 64)])
def test_head_dims_and_float16(dtype, head_dim, device):
    check_result(random_call((1, 65, 63), heads=2, head_dim=head_dim, dtype=dtype, seed=3).to(device), dtype)


@pytest.mark.parametrize(("K", "V", "fit", "cut"), [(64, 128, False, 1), (128, 64, False, 3), (64, 128, True, 3), (128, 64, True, 1)])
def test_keys_and_values_of_different_widths(K, V, fit, cut, monkeypatch, device):
    """K and V are never confused: in tiles, in segments, in a [K, V] state that is a view of another."""
    from k3lab.kda import triton_fused

    if fit and device != "cpu":
        pytest.skip("a device's exp2 is not exact enough for the budget of float32")
    monkeypatch.setattr(triton_fused, "halves_fit", lambda *_: fit)
    monkeypatch.setattr(triton_fused, "segments", lambda *_: cut)
    keys, values = (random_call((2, 130), heads=1, head_dim=d, seed=6) for d in (K, V))
    state = torch.randn(2, 1, V, K, generator=torch.Generator().manual_seed(1)).transpose(-1, -2)
    call = replace(keys, v=values.v, initial_state=state, state_layout="kv", output_gate=None, norm_weight=None)
    check_result(call.to(device), torch.float32)


def test_starting_states_in_either_layout_or_none(device):
    """A [K, V] state, a row that does not count although it holds NaN, and no state at all."""
    vk = random_call((1, 70, 64), heads=1, head_dim=64).to(device)
    assert not bool(vk.has_initial_state[1])
    vk.initial_state[1] = float("nan")
    a = check_result(vk, torch.float32)
    kv = replace(vk, initial_state=vk.initial_state.transpose(-1, -2).contiguous(), state_layout="kv")
    b = check_result(kv, torch.float32)
    assert all(torch.equal(a[n], b[n]) for n in a)
    check_result(replace(vk, initial_state=None, has_initial_state=None), torch.float32)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda p: p.stem)
def test_captures_are_within_budget(path, device):
    """The prefills of recorded steps, and a few of their decodes, with the weights and states they came with."""
    call = Capture.load(path).kda_call().to(dtype=torch.float32)
    live = [n for n in range(call.num_sequences) if call.state_indices is None or int(call.state_indices[n]) > 0]
    part, _ = call.select([n for n in live if int(call.lengths[n]) > 1][:2] + live[:3])
    check_result(part.to(device), torch.float32)


@pytest.mark.parametrize(("fit", "cut"), [(False, 1), (True, 1), (True, 3)])
def test_a_sequence_never_reads_its_neighbour(fit, cut, monkeypatch, device):
    """NaN tokens in one sequence leave every other sequence's bits alone, in the middle of a tile or not, and in segments."""
    from k3lab.kda import triton_fused
    from k3lab.kda.triton_fused import chunk_kda

    monkeypatch.setattr(triton_fused, "halves_fit", lambda *_: fit)
    monkeypatch.setattr(triton_fused, "segments", lambda *_: cut)
    call = random_call((3, 65, 1, 70), heads=2, head_dim=64, seed=5).to(device)
    clean = chunk_kda(call)
    for name in ("q", "k", "v", "raw_g", "raw_beta"):
        getattr(call, name)[3:68] = float("nan")
    got = chunk_kda(call)
    rows = torch.ones(139, dtype=torch.bool, device=device)
    rows[3:68] = False
    assert torch.equal(got["o"][rows], clean["o"][rows])
    assert torch.equal(got["final_state"][[0, 2, 3]], clean["final_state"][[0, 2, 3]])
    assert got["o"][~rows].isnan().any()


def test_every_chunk_finds_its_sequence(device):
    """Many sequences about the size of a chunk: slots of chunks are distinct, and some stay empty."""
    lengths = [int(n) for n in torch.randint(1, 131, (12,), generator=torch.Generator().manual_seed(1))]
    check_result(random_call(lengths, heads=1, head_dim=64, seed=1).to(device), torch.float32)


def test_other_tiles_change_nothing_but_rounding(device):
    from k3lab.kda.triton_fused import CONFIGS, DEFAULTS

    assert all(DEFAULTS[name] in CONFIGS[name] for name in DEFAULTS)
    call = random_call((1, 63, 65), heads=1, head_dim=64, seed=11).to(device)
    check_result(call, torch.float32, configs={"gate": {"BK": 64}, "chunk": {"BK": 64}, "state": {"BV": 64}})
    check_result(call, torch.float32, configs={"gate": {"BK": 128}, "chunk": {"BK": 128}, "state": {"BV": 128}})  # no wider than a head


def test_the_layer_takes_it_by_name(device):
    """Both routes, stitched: impl="triton_fused" is impl="triton" without stage tensors."""
    call = random_call((1, 1, 70, 1), heads=1, head_dim=64).to(device)
    truth, low = reference.recurrent_kda(call), low_precision_reference(call, torch.float32)
    for route in ("chunk_all", "split"):
        got = kda_layer_step(call, route, impl="triton_fused")
        for name in ("o", "final_state"):
            assert_within_budget(name, getattr(got, name), truth[name], low[name], torch.float32)
    assert got.launches[-1].kernel == "chunk"
    assert set(got.launches[-1].tensors) == {"o", "final_state"}
    with pytest.raises(BadInput, match='"triton_fused" shows no stages'):
        kda_layer_step(call, impl="triton_fused", padding="nan")


def test_what_no_kernel_can_do_is_refused(device):
    from k3lab.kda.triton_fused import chunk_kda

    call = random_call((1, 2), heads=1, head_dim=64).to(device)
    for configs, said in (
        ({"solve": {"num_warps": 4}}, "configs: 'solve'"),
        ({"gate": 64}, "gate: is a int"),
        ({"gate": {"BT": 64}}, "gate: 'BT' is not one of"),
        ({"state": {"BV": 48}}, "BV is 48, expected a power of two from 16 on"),
        ({"state": {"BV": 0}}, "BV is 0"),
        ({"chunk": {"num_warps": 3}}, "num_warps is 3"),
        ("halves", "configs: is a str"),
    ):
        with pytest.raises(BadInput, match=said):
            chunk_kda(call, configs=configs)
    with pytest.raises(BadInput, match="q: is a list"):
        chunk_kda(replace(call, q=[1.0]))
    with pytest.raises(BadInput, match="cu_seqlens"):
        chunk_kda(replace(call, cu_seqlens=call.cu_seqlens.flip(0)))
    with pytest.raises(Unsupported, match="float64"):
        chunk_kda(call.to(dtype=torch.float64))
    with pytest.raises(Unsupported, match="head_dim K = 32"):
        chunk_kda(random_call((1, 2), heads=1, head_dim=32).to(device))
    if device == "cpu":
        with pytest.raises(Unsupported, match="bfloat16"):
            chunk_kda(call.to(dtype=torch.bfloat16))


@pytest.mark.slow
def test_the_kernels_compile_without_a_gpu(compiling_env):
    """cuda:90 and hip:gfx950, bf16 and fp32; on gfx950 with asynchronous copies, which take the most LDS."""
    env = compiling_env | {"TRITON_HIP_USE_ASYNC_COPY": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert len(rows) == 6 + 3 + 4 + 3
    assert all(row["shared"] <= (227 * 1024 if row["target"] == "cuda" else 160 * 1024) for row in rows), rows


@pytest.mark.slow
@pytest.mark.parametrize("pointer_range", [False, True])
@pytest.mark.parametrize("name", ["gate", "halves", "chunk"])
def test_no_lds_access_of_the_compiled_gfx950_code_is_unordered(name, pointer_range):
    """Async copies on, at a full chunk and at a tail of three rows; `state` takes descriptors, which the analysis cannot be given."""
    from k3lab.kda import triton_fused
    from k3lab.races.compiled import Build, compile_builds
    from k3lab.races.kernel import Input
    from k3lab.races.lds import analyse

    config = dict(triton_fused.DEFAULTS[name])
    launch = [config.pop("num_warps"), config.pop("num_stages", 1)]
    types = dict.fromkeys(("q", "k", "v", "raw_g", "raw_beta", "wq", "kg", "uT", "Aqk"), "*bf16")
    types |= dict.fromkeys(("g", "A_log", "dt_bias"), "*fp32") | {"cu_seqlens": "*i32", "N": "i32", "T": "i32"}
    types |= {"scale": "fp32", "lower_bound": "fp32"}
    values = {"H": 12, "K": 128, "V": 128, "BT": 64, "EPS": 1e-6, "SCALE": 1.44, "BOUNDED": True} | config
    signature = types | {k: {"value": v} for k, v in values.items()}
    takes = getattr(triton_fused, f"fused_{name}_fwd_kernel").arg_names
    signature = {k: v for k, v in signature.items() if k in takes}
    kernel = f"k3lab.kda.triton_fused:fused_{name}_fwd_kernel"
    (made,) = compile_builds([Build(kernel, *launch, "hip:gfx950", signature, pointer_range, async_copy=True)])
    assert not made.error, made.error
    whole = {"buffers": {"cu_seqlens": [0, 131]}, "scalars": {"N": 1, "T": 131}}
    inputs = [Input("full", **whole), Input("tail", **whole, workgroup=(0, 2, 0))]
    assert [(r.input, r.verdict, r.error) for r in analyse(made.kernel(), inputs)] == [("full", "ordered", ""), ("tail", "ordered", "")]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gpu_within_budget_at_k3_head_dim(lower_bound, dtype):
    """K = V = 128 on the device: 128 decodes and prefills of 1,024 tokens in all, at every decay; then every length mix."""
    for decay in DECAYS:
        call = random_call((1,) * 128 + (512, 63, 65, 384), heads=12, dtype=dtype, decay=decay, lower_bound=lower_bound, seed=1)
        check_result(call.to("cuda"), dtype)
    for lengths, decay in product(LENGTH_MIXES.values(), DECAYS):
        check_result(random_call(lengths, heads=12, dtype=dtype, decay=decay, lower_bound=lower_bound, seed=2).to("cuda"), dtype)


@pytest.mark.gpu
def test_gpu_repeated_keys_within_budget():
    """A run of one token without decay, in the dtype that takes halves."""
    for beta in (1.0, 3.0):
        call = random_call((130,), heads=12, dtype=torch.bfloat16, seed=6)
        check_result(repeated_token(call, beta).to("cuda"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
def test_gpu_segments_within_budget(decay):
    """One sequence of 2,000 tokens: five segments at 12 heads."""
    check_result(random_call((2000,), heads=12, dtype=torch.bfloat16, decay=decay, seed=4).to("cuda"), torch.bfloat16)


@pytest.mark.gpu
def test_gpu_captures_in_their_own_dtype():
    for path in CAPTURES:
        call = Capture.load(path).kda_call()
        live = [n for n in range(call.num_sequences) if call.state_indices is None or int(call.state_indices[n]) > 0]
        check_result(call.select(live)[0].to("cuda"), call.q.dtype)


@pytest.mark.gpu
def test_gpu_nothing_waits_for_the_device():
    """With check=False the call can be captured in a graph, and its replay gives the bits of the call."""
    from k3lab.kda.triton_fused import chunk_kda

    call = random_call((1, 1000), heads=12, dtype=torch.bfloat16).to("cuda")
    eager = chunk_kda(call, check=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chunk_kda(call, check=False)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(got[n], eager[n]) for n in eager)


def compile_all() -> list[dict]:
    """The kernels for cuda:90 and hip:gfx950 in bf16 and fp32, the state kernel in all its forms: run in a process of its own."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from k3lab.kda import triton_fused as tf

    constants = {"H": 12, "K": 128, "V": 128, "BT": 64, "EPS": 1e-6, "SCALE": 1.44, "BOUNDED": True}
    constants |= {"START": True, "MASKED": True, "KV": False, "CUT": False, "OUT": True}
    fixed = dict.fromkeys(("h0", "ht", "added", "A_log", "dt_bias"), "*fp32") | {"has_h0": "*i1", "cu_seqlens": "*i32"}
    fixed |= {"T": "i32", "N": "i32", "G": "i32", "SC": "i32", "scale": "fp32", "lower_bound": "fp32"}
    rows = []
    for target, dtype in product((GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx950", 64)), ("bf16", "fp32")):
        bf16 = tf.DEFAULTS if target.backend == "cuda" else tf.DEFAULTS_HIP
        defaults = bf16 if dtype == "bf16" else tf.DEFAULTS_FP32
        forms = [("gate", {}), ("chunk", {}), ("state", {})]
        if dtype == "bf16":  # float32 takes no halves
            forms += [("halves", {})]
            if target.backend == "cuda":  # and nothing else is cut
                forms += [("state", {"CUT": True}), ("state", {"CUT": True, "OUT": False})]
        tiles = {"wq": (64, 128), "kg": (64, 128), "uT": (defaults["state"]["BV"], 64), "Aqk": (64, 64)}
        for name, form in forms:
            kernel, config = getattr(tf, f"fused_{name}_fwd_kernel"), defaults[name]
            names = kernel.arg_names
            have = {k: v for k, v in {**constants, **config, **form}.items() if k in names}
            types = fixed | {"g": "*fp64" if dtype == "fp32" else "*fp32"}
            if name == "state":
                types |= {n: f"tensordesc<{dtype}[{rows_},{cols}]>" for n, (rows_, cols) in tiles.items()}
            signature = {n: "constexpr" if n in have else types.get(n, f"*{dtype}") for n in names}
            attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
            source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in have.items()}, attrs)
            options = {k: v for k, v in config.items() if k.startswith("num_")}
            built = triton.compile(source, target=target, options=options)
            rows.append({"kernel": name, "target": target.backend, "dtype": dtype, "shared": built.metadata.shared, **form})
    return rows


if __name__ == "__main__":
    print(json.dumps(compile_all()))
