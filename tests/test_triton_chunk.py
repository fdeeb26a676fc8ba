"""The Triton chunk stages: against float64, against the torch stages, and what masked rows do to each of them.

Without a GPU everything runs under the interpreter in fp32 and fp16; with one, natively. Run as a script, the file compiles
every kernel for cuda:90 and hip:gfx950 with no GPU.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from k3lab.errors import BadInput, Unsupported
from k3lab.kda import reference, stages
from k3lab.kda.stages import STAGE_OUTPUTS, STAGES, chunk_index
from k3lab.testing import LENGTH_MIXES, assert_within_budget, low_precision_reference, random_call

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the inf and NaN that a select then drops

EDGES = LENGTH_MIXES["tile edges"]
RAGGED = LENGTH_MIXES["ragged"]
CLEAN_INVERSE = {1, 2, 16, 32, 48, 64}  # rows in the chunk at which no step of the blocked inverse meets a masked row


def poisoned(shape, dtype, device):
    """Like torch.empty, in the worst case: what is not written shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def check_result(call, got, dtype):
    truth, low = reference.recurrent_kda(call), low_precision_reference(call, dtype)
    for name in ("o", "final_state"):
        assert_within_budget(name, got[name], truth[name], low[name], dtype)


def on_stage(stage, clean, call, padding, **kw):
    """One stage alone, fed clean inputs, as a dict of its outputs."""
    from k3lab.kda import triton_chunk as tc

    x, at = clean, (call.cu_seqlens.int(), chunk_index(call.cu_seqlens))
    run = {
        "gate_cumsum": lambda: (tc.gate_cumsum(call.raw_g, call.A_log, call.dt_bias, call.lower_bound, *at, padding, **kw),),
        "intra": lambda: tc.intra(x["q_n"], x["k_n"], x["g"], x["beta"], call.lower_bound is not None, *at, padding, **kw),
        "inverse": lambda: (tc.inverse(x["Akk"], call.q.dtype, *at, padding, **kw),),
        "recompute_w_u": lambda: tc.recompute_w_u(x["k_n"], call.v, x["beta"], x["A"], x["g"], *at, padding, **kw),
        "state": lambda: tc.state_pass(x["w"], x["u"], x["kg"], x["g"], call.state_vk(), *at, padding, **kw),
        "output": lambda: (tc.output(x["q_n"], x["g"], x["Aqk"], x["v_new"], x["h"], *at, padding, **kw),),
    }[stage]
    return dict(zip(STAGE_OUTPUTS[stage], run(), strict=True))


def sequential_scan(call):
    """What fp32 cannot avoid in g: exp(A_log) one rounding off, and a running sum (torch.cumsum adds in float64 on the CPU)."""
    A_log = call.A_log + torch.finfo(torch.float32).eps
    step = reference.log_decay(call.raw_g.float(), A_log, call.dt_bias, call.lower_bound).cpu().numpy() * np.float32(stages.RCP_LN2)
    pieces = [c for s in np.split(step, call.cu_seqlens[1:-1].tolist()) for c in np.split(s, range(64, len(s), 64))]
    return torch.from_numpy(np.concatenate([np.cumsum(c, axis=0, dtype=np.float32) for c in pieces]))


@pytest.mark.parametrize("decay", ["mixed", "strong", "weak"])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("lengths", "heads"), [(EDGES, 2), (RAGGED, 1)], ids=["edges", "ragged"])
def test_stages_and_result_are_within_budget(lengths, heads, lower_bound, decay, device):
    """Each stage on clean inputs against the torch stage in float64; then all in a row against the float64 recurrence."""
    from k3lab.kda.triton_chunk import chunk_kda, prepare

    call = random_call(lengths, heads=heads, head_dim=64, decay=decay, lower_bound=lower_bound, seed=7).to(device)
    low = stages.chunk_kda(call)
    truth = stages.chunk_kda(call.to(dtype=torch.float64))
    for name, x in prepare(call.q, call.k, call.raw_beta, empty=poisoned).items():
        assert_within_budget(name, x, truth[name], low[name], torch.float32)
    low_g = low | {"g": sequential_scan(call)}
    for stage in STAGES:
        for name, x in on_stage(stage, low, call, "zero", empty=poisoned).items():
            assert_within_budget(name, x, truth[name], low_g[name], torch.float32)
    check_result(call, chunk_kda(call, empty=poisoned), torch.float32)


