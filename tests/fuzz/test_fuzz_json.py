"""JSON, CSV, TOML, assembly and weights that were damaged or made up, through their readers and the commands that take them."""

import json
import struct
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import torch
from hostile import CANARY, ROOT, SCALARS, VALUES, cases, command, dumped, garbled, json_files, mutated, own_errors, watch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from k3lab.drafter import dflash
from k3lab.drafter.acceptance import check_counts
from k3lab.drafter.counts import PROMPTS_FORMAT, load_prompts
from k3lab.drafter.evaldelta import compare, read_table
from k3lab.drafter.published import published, published_streams
from k3lab.panels import race_panel
from k3lab.races import lint as rules_module
from k3lab.races import matrix, sweep
from k3lab.races.cli import _signature
from k3lab.races.compiled import Build, compile_builds
from k3lab.races.events import unpack
from k3lab.races.kernel import make_kernel, read_input
from k3lab.races.lds import analyse
from k3lab.races.verdicts import judge
from k3lab.tiny import accuracy, model

DATA = ROOT / "data"
KERNEL = "recompute_w_u_fwd_kernel"
CONFIGS = [
    {"architectures": ["K3DSparkModel"], "hidden_size": 7168, "num_target_layers": 5, "target_num_hidden_layers": 93,
     "target_layer_ids": [2, 23, 47, 71, 89], "markov_rank": 256, "fc_norm": True, "aux_hidden_stream": "attn_res"},
    {"architectures": ["DFlashDraftModel"], "hidden_size": 7168, "dflash_config": {"target_layer_ids": [19, 37], "aux_hidden_stream": "x"}},
    {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "eagle_aux_hidden_state_layer_ids": [48, 68, 88], "_name_or_path": "a/b"},
]  # fmt: skip
RESULTS = {
    "results": {"gsm8k": {"alias": "x", "exact_match,strict-match": 0.8901, "exact_match_stderr,strict-match": 0.0086, "sample_len": 9}},
    "n-shot": {"gsm8k": 5}, "n-samples": {"gsm8k": {"original": 1319, "effective": 1319}},
    "higher_is_better": {"gsm8k": {"exact_match": True}},
}  # fmt: skip
TABLE = b"""|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value |   |Stderr|
|-----|------:|----------------|-----:|-----------|---|-----:|---|-----:|
|gsm8k|      3|flexible-extract|     5|exact_match|^  |0.8901|+-  |0.0086|
|     |       |strict-match    |     5|exact_match|^  |0.8901|+-  |0.0086|
"""
RACY = {"kwargs": {"BK": 64}, "num_warps": 4, "num_stages": 4, "num_ctas": 1}
TRITON_CACHE = {"key": [96, 128, "torch.bfloat16"], "configs_timings": [[RACY, [0.1, 0.1, 0.2]], [{**RACY, "num_stages": 2}, float("inf")]]}
FLA_CACHE = {
    "kernel_name": KERNEL, "triton_version": "3.6.0", "autotune_entries": {"d4": {"autotune_key": [96], "config": RACY}},
    "default_config": RACY,
}  # fmt: skip
TUNED = f"""INFO started
Autotuning kernel {KERNEL} with config num_warps: 4, num_stages: 4
Triton autotuning for function {KERNEL},
with key as (96, 128),
finished after 3.21s,
best config selected: BK: 64, num_warps: 4, num_stages: 4, num_ctas: 1;
Triton autotuning for function {KERNEL} finished after 3.21s; best config selected: num_warps: 4, num_stages: 4;
""".encode()
SIGNATURE = {"x": "*bf16", "N": "i32:16", "BLOCK": 64, "P": None}
CASE = {"name": "two blocks", "scalars": {"T": 128}, "buffers": {"cu_seqlens": [0, 64, 65]}, "workgroup": [0, 0, 0]}


def some(lines: bytes, n: int) -> bytes:
    return b"\n".join(lines.split(b"\n")[:n]) + b"\n"


# ---------------------------------------------------------------- commands


