"""AttnRes: torch and the Triton kernel against float64, each other's prefix bits, fla-core's naive_attnres and a captured tap.

Without a GPU the kernel runs under the interpreter in fp32 and fp16; with one, natively.
"""

import re
from pathlib import Path

import pytest
import torch

from k3lab.attn_res import IMPLS, attn_res
from k3lab.attn_res.reference import attn_res_reference
from k3lab.capture import Capture
from k3lab.errors import BadInput, Unsupported
from k3lab.testing import assert_within_budget, error_budget, random_sources

TAP = Path(__file__).parent.parent / "data" / "captures" / "attn_res_layer4.safetensors"
FAST = ("torch", "triton")


def poisoned(x, **kw):
    return torch.full_like(x, float("nan"), **kw)


def run(impl, x, **kw):
    """attn_res by name; the kernel writes into buffers full of NaN."""
    if impl != "triton":
        return attn_res(**x, **kw, impl=impl)
    from k3lab.attn_res.triton_attn_res import attn_res_triton

    return attn_res_triton(**x, **kw, empty=poisoned)


def check_against_float64(x, got):
    """o and weights within the budget, the new prefix bit for bit."""
    dtype = x["prefix"].dtype
    truth, low = (attn_res_reference(**x, return_weights=True, dtype=d) for d in (torch.float64, torch.float32))
    assert torch.equal(got.prefix, truth.prefix)
    assert got.o.dtype == dtype
    assert_within_budget("o", got.o, truth.o, low.o.to(dtype), dtype)
    assert_within_budget("weights", got.weights, truth.weights, low.weights, torch.float32)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65])
def test_token_counts(impl, tokens, device):
    x = random_sources(tokens, 64, 3, spare=1, output_norm=tokens % 2 == 0, seed=tokens, device=device)
    check_against_float64(x, run(impl, x, return_weights=True))


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("blocks", range(9))
def test_every_number_of_blocks_and_a_ragged_width(impl, blocks, device):
    """0 to 8 valid blocks, hidden 250, NaN in the block after the last valid one."""
    for pending in (False, True):
        x = random_sources(3, 250, blocks, pending=pending, spare=1, seed=blocks, device=device)
        got = run(impl, x, return_weights=True)
        check_against_float64(x, got)
        assert got.weights.shape == (3, blocks + 1)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_kimi_k3_width(impl, dtype, tokens, device):
    x = random_sources(tokens, 7168, 8, dtype, output_norm=True, seed=3, device=device)
    check_against_float64(x, run(impl, x, return_weights=True))


def test_torch_in_bfloat16():
    x = random_sources(65, 250, 5, torch.bfloat16, spare=1, output_norm=True, seed=4)
    check_against_float64(x, run("torch", x, return_weights=True))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 700])
@pytest.mark.parametrize(("hidden", "blocks"), [(64, 2), (250, 3), (2304, 1), (7168, 5), (7168, 8)])
def test_kernel_in_bfloat16(tokens, hidden, blocks):
    """Natively, on both sides of the number of tokens at which the configuration changes."""
    for dtype in (torch.bfloat16, torch.float32):
        x = random_sources(tokens, hidden, blocks, dtype, spare=1, output_norm=tokens % 2 == 0, seed=tokens, device="cuda")
        check_against_float64(x, run("triton", x, return_weights=True))


@pytest.mark.gpu
def test_every_configuration_on_the_device():
    from triton.runtime.errors import OutOfResources

    from k3lab.attn_res.triton_attn_res import CONFIGS

    x = random_sources(130, 7168, 7, torch.bfloat16, seed=2, device="cuda")
    ran = 0
    for config in CONFIGS:
        try:
            got = run("triton", x, return_weights=True, config=config)
        except OutOfResources:
            continue
        check_against_float64(x, got)
        ran += 1
    assert ran > len(CONFIGS) // 2


@pytest.mark.parametrize("BL", [1, 2, 4, 8])
@pytest.mark.parametrize("LAST", [False, True])
def test_tiles_of_sources(BL, LAST, device):
    """Five blocks fill no tile evenly, and the prefix is folded in before or after them."""
    x = random_sources(2, 250, 5, spare=1, device=device)
    config = {"BL": BL, "LAST": LAST, "num_warps": 4, "num_stages": 2}
    check_against_float64(x, run("triton", x, return_weights=True, config=config))