@pytest.mark.parametrize(("dtype", "lower_bound"), [(torch.float32, -5.0), (torch.float32, None), (torch.float16, -5.0)])
def test_head_dim_128_and_float16(dtype, lower_bound, device):
    from k3lab.kda.triton_chunk import chunk_kda

    call = random_call((1, 65, 63), heads=1, head_dim=128, dtype=dtype, lower_bound=lower_bound, seed=3).to(device)
    got = chunk_kda(call, empty=poisoned)
    check_result(call, got, dtype)
    assert got["o"].dtype == got["h"].dtype == got["A"].dtype == dtype
    assert got["g"].dtype == got["Akk"].dtype == got["beta"].dtype == got["final_state"].dtype == torch.float32


def test_both_state_layouts_give_the_same_bits(device):
    """A call that keeps its state as [N, H, K, V] is the same call."""
    from dataclasses import replace

    from k3lab.kda.triton_chunk import chunk_kda

    vk = random_call((1, 70), heads=1, head_dim=64).to(device)
    kv = replace(vk, initial_state=vk.initial_state.transpose(-1, -2).contiguous(), state_layout="kv")
    a, b = chunk_kda(vk), chunk_kda(kv)
    assert torch.equal(a["o"], b["o"])
    assert torch.equal(a["final_state"], b["final_state"])


def test_other_tiles_change_nothing_but_rounding(device):
    """Block sizes of CONFIGS other than the default ones stay within budget."""
    from k3lab.kda.triton_chunk import CONFIGS, DEFAULTS, RECOMPUTE_W_U_CONFIGS, chunk_kda

    assert [(c["num_warps"], c["num_stages"]) for c in RECOMPUTE_W_U_CONFIGS] == [(w, s) for w in (2, 4, 8) for s in (2, 3, 4)]
    for stage, default in DEFAULTS.items():
        assert default in CONFIGS[stage], stage
    call = random_call((1, 63, 65), heads=1, head_dim=64, seed=11).to(device)
    other = {"prepare": {"BR": 16}, "gate_cumsum": {"BK": 32}, "intra": {"BK": 32}, "state": {"BV": 64}, "output": {"BK": 32, "BV": 32}}
    check_result(call, chunk_kda(call, configs=other, empty=poisoned), torch.float32)


def test_a_sequence_never_reads_its_neighbour(device):
    """NaN tokens in one sequence leave every other sequence's bits alone, in any stage."""
    from k3lab.kda.triton_chunk import chunk_kda

    call = random_call((3, 65, 1, 40), heads=1, head_dim=64, seed=5).to(device)
    clean = chunk_kda(call)
    for name in ("q", "k", "v", "raw_g"):
        getattr(call, name)[3:68] = float("nan")
    got = chunk_kda(call)
    rows = torch.ones(109, dtype=torch.bool, device=device)
    rows[3:68] = False
    for name in ("g", "Aqk", "A", "w", "u", "kg", "v_new", "o"):
        assert torch.equal(got[name][rows], clean[name][rows]), name
    assert torch.equal(got["final_state"][[0, 2, 3]], clean["final_state"][[0, 2, 3]])
    assert got["o"][~rows].isnan().any()


@pytest.fixture(scope="module")
def every_length(device):
    """One sequence of each length that matters, and the clean outputs of every stage."""
    from k3lab.kda.triton_chunk import chunk_kda

    lengths = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64)
    call = random_call(lengths, heads=1, head_dim=64, seed=2).to(device)
    return lengths, call, chunk_kda(call)


@pytest.mark.parametrize("stage", STAGES)
def test_nan_padding_of_one_stage_hits_what_the_arithmetic_says(stage, every_length):
    """Clean inputs, one padded stage: NaN exactly where the torch stages have it, and at exactly these lengths."""
    lengths, call, clean = every_length
    got = on_stage(stage, clean, call, "nan", empty=poisoned)
    twin = stages.chunk_kda(call, padding={stage: "nan"})
    hit = {}
    for name, x in got.items():
        assert torch.equal(x.isnan(), twin[name].isnan()), name
        parts = x if name in ("final_state", "h") else x.split(lengths)
        hit[name] = {n for n, p in zip(lengths, parts, strict=True) if not bool(torch.isfinite(p).all())}
    partial = set(lengths) - {64}
    assert (
        hit
        == {
            "gate_cumsum": {"g": set()},
            "intra": {"Aqk": set(), "Akk": set()},
            "inverse": {"A": set(lengths) - CLEAN_INVERSE},
            "recompute_w_u": {"w": partial, "u": partial, "kg": set()},
            "state": {"h": set(), "v_new": set(), "final_state": partial},
            "output": {"o": partial},
        }[stage]
    )


def test_every_masked_load_of_a_stage_takes_the_padding():
    """By the source, as a masked row of some tiles only reaches rows that are not stored: load_rows, or a load of lengths, or prepare."""
    from k3lab.kda import triton_chunk as tc

    own = [line for line in Path(tc.__file__).read_text().splitlines() if "tl.load(" in line and "mask=" in line]
    prepare = [line for line in own if re.search(r"tl.load\((q|k|raw_beta) \+ o_r", line)]
    assert len(prepare) == 3, "row by row, and rows past the last token alone are masked: padding cannot reach a token"
    assert all(line in prepare or line.count("tl.load(cu_seqlens") == line.count("mask=") for line in own), own