@cases(40)
@given(data=st.data())
def test_a_drafter_config(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    path = folder / "config.json"
    path.write_bytes(data.draw(json_files(data.draw(st.sampled_from(CONFIGS)))))
    engine = data.draw(st.sampled_from(["vllm", "vllm-ascend", "sglang", "tensorrt-llm", "tokenspeed", "atom", "x"]))
    version = data.draw(st.sampled_from(["0.33.0", "unknown", "main", "1!2.0rc1", "v0.1", "", "9" * 400]))
    pipeline = data.draw(st.sampled_from(["1", "2", "7", "93", "94", "0", "-3", "1000000000"]))
    env = data.draw(st.sampled_from(["A=", "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1", "VLLM_PP_LAYER_PARTITION=1,2", f"X={'y' * 999}"]))
    args = ["passport", path, "--engine", engine, f"--version={version}", f"--pipeline={pipeline}", "--env", env]
    command(folder, [*args, *data.draw(st.sampled_from([[], ["--json"]]))], out=True)


@cases(40)
@given(data=st.data())
def test_results_of_lm_eval(tmp_path_factory, data):
    """JSON, the printed table and CSV, damaged, before or after; --n of any size."""
    folder = tmp_path_factory.mktemp("run")
    csv = (DATA / "published" / "vllm_pr_50649_gsm8k.csv").read_bytes()
    forms = {"a.json": json_files(RESULTS), "a.txt": garbled(TABLE), "a.csv": garbled(csv)}
    name = data.draw(st.sampled_from(sorted(forms)))
    sound = {"a.json": json.dumps(RESULTS).encode(), "a.txt": TABLE, "a.csv": csv}[name]
    (folder / name).write_bytes(data.draw(forms[name]))
    (folder / f"b{name}").write_bytes(sound)
    run = ":before" if name == "a.csv" else ""
    pair = [f"{folder / name}{run}", f"{folder / ('b' + name)}{run}"]
    n = data.draw(st.sampled_from([[], [], ["--n", "1319"], ["--n", "1"], ["--n", "-4"], ["--n", str(10**30)]]))
    command(folder, ["evaldelta", *data.draw(st.permutations(pair)), *n, *data.draw(st.sampled_from([[], ["--json"]]))], out=True)


@cases(40)
@given(data=st.data())
def test_autotuning_records(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    forms = {f"{KERNEL}.autotune.json": json_files(TRITON_CACHE), "fla.json": json_files(FLA_CACHE), "a.log": garbled(TUNED)}
    name = data.draw(st.sampled_from(sorted(forms)))
    (folder / name).write_bytes(data.draw(forms[name]))
    given_ = data.draw(st.sampled_from([[folder / name], [folder]]))
    more = data.draw(st.sampled_from([[], ["--json"], ["--target", "hip:gfx950"], ["--target", "hip:gfx950", "--triton", "3.6.0"]]))
    command(folder, ["lint", *given_, *more], out=True)


@cases(20)
@given(text=garbled(rules_module.RULES.read_bytes()))
def test_rules_of_a_user(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("run")
    (folder / "rules.toml").write_bytes(text)
    (folder / "a.log").write_bytes(TUNED)
    command(folder, ["lint", folder / "a.log", "--rules", folder / "rules.toml", "--triton", "3.6.0"])


@pytest.fixture(scope="module")
def assembly() -> tuple[str, str]:
    """The assembly and TTGIR of the racy config, compiled for gfx950 without a GPU."""
    build = Build(f"k3lab.kda.triton_chunk:{KERNEL}", 4, 4, "hip:gfx950", {"PADDING": "undefined"}, pointer_range=False, async_copy=True)
    (made,) = compile_builds([build])
    return made.text("amdgcn"), made.text("ttgir")


@cases(25)
@given(data=st.data())
def test_assembly(tmp_path_factory, assembly, data):
    """Instructions, operands, descriptor and the files beside it, damaged: refused by line, or analysed."""
    folder = tmp_path_factory.mktemp("run")
    amdgcn, ttgir = (x.encode() for x in assembly)
    (folder / "k.amdgcn").write_bytes(data.draw(garbled(amdgcn)))
    if data.draw(st.booleans()):
        (folder / "k.ttgir").write_bytes(data.draw(garbled(ttgir)))
        (folder / "k.json").write_bytes(data.draw(json_files({"num_warps": 4, "shared": 65536, "name": KERNEL})))
    args = data.draw(st.sampled_from([[], ["--inputs", "length1"], ["--args", "a,b,T,cu_seqlens,chunk_indices"]]))
    command(folder, ["lds", folder / "k.amdgcn", "--json", *args])


OPERANDS = [
    "v0",
    "v[0:3]",
    "v255",
    "v999",
    "a0",
    "s0",
    "s[0:1]",
    "s[4:7]",
    "vcc",
    "exec",
    "m0",
    "0",
    "-1",
    "0x7fffffff",
    "64",
    "off",
    "x",
    "ttmp3",
]
OPS = [
    "s_mov_b32", "s_mov_b64", "s_add_u32", "s_lshl_b32", "s_and_saveexec_b64", "s_cmp_lt_i32", "s_cbranch_scc1", "s_branch",
    "v_mov_b32_e32",
    "v_add_u32_e32", "v_lshlrev_b32_e32", "v_cmp_gt_i32_e64", "v_readfirstlane_b32", "v_cndmask_b32_e64", "v_mad_u64_u32", "ds_read_b128",
    "ds_write_b64", "ds_read2st64_b32", "ds_bpermute_b32", "global_load_lds_dwordx4", "buffer_load_dword", "global_load_dwordx2",
    "s_load_dwordx4", "scratch_store_dword", "s_waitcnt", "s_barrier", "v_bitop3_b32", "v_mfma_f32_16x16x32_bf16", "s_nop", "bogus",
]  # fmt: skip
ENDS = ["", " offset:65535", " lds", " vmcnt(0)", " lgkmcnt(0)", " bitop3:0x1", " bitop3:x", " offen", " offset:x", " row_shr:1", " .L1"]


@cases(40)
@given(data=st.data())
def test_programs_that_no_compiler_writes(tmp_path_factory, data):
    """Known and unknown instructions with any operands: every one is executed, or refused by its line."""
    line = st.builds(
        lambda op, operands, end: f"\t{op} {', '.join(operands)}{end}",
        st.sampled_from(OPS), st.lists(st.sampled_from(OPERANDS), max_size=4), st.sampled_from(ENDS),
    )  # fmt: skip
    body = data.draw(st.lists(st.one_of(line, st.sampled_from([".L1:", "\ts_branch .L1", "\ts_barrier", "\ts_endpgm"])), max_size=8))
    text = '\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\ndemo:\n' + "\n".join(body)
    text += "\n\ts_endpgm\n\t.amdhsa_kernel demo\n\t\t.amdhsa_user_sgpr_count 2\n\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1\n"
    text += "\t.offset: 0\n\t.size: 8\n\t.value_kind: global_buffer\n    .max_flat_workgroup_size: 128\n"
    with watch(tmp_path_factory.getbasetemp()), own_errors():
        analyse(make_kernel(text), ["full"])


@cases(25)
@given(data=st.data())
def test_inputs_and_signatures(tmp_path_factory, assembly, data):
    folder = tmp_path_factory.mktemp("run")
    (folder / "case.json").write_bytes(data.draw(json_files(CASE)))
    (folder / "signature.json").write_bytes(data.draw(json_files(SIGNATURE)))
    (folder / "k.amdgcn").write_text(assembly[0])
    (folder / "k.ttgir").write_text(assembly[1])
    with watch(folder), own_errors():
        read_input(folder / "case.json")
    with watch(folder), own_errors():
        _signature(str(folder / "signature.json"))
    if data.draw(st.integers(0, 3)) == 0:
        command(folder, ["lds", folder / "k.amdgcn", "--inputs", folder / "case.json", "--json"])


def test_a_signature_and_a_case_name_no_code(tmp_path, monkeypatch):
    (tmp_path / f"{CANARY}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for document in ({"x": f"{CANARY}:f"}, {"name": f"__import__('{CANARY}')", "scalars": {CANARY: 1}}):
        (tmp_path / "a.json").write_text(json.dumps(document))
        with watch(tmp_path):
            for read in (_signature, read_input):
                with own_errors():
                    read(str(tmp_path / "a.json"))


# ---------------------------------------------------------------- the data that notebooks read


def journal(name: str, n: int) -> list:
    return [json.loads(x) for x in (DATA / name).read_text().splitlines()[:n]]


@st.composite
def journals(draw: st.DrawFn, name: str, n: int) -> bytes:
    """The first rows of a shipped journal, one of them changed, or the bytes garbled."""
    rows = journal(name, n)
    if draw(st.booleans()):
        return draw(garbled("\n".join(map(json.dumps, rows)).encode() + b"\n"))
    at = draw(st.integers(0, n - 1))
    rows[at] = draw(mutated(rows[at]))
    return "\n".join(map(dumped, rows)).encode() + b"\n" * draw(st.integers(0, 1))


@cases(30)
@given(text=journals("race_matrix.jsonl", 6))
def test_a_race_matrix(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp()
    (folder / "m.jsonl").write_bytes(text)
    with watch(folder), own_errors():
        matrix.verdict_table(pd.DataFrame(matrix.read_journal(folder / "m.jsonl")))


@cases(30)
@given(data=st.data())
def test_race_events(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    keys = [r for r in journal("race_matrix.jsonl", 2304) if r["target"] == "hip:gfx950" and r["async"] == "on"][:40]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, keys)) + "\n")
    (folder / "e.jsonl").write_bytes(data.draw(journals("race_events.jsonl", 3)))
    with watch(folder), own_errors():
        cells = race_panel.load(folder / "m.jsonl", folder / "e.jsonl")
        for row in cells.values():
            with own_errors():
                unpack(row)


@cases(30)
@given(text=journals("race_sweep.jsonl", 4))
def test_a_sweep(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp()
    (folder / "s.jsonl").write_bytes(text)
    with watch(folder), own_errors():
        judge(sweep.read_journal(folder / "s.jsonl"))


@cases(25)
@given(data=st.data())
def test_an_accuracy_record(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    record = json.loads((DATA / "accuracy.json").read_text())
    record = {**record, "rows": [{k: v for k, v in r.items() if not isinstance(v, list)} for r in record["rows"][:4]]}
    (folder / "a.json").write_bytes(data.draw(json_files(record)))
    with watch(folder), own_errors():
        frame = accuracy.load(folder / "a.json")
        accuracy.disagreement(frame)
        accuracy.p_of_ratio(frame, "chunk_all", 0.9)


@cases(25)
@given(data=st.data())
def test_published_tables_and_counts(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    name = data.draw(st.sampled_from(["published/drafter_acceptance.csv", "published/eagle3_streams.csv", "drafter_counts.csv"]))
    (folder / "a.csv").write_bytes(data.draw(garbled(some((DATA / name).read_bytes(), 8))))
    with watch(folder), own_errors():
        if name == "drafter_counts.csv":
            try:
                frame = pd.read_csv(folder / "a.csv")
            except (ValueError, OSError, pd.errors.ParserError):
                return  # pandas reads it, not this package
            check_counts(frame)
        else:
            (published if "acceptance" in name else published_streams)(path=folder / "a.csv")


@pytest.fixture(scope="module")
def weights() -> dict[str, bytes]:
    """A small target, a small drafter and a few prompts, as files."""
    target = model.TinyK3(model.SMALL)
    drafter = dflash.DFlash(dflash.DFlashConfig(taps=(0, 1), block=3, layers=1, heads=2, mlp_width=16, hidden=16))
    about = {
        "format": dflash.FORMAT,
        "config": json.dumps(asdict(drafter.config)),
        "stream": "prefix",
        "seed": "0",
        "target_sha256": "0" * 64,
    }
    sizes = json.dumps({"prompt_len": 2, "new_tokens": 3, "domain": ["code", "text"]})

    def plain(module: torch.nn.Module) -> dict:
        return {n: x.detach().contiguous().clone() for n, x in module.state_dict().items()}

    return {
        "target": save(plain(target), {"format": model.FORMAT, "config": model.SMALL.to_json()}),
        "drafter": save(plain(drafter), about),
        "prompts": save({"tokens": torch.zeros(2, 8, dtype=torch.int16)}, {"format": PROMPTS_FORMAT, "prompts": sizes}),
    }


@cases(60)
@given(data=st.data())
def test_weights_and_prompts(tmp_path_factory, weights, data):
    """The header, and the configuration that its metadata holds, changed: sizes that do not fit are refused before they are allocated."""
    folder = tmp_path_factory.getbasetemp()
    what = data.draw(st.sampled_from(sorted(weights)))
    whole = weights[what]
    length = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:length])
    if data.draw(st.integers(0, 2)):
        about = header["__metadata__"]
        key = data.draw(st.sampled_from([k for k in about if about[k].startswith("{")] or ["format"]))
        inner = json.loads(about[key]) if about[key].startswith("{") else about[key]
        about[key] = dumped(data.draw(st.one_of(mutated(inner), mutated(inner), SCALARS)))
    else:
        header = data.draw(mutated(header))
    text = json.dumps(header).encode()
    path = folder / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[length:])
    with watch(folder), own_errors():
        {"target": model.load, "drafter": dflash.load, "prompts": load_prompts}[what](path)


@cases(20)
@given(value=VALUES, name=st.sampled_from(["a.json", "a.csv", "a.txt"]))
def test_any_text_is_no_table(tmp_path_factory, value, name):
    folder = tmp_path_factory.getbasetemp()
    path: Path = folder / name
    path.write_text(json.dumps(value))
    with watch(folder), own_errors():
        compare(read_table(path), read_table(path))