def test_default_configurations_fit_shared_memory():
    from k3lab.attn_res.triton_attn_res import SHARED_BYTES, default_config

    for tokens in (1, 128, 4096):
        for hidden in (64, 250, 2304, 7168, 20000):
            for itemsize in (2, 4):
                for blocks in range(9):
                    c = default_config(tokens, hidden, itemsize, blocks)
                    assert default_config(tokens, hidden, itemsize, blocks, pending=True) in (c, c | {"LAST": False})
                    width = 1 << (hidden - 1).bit_length()
                    assert (c["num_stages"] - 1) * c["BL"] * width * itemsize <= SHARED_BYTES
                    assert c["num_stages"] >= 1
                    assert c["BL"] < 2 * max(blocks, 1)
                    assert 1 <= c["num_warps"] <= 16


@pytest.mark.parametrize("impl", IMPLS)
def test_without_blocks_the_mixture_is_the_prefix(impl, device):
    x = random_sources(4, 64, 0, device=device)
    got = run(impl, x, return_weights=True)
    assert torch.equal(got.o.float(), got.prefix)
    assert torch.equal(got.weights.float(), torch.ones(4, 1, device=device))
    alone = run(impl, {"prefix": x["prefix"]})
    assert torch.equal(alone.o.float(), x["prefix"])
    assert alone.weights is None


@pytest.mark.parametrize("impl", IMPLS)
def test_the_prefix_is_rounded_before_it_is_a_source(impl, device):
    """fp16: 2048 + 1 is 2048, so the rounded prefix is parallel to the block and the mixture has no third value."""
    prefix = torch.full((1, 64), 2048.0, dtype=torch.float16, device=device)
    pending = torch.ones_like(prefix)
    norm = torch.ones(64, device=device)
    got = run(impl, {"prefix": prefix, "pending": pending, "bank": prefix[None].clone(), "score_norm": norm, "score_proj": norm})
    assert torch.equal(got.prefix, prefix)
    assert got.o.double().unique().tolist() == [2048.0]


def test_folding_after_rounding_is_another_result():
    """The budget tells the folded form from normalising, rounding to bf16, then projecting: the check can fail."""
    x = random_sources(64, 2304, 8, torch.bfloat16, pending=False, seed=5)
    x["score_proj"] *= 20  # scores as sharp as a trained consumer's
    truth, low = attn_res_reference(**x).o, attn_res_reference(**x, dtype=torch.float32).o.bfloat16()
    sources = torch.stack([*x["bank"], x["prefix"]], 1).float()
    normed = (sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + 1e-5)).bfloat16() * x["score_norm"]
    weights = (normed @ x["score_proj"]).float().softmax(-1)
    wrong = (weights[..., None] * sources).sum(1).bfloat16()
    assert error_budget("folded", attn_res(**x).o, truth, low, torch.bfloat16).ok
    assert not error_budget("rounded", wrong, truth, low, torch.bfloat16).ok


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("engine_layout", [False, True])
def test_commit_writes_the_rounded_prefix_to_the_next_block(impl, engine_layout, device):
    """In place, at block num_blocks alone, whatever the strides; the mixture does not read it."""
    x = random_sources(3, 64, 2, torch.float16, spare=2, device=device)
    if engine_layout:
        x["bank"] = x["bank"].transpose(0, 1).contiguous().transpose(0, 1)
    plain = run(impl, x)
    before = x["bank"].clone()
    got = run(impl, x, commit=True)
    assert torch.equal(got.o, plain.o)
    assert torch.equal(x["bank"][2], got.prefix)
    for i in (0, 1, 3):
        assert torch.equal(x["bank"][i].nan_to_num(7.0), before[i].nan_to_num(7.0)), i
    first = {"prefix": x["prefix"], "bank": torch.full_like(x["bank"][:1], float("nan"))}
    assert torch.equal(run(impl, first, commit=True).o.half(), first["bank"][0])  # layer 0: the embedding becomes block 0


@pytest.mark.parametrize("impl", IMPLS)
def test_a_bad_source_is_lost_for_its_token_alone(impl, device):
    x = random_sources(4, 64, 3, device=device)
    x["bank"][1, 2, 5] = float("nan")
    bad = run(impl, x).o.isnan().any(-1)
    assert bad.tolist() == [False, False, True, False]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("output_norm", [False, True])