def test_inverse_is_hit_at_every_length_but_six(device):
    from k3lab.kda import triton_chunk as tc

    call = random_call(tuple(range(1, 65)), heads=1, head_dim=64, seed=4).to(device)
    Akk = stages.chunk_kda(call)["Akk"]
    A = tc.inverse(Akk, torch.float32, call.cu_seqlens, chunk_index(call.cu_seqlens), "nan")
    clean = {n for n, part in enumerate(A.split(tuple(range(1, 65))), 1) if bool(torch.isfinite(part).all())}
    assert clean == CLEAN_INVERSE


def test_padding_names_one_stage_or_all(device):
    """A mapping pads the stages it names; a length-1 sequence is NaN by recompute_w_u alone, a full chunk never."""
    from k3lab.kda.triton_chunk import chunk_kda

    call = random_call((1, 64), heads=1, head_dim=64).to(device)
    everywhere, one = chunk_kda(call, "nan"), chunk_kda(call, {"recompute_w_u": "nan"})
    for got in (everywhere, one):
        assert not torch.isfinite(got["o"][0]).any()
        assert torch.isfinite(got["A"]).all()
        assert torch.isfinite(got["o"][1:]).all()
        assert torch.isfinite(got["final_state"][1]).all()
    assert torch.equal(everywhere["o"][1:], one["o"][1:])


def test_undefined_reads_zero_under_the_interpreter(device):
    """The interpreter cannot show an undefined row: that is why "nan" exists."""
    from k3lab.kda.triton_chunk import chunk_kda

    if device != "cpu":
        pytest.skip("a statement about the interpreter; on a device an undefined row may hold anything")
    call = random_call((1, 33), heads=1, head_dim=64).to(device)
    a, b = chunk_kda(call, "undefined"), chunk_kda(call, "zero")
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_no_chunks_is_no_work(device):
    """Every launcher accepts an empty batch and returns empty outputs."""
    from dataclasses import replace

    from k3lab.kda.triton_chunk import chunk_kda

    one = random_call((1,), heads=1, head_dim=64).to(device)
    none = {n: getattr(one, n)[:0] for n in ("q", "k", "v", "raw_g", "raw_beta", "initial_state", "has_initial_state")}
    call = replace(one, **none, cu_seqlens=one.cu_seqlens[:1])
    got = chunk_kda(call, chunk_indices=chunk_index(call.cu_seqlens))
    assert got["o"].shape == (0, 1, 64)
    assert got["final_state"].shape == (0, 1, 64, 64)


def test_what_no_kernel_can_do_is_refused(device):
    from k3lab.kda.triton_chunk import chunk_kda

    call = random_call((1, 2), heads=1, head_dim=64).to(device)
    with pytest.raises(BadInput, match="padding: 'ones'"):
        chunk_kda(call, "ones")
    with pytest.raises(BadInput, match="'inverze' is not one of the stages"):
        chunk_kda(call, {"inverze": "nan"})
    with pytest.raises(BadInput, match="configs: 'solve'"):
        chunk_kda(call, configs={"solve": {"num_warps": 4}})
    with pytest.raises(Unsupported, match="float64"):
        chunk_kda(call.to(dtype=torch.float64))
    with pytest.raises(Unsupported, match="head_dim 32"):
        chunk_kda(random_call((1, 2), heads=1, head_dim=32).to(device))
    if device == "cpu":
        with pytest.raises(Unsupported, match="bfloat16"):
            chunk_kda(call.to(dtype=torch.bfloat16))


