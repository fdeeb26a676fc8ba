"""The kernels of this package as targets of a sweep, and their published sweep: data/kernel_sweep.jsonl.

The tests marked gpu run some of them natively where there is a GPU; the others say nothing about one.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from scripts import script

import k3lab
from k3lab.errors import BadInput
from k3lab.provenance import sha256
from k3lab.races import sweep_targets, verdicts
from k3lab.races.sweep import SKIPPED, read_journal, run_sweep, stage_cases
from k3lab.races.sweep_targets import (
    ATTN_RES,
    FORMS,
    FUSED,
    KERNELS,
    configs_of,
    default_inputs,
    launch,
    problem,
    random_input,
    sources_input,
)  # fmt: skip
from k3lab.races.sweep_worker import Load, measure

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the inf and NaN that a select then drops


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "form"), [*((k, None) for k in KERNELS if k != ATTN_RES), *((ATTN_RES, f) for f in FORMS)])
def test_every_target_of_this_package_is_clean_on_the_cpu(kernel, form, device, monkeypatch):
    """Each kernel, by its own configs, writes every element and stays in the float64 budget, whatever its outputs held."""
    spec = random_input([1, 5] if kernel == "fused_recurrent_kda" else [1, 66], heads=1, head_dim=64, dtype="float32", seed=3)
    if form:
        spec = sources_input(form, tokens=3, hidden=250, blocks=5, dtype="float32", seed=3)
        monkeypatch.setattr(sweep_targets, "ROWS", 2)
    if kernel == "fused_halves" and device == "cpu":  # which float32 is kept from, for a device's sake
        monkeypatch.setattr("k3lab.kda.triton_fused.halves_fit", lambda *_: True)
    p = problem(kernel, spec, device)
    config = stage_cases(kernel, [spec], ("zero",))[0].config
    for fill in ("nan", "zero"):
        row = measure(p, launch, config, fill, 1, Load(device), {})
        assert row["status"] == "ok"
        assert (row["ok"], row["nonfinite"], row["outside"]) == (True, 0, 0), row["outputs"]


def test_cases_name_every_config_and_padding():
    """The nine configs of recompute_w_u at both paddings, on each input; the recurrent kernel has no padding."""
    inputs = [random_input([1, 2]), random_input([3])]
    cases = stage_cases("recompute_w_u", inputs, ("undefined", "zero"))
    assert len(cases) == 9 * 2 * 2
    names = {verdicts.config_name(c.config) for c in cases}
    assert len(names) == 18
    assert {"w4s4 undefined", "w2s3 zero"} < names
    assert all("padding" not in c.config for c in stage_cases("fused_recurrent_kda", inputs, ("undefined", "zero")))


def test_every_kernel_of_this_package_is_a_target():
    """By the names of their functions; each with the configs of its own module, and inputs of the size that is served."""
    from k3lab.attn_res import triton_attn_res
    from k3lab.kda import triton_chunk, triton_fused, triton_recurrent

    modules = (triton_chunk, triton_fused, triton_recurrent, triton_attn_res)
    assert {n.removesuffix("_fwd_kernel") for m in modules for n in vars(m) if n.endswith("_fwd_kernel")} == set(KERNELS)
    for kernel, name in FUSED.items():
        inputs = default_inputs(kernel)
        assert [c.config for c in stage_cases(kernel, inputs[:1], ("zero", "nan"))] == triton_fused.CONFIGS[name]
    assert [s["lengths"] for s in default_inputs("fused_state")] == [[1] * 128 + [4096], [4096]]
    assert default_inputs("fused_chunk")[0]["lower_bound"] is None
    cases = stage_cases(ATTN_RES, default_inputs(ATTN_RES))
    assert len(cases) == 2 * len(triton_attn_res.CONFIGS)
    assert {c.input["name"] for c in cases} == {f"4096 tokens x 7168, 8 blocks, {form}" for form in ("plain", "serving")}


def test_a_fused_forward_that_reads_what_it_did_not_write_is_seen(monkeypatch, device):
    """The buffers between its kernels hold the fill as well, so an unwritten element of one shows in the results."""
    from k3lab.kda import triton_fused

    p = problem("fused_chunk", random_input([1, 5], heads=1, head_dim=64, dtype="float32"), device)
    taken = []

    def planted(call, configs, check, empty):
        taken.append(configs)
        out = {n: empty(x.shape, dtype=x.dtype, device=x.device) for n, x in p.outputs.items()}
        for name, x in out.items():
            x.copy_(p.truth[name])
        out["o"][3] += empty((1,), dtype=torch.float32, device=device)

    monkeypatch.setattr(triton_fused, "chunk_kda", planted)
    nan, zero = (measure(p, launch, {"BK": 64}, fill, 2, None, {}) for fill in ("nan", "zero"))
    assert taken == [{"chunk": {"BK": 64}}] * 4
    assert (nan["nonfinite"], nan["outside"], nan["ok"]) == (64, 64, False)
    assert (zero["nonfinite"], zero["outside"], zero["ok"]) == (0, 0, True)
    rows = [{"kernel": "k", "config": {}, "input": "i", "fill": f, "runs": 2, **r} for f, r in (("nan", nan), ("zero", zero))]
    assert list(verdicts.judge([r | {"inputs": "x"} for r in rows])["verdict"]) == ["depends on initial memory"]


@pytest.mark.parametrize("fault", ["block", "bank", ""])
def test_a_mixture_that_leaves_out_its_block_or_writes_a_valid_one_is_seen(fault, monkeypatch, device):
    """In the serving form the new block lies behind the valid ones in one bank: it is a result, they are inputs."""
    from k3lab.attn_res import triton_attn_res

    p = problem(ATTN_RES, sources_input("serving", tokens=3, hidden=64, blocks=2, dtype="float32"), device)

    def planted(bank, commit, empty, **given):
        assert commit
        assert bank.shape == (3, 3, 64)
        assert bool(bank[2].isnan().all())
        empty(given["prefix"]).copy_(p.truth["o"])
        empty(given["prefix"]).copy_(p.truth["prefix"])
        if fault != "block":
            bank[2] = p.truth["block"]
        if fault == "bank":
            bank[1] += 1

    monkeypatch.setattr(triton_attn_res, "attn_res_triton", planted)
    row = measure(p, launch, {}, "nan", 2, None, {})
    if fault == "bank":
        assert row["error"] == "the launch changed its inputs: bank"
    else:
        assert (row["nonfinite"], row["ok"]) == ((3 * 64, False) if fault else (0, True))


def test_attn_res_takes_its_own_inputs_alone():
    with pytest.raises(BadInput, match="takes kind sources, form plain or serving"):
        problem(ATTN_RES, random_input([3]), "cpu")
    with pytest.raises(BadInput, match="takes kind sources, form plain or serving"):
        problem(ATTN_RES, sources_input("decode"), "cpu")
    with pytest.raises(BadInput, match="'sources' is not random or capture"):
        problem("intra", sources_input("plain"), "cpu")
    with pytest.raises(BadInput, match="dtype 'int99'"):
        problem(ATTN_RES, sources_input("plain", dtype="int99"), "cpu")


@pytest.fixture(scope="module")
def kernel_sweep():
    """data/make_kernel_sweep.py as a module."""
    return script("make_kernel_sweep")


def test_the_kernel_sweep_has_every_config_once_and_masked_zeros_last(kernel_sweep):
    """So that a budget that runs out leaves whole kernels; the stages alone have masked rows."""
    cases = kernel_sweep.cases()
    seen = [(c.kernel, verdicts.config_name(c.config), c.input["name"]) for c in cases]
    assert len(set(seen)) == len(seen)
    zeros = [c.config.get("padding") == "zero" for c in cases]
    assert zeros == sorted(zeros)
    assert len(cases) - sum(zeros) == sum(len(configs_of(k)) * len(default_inputs(k)) for k in KERNELS)
    assert sum(zeros) == sum(c.config.get("padding") == "undefined" for c in cases)


def test_the_published_kernel_sweep_is_whole_where_it_says_so(kernel_sweep, tmp_path):
    """data/kernel_sweep.jsonl as measured on an H200: one finding, 200 runs a case; its card names all that has no row.

    The finding is a launch configuration that nothing offers any more.
    """
    path = Path(k3lab.__file__).parents[1] / "data" / "kernel_sweep.jsonl"
    rows, text = read_journal(path), path.with_suffix(".md").read_text()
    table = verdicts.judge(rows)
    found = table[table["finding"]][["kernel", "verdict"]].to_numpy().tolist()
    assert found == [["fused_chunk", "illegal access"]]
    broken = next(r["config"] for r in rows if r["status"] == "illegal access")
    assert broken not in configs_of("fused_chunk")
    assert len(configs_of("fused_chunk")) == len({json.dumps(r["config"]) for r in rows if r["kernel"] == "fused_chunk"}) - 1
    assert set(table["runs"][table["excluded_rate"].notna()]) == {200}
    assert sha256(path) in text
    assert f"runs: {kernel_sweep.missing(rows)}." in text
    without = [r for r in rows if r["kernel"] != "intra"]
    assert f"intra ({len(configs_of('intra'))} cases)" in kernel_sweep.missing(without)
    late = [r | {"status": SKIPPED} if r["kernel"] == "intra" else r for r in rows]
    assert kernel_sweep.missing(late) == kernel_sweep.missing(without)
    copy = tmp_path / path.name
    copy.write_text("".join(json.dumps(r) + "\n" for r in reversed(rows)))
    kernel_sweep.publish(copy, "3", "this test")
    assert copy.read_bytes() == path.read_bytes()


def test_a_kernel_sweep_of_two_machines_is_refused(kernel_sweep, tmp_path, monkeypatch):
    row = {"key": "a", "kernel": "k", "config": {}, "input": "i", "fill": "nan", "runs": 1, "status": "ok", "where": {"device": "one"}}
    (tmp_path / "j.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "kernel_sweep.jsonl").write_text(json.dumps(row | {"key": "b", "where": {"device": "two"}}) + "\n")
    monkeypatch.setattr(sys, "argv", ["x", "--merge", str(tmp_path / "j.jsonl"), "--out", str(tmp_path)])
    with pytest.raises(BadInput, match="write to another folder"):
        kernel_sweep.main()
    assert len(read_journal(tmp_path / "kernel_sweep.jsonl")) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*FUSED, ATTN_RES])
def test_gpu_sweep_of_the_fast_kernels_is_clean(kernel):
    """One config of each in bfloat16, ragged and at the width that is served, in a process of its own."""
    spec = random_input([1] * 16 + [300], heads=2) if kernel in FUSED else sources_input("serving", tokens=200)
    rows = run_sweep(stage_cases(kernel, [spec], configs=configs_of(kernel)[:1]), 20, progress=False)
    assert [r["status"] for r in rows] == ["ok"] * 2
    assert not verdicts.judge(rows)["finding"].any()


@pytest.mark.gpu
def test_gpu_sweep_of_recompute_w_u_runs_natively():
    """Two configs on a GPU, with load beside them: rows are ok and in the budget. A racy device fails here."""
    inputs = [random_input([1] * 16 + [300], heads=2)]
    rows = run_sweep(stage_cases("recompute_w_u", inputs, configs=configs_of("recompute_w_u")[:2]), 5, load=True, progress=False)
    assert [r["status"] for r in rows] == ["ok"] * 4
    assert not verdicts.judge(rows)["finding"].any()