def test_agrees_with_fla(impl, output_norm, device):
    """fla-core's naive_attnres: other code, the same mixture and weights, blocks first and the prefix last."""
    try:
        from fla.ops.attnres.naive import naive_attnres
    except (ImportError, ValueError) as e:  # fla-core 0.5.2 raises ValueError under Triton 3.9
        pytest.skip(f"fla-core cannot be imported here: {e}")
    x = random_sources(5, 250, 4, output_norm=output_norm, seed=7, device=device)
    got = run(impl, x, return_weights=True)
    o, p = naive_attnres(x["score_proj"], [*x["bank"], got.prefix], x["score_norm"], x.get("output_norm"), x["eps"], return_weights=True)
    torch.testing.assert_close(got.o.float(), o, rtol=2e-6, atol=5e-6)
    torch.testing.assert_close(got.weights.float(), p.T, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_captured_tap(impl, device):
    """What the tiny model's next layer read, out of what its tap held."""
    c = Capture.load(TAP)
    x = {n: v.to(device) for n, v in c.tensors.items() if n not in ("o", "token_ids")} | {"eps": c.metadata["eps"]}
    got = run(impl, x, return_weights=True)
    truth, low = (attn_res_reference(**x, dtype=d).o for d in (torch.float64, torch.float32))
    assert_within_budget("recorded", c.tensors["o"], truth, low, torch.float32)
    assert_within_budget("o", got.o.float(), truth, low, torch.float32)


def test_no_tokens_is_no_work(device):
    x = random_sources(0, 64, 2, device=device)
    for impl in IMPLS:
        got = run(impl, x, return_weights=True)
        assert got.o.shape == (0, 64)
        assert got.weights.shape == (0, 3)


BAD = {
    "rank": ({"prefix": torch.zeros(2, 3, 8)}, "prefix: shape"),
    "integers": ({"prefix": torch.zeros(2, 8, dtype=torch.int32)}, "floating"),
    "pending dtype": ({"pending": torch.zeros(2, 8, dtype=torch.float16)}, "pending: shape"),
    "bank layout": ({"bank": torch.zeros(2, 3, 8)}, "transpose"),
    "bank dtype": ({"bank": torch.zeros(3, 2, 8, dtype=torch.bfloat16)}, "bank: shape"),
    "too many blocks": ({"num_blocks": 4}, "num_blocks: 4"),
    "negative blocks": ({"num_blocks": -1}, "num_blocks: -1"),
    "no room": ({"commit": True, "num_blocks": 3}, "room for the one"),
    "no bank": ({"bank": None, "num_blocks": 1}, "holds 0 blocks"),
    "commit without bank": ({"bank": None, "commit": True}, "holds 0 blocks"),
    "no weights": ({"score_proj": None}, "weights"),
    "weight size": ({"score_norm": torch.ones(7)}, "score_norm: shape"),
    "output norm size": ({"output_norm": torch.ones(9)}, "output_norm: shape"),
    "device": ({"score_norm": torch.ones(8, device="meta")}, "score_norm: is on meta"),
    "impl": ({"impl": "cuda"}, "impl: 'cuda'"),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_bad_input_says_what_is_wrong(change):
    given, words = change
    x = random_sources(2, 8, 3)
    for impl in IMPLS:
        with pytest.raises(BadInput, match=words):
            attn_res(**{**x, "impl": impl, **given})


def test_bfloat16_is_refused_under_the_interpreter(device):
    if device != "cpu":
        pytest.skip("the kernel is compiled here")
    with pytest.raises(Unsupported, match="bfloat16"):
        run("triton", random_sources(2, 64, 1, torch.bfloat16))


@pytest.mark.slow
def test_compiles_for_nvidia_and_amd():
    """The default configurations at Kimi-K3's width, in bf16, for sm90 and gfx950: no spill on AMD, pipelined copies on NVIDIA."""
    from k3lab.attn_res.triton_attn_res import default_config
    from k3lab.races.compiled import Build, compile_builds

    kernel = "k3lab.attn_res.triton_attn_res:attn_res_fwd_kernel"
    builds = []
    for target in ("cuda:90", "hip:gfx950"):
        for tokens in (1, 4096):
            c = default_config(tokens, 7168, 2, 8, pending=True)
            types = dict.fromkeys(("bank", "prefix", "pending", "score_norm", "score_proj", "output_norm", "o", "new_prefix"), "*bf16")
            values = {
                "weights": None, "BLOCKS": 8, "COMMIT": False, "HIDDEN": 7168, "EPS": 1e-5, "OUTPUT_EPS": 1e-5, "BL": c["BL"],
                "BD": 8192, "BS": 16, "STAGES": c["num_stages"], "LAST": c["LAST"],
            }  # fmt: skip
            signature = types | {"stride_block": "i32:16", "stride_token": "i32:16"} | {k: {"value": v} for k, v in values.items()}
            builds.append(Build(kernel, c["num_warps"], c["num_stages"], target, signature))
    for build, made in zip(builds, compile_builds(builds), strict=True):
        assert not made.error, made.error
        if build.target == "cuda:90":
            assert made.text("ttgir").count("async_copy_global_to_local") >= build.num_stages - 1
        else:
            assert re.findall(r"_spill_count: +(\d+)", made.text("amdgcn")) == ["0", "0"], build