@pytest.mark.slow
def test_every_kernel_compiles_without_a_gpu(compiling_env):
    """cuda:90 and hip:gfx950, bf16 and fp32, every padding of recompute_w_u; nothing spills; CPU tensors are refused by name."""
    done = subprocess.run([sys.executable, __file__], env=compiling_env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert len(report["kernels"]) == 2 * 2 * (7 + 3 + 2)
    assert all(row["spills"] == 0 and row["shared"] <= 65536 for row in report["kernels"]), report["kernels"]
    assert "TRITON_INTERPRET=1" in report["refusal"]


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["mixed", "strong", "weak"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gpu_within_budget_at_k3_head_dim(lower_bound, dtype, decay):
    """K = V = 128 on the device: 128 decodes and prefills of 4,096 tokens in all."""
    from k3lab.kda.triton_chunk import chunk_kda

    lengths = (1,) * 128 + (2048, 63, 65, 1920)
    call = random_call(lengths, heads=4, head_dim=128, dtype=dtype, decay=decay, lower_bound=lower_bound, seed=1).to("cuda")
    check_result(call, chunk_kda(call, empty=poisoned), dtype)


@pytest.mark.gpu
def test_gpu_every_recompute_w_u_config_within_budget():
    """The 9 configs, each on its own, in bf16. A device on which one is racy fails here; no difference proves nothing."""
    from k3lab.kda.triton_chunk import RECOMPUTE_W_U_CONFIGS, chunk_kda

    call = random_call((1,) * 64 + (1000,), heads=4, head_dim=128, dtype=torch.bfloat16, seed=6).to("cuda")
    for config in RECOMPUTE_W_U_CONFIGS:
        check_result(call, chunk_kda(call, configs={"recompute_w_u": config}, empty=poisoned), torch.bfloat16)


@pytest.mark.gpu
def test_gpu_nan_padding_in_bfloat16():
    """On the device too: NaN rows reach a length-1 sequence and its state, and no full chunk."""
    from k3lab.kda.triton_chunk import chunk_kda

    call = random_call((1, 1, 128), heads=2, head_dim=128, dtype=torch.bfloat16).to("cuda")
    got = chunk_kda(call, "nan")
    assert got["o"][:2].isnan().all()
    assert got["final_state"][:2].isnan().any()
    assert torch.isfinite(got["o"][2:]).all()
    assert torch.isfinite(got["final_state"][2]).all()


def compile_all() -> dict:
    """Every kernel for cuda:90 and hip:gfx950 in bf16 and fp32, and what a CPU tensor is told: run in a process of its own."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from k3lab.kda import triton_chunk as tc
    from k3lab.kda import triton_recurrent as tr

    fixed = dict.fromkeys(("g", "gk", "beta", "Akk", "h0", "ht", "A_log", "dt_bias", "state"), "*fp32")
    fixed |= dict.fromkeys(("cu_seqlens", "chunk_indices", "state_indices", "num_accepted_tokens"), "*i32")
    fixed |= {"T": "i32", "R": "i32", "scale": "fp32", "lower_bound": "fp32"}
    constants = {"H": 12, "K": 128, "V": 128, "S": 2, "BT": 64, "BC": 16, "BK": 64, "BV": 64, "EPS": 1e-6, "SCALE": 1.44}
    constants |= {"BOUNDED": True, "SPEC": True, "PADDING": "undefined", "KV": False}
    jobs = [(name, getattr(tc, f"{name}_fwd_kernel"), tc.DEFAULTS[name], {}) for name in tc.DEFAULTS]
    jobs += [("recompute_w_u", tc.recompute_w_u_fwd_kernel, tc.DEFAULTS["recompute_w_u"], {"PADDING": p}) for p in ("zero", "nan")]
    jobs += [("intra", tc.intra_fwd_kernel, tc.DEFAULTS["intra"], {"BOUNDED": False})]
    jobs += [("recurrent", tr.fused_recurrent_kda_fwd_kernel, tr.DEFAULT, {"KV": kv, "SPEC": kv}) for kv in (False, True)]
    rows = []
    for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx950", 64)):
        for dtype in ("bf16", "fp32"):
            for name, kernel, config, extra in jobs:
                options = {k: v for k, v in config.items() if k.startswith("num_")}
                have = {k: v for k, v in {**constants, **config, **extra}.items() if k in kernel.arg_names}
                names = kernel.arg_names
                signature = {n: "constexpr" if n in have else fixed.get(n, f"*{dtype}") for n in names}
                attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
                source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in have.items()}, attrs)
                built = triton.compile(source, target=target, options=options)
                assembly = built.asm.get("amdgcn", "")
                spills = sum(int(line.split()[-1]) for line in assembly.splitlines() if "_spill_count:" in line)
                rows.append({"kernel": name, "target": target.backend, "dtype": dtype, "shared": built.metadata.shared, "spills": spills})
    refusal = ""
    try:
        tr.recurrent_kda(random_call((1,), heads=1, head_dim=64))
    except Unsupported as e:
        refusal = str(e)
    return {"kernels": rows, "refusal": refusal}


if __name__ == "__main__":
    print(json.dumps(compile_all()))


@pytest.mark.parametrize("lower_bound", [-10.0, -20.0])
def test_a_wide_gate_bound_does_not_overflow(lower_bound, device):
    """Below stages.LOWEST_BOUND half a row block would pass float32's exponents; the pairs are taken one by one there."""
    from k3lab.kda.triton_chunk import chunk_kda

    call = random_call((65,), heads=1, head_dim=64, decay="strong", lower_bound=lower_bound, seed=5).to(device)
    check_result(call, chunk_kda(call, empty=poisoned), torch.float32)
