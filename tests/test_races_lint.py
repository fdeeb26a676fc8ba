"""Autotuning records in every form that users have, the rules they are matched with, and the lint command."""

import json
import re
import time
from pathlib import Path

import pytest

from k3lab.__main__ import main
from k3lab.errors import BadInput
from k3lab.races.autotune import Reading, Record, parse_config, read_log, read_paths, target_of_gpu
from k3lab.races.lint import all_rules, lint, load_rules
from k3lab.races.matrix import read_journal

KERNEL = "recompute_w_u_fwd_kernel"
RACY = "num_warps: 4, num_ctas: 1, num_stages: 4, maxnreg: None"
SAFE = "num_warps: 4, num_ctas: 1, num_stages: 2, maxnreg: None"
OLD = RACY.replace("maxnreg", "num_buffers_warp_spec: 0, num_consumer_groups: 0, reg_dec_producer: 0, reg_inc_consumer: 0, maxnreg")
KEY = "(96, 128, 128, 64, 64, 64, True, 'torch.bfloat16', 'torch.float32')"


def one_line(config=RACY, kernel=KERNEL):
    return [f"Triton autotuning for function {kernel} finished after 3.21s; best config selected: {config};"]


def four_lines(config=RACY, kernel=KERNEL, key=KEY):
    return [
        f"Triton autotuning for function {kernel},", f"with key as {key},", "finished after 3.21s,", f"best config selected: {config};"
    ]  # fmt: skip


def write(path, *lines):
    path.write_text("".join(x + "\n" for x in lines))
    return path


def read(lines):
    reading = Reading()
    read_log("x.log", lines, reading)
    return reading


PREFIXES = {
    "bare": "", "vLLM": "(Worker_TP3 pid=4711) ", "docker": "2026-05-01T14:24:50.{n}89Z ", "torchrun": "[rank3]: ",
    "vLLM with a clock": "(EngineCore_DP0 pid=4711) INFO 05-01 14:24:5{n} [x.py:101] ", "colour": "\x1b[36m(W pid=1)\x1b[0m ",
}  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES.keys())
@pytest.mark.parametrize(
    "form",
    [one_line(), one_line(OLD), four_lines(), four_lines(f"{RACY}, ir_override: None")],
    ids=["3.0", "3.2", "3.4", "3.9"],
)
def test_every_printed_form_is_read_behind_every_prefix(tmp_path, form, prefix):
    log = write(tmp_path / "server.log", "INFO nothing to do with it", *[prefix.format(n=n) + line for n, line in enumerate(form)])
    findings, unread = lint([log], "hip:gfx950", "3.6.0")
    assert unread.empty
    assert findings["rule"].tolist() == ["recompute-w-u-gfx950-stages4"]
    row = findings.iloc[0]
    assert (row["line"], row["kernel"], row["config"]) == (1 + len(form), KERNEL, "num_warps: 4, num_stages: 4")
    assert row["key"] == (KEY if len(form) == 4 else "")
    assert not row["conditional"]
    assert "pointer_range" in row["holds_if"]
    assert row["citation"]
    assert row["fix"]


def test_triton_prints_its_configs_as_they_are_read_here():
    triton = pytest.importorskip("triton", reason="Triton has no build for this platform")
    config = parse_config(str(triton.Config({"BK": 64, "EVEN": True, "MODE": "a: b"}, num_warps=8, num_stages=3)))
    assert {k: config[k] for k in ("BK", "EVEN", "MODE", "num_warps", "num_stages", "num_ctas")} == {
        "BK": 64, "EVEN": True, "MODE": "a: b", "num_warps": 8, "num_stages": 3, "num_ctas": 1,
    }  # fmt: skip


def test_candidates_are_told_from_winners(tmp_path):
    """A racy config that lost this time may win another time; only a winner is a finding for the exit status."""
    lines = [f"Autotuning kernel {KERNEL} with config {c}" for c in (SAFE, RACY)]
    log = write(tmp_path / "a.log", *lines, "Autotuning failed with out of resource: shared memory", *one_line(SAFE))
    findings, unread = lint([log], "hip:gfx950", "3.7.1")
    assert findings["role"].tolist() == ["candidate"]
    assert unread.empty
    assert main(["lint", str(log), "--target", "hip:gfx950", "--triton", "3.7.1"]) == 0


def test_interleaved_ranks_are_told_apart_by_their_prefix():
    a = [f"(W0 pid=1) {x}" for x in four_lines(RACY, "kernel_a", "(1,)")]
    b = [f"(W1 pid=2) {x}" for x in four_lines(SAFE, "kernel_b", "(2,)")]
    mixed = [a[0], b[0], b[1], a[1], b[2], b[3], a[2], a[3]]
    reading = read(mixed)
    assert [(r.kernels, r.config["num_stages"], r.key) for r in reading.records] == [(("kernel_b",), 2, "(2,)"), (("kernel_a",), 4, "(1,)")]
    assert not reading.not_understood


def test_a_config_that_may_belong_to_two_kernels_is_reported_and_stays_conditional(tmp_path):
    """Eight ranks, no prefix: the winner is not guessed and not lost."""
    a, b = four_lines(RACY), four_lines(SAFE, "other_kernel")
    log = write(tmp_path / "a.log", a[0], b[0], b[1], a[1], a[2], b[2], a[3], b[3])
    findings, unread = lint([log], "hip:gfx950", "3.6.0")
    assert unread["line"].tolist() == [7]
    assert "without a prefix" in unread.iloc[0]["reason"]
    assert findings["conditional"].tolist() == [True]
    assert "not of other_kernel" in findings.iloc[0]["holds_if"]


def test_ranks_that_tune_one_kernel_at_once_give_a_certain_kernel():
    a, b = four_lines(RACY), four_lines(SAFE)
    reading = read([a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]])
    assert [(r.kernels, r.config["num_stages"]) for r in reading.records] == [((KERNEL,), 4), ((KERNEL,), 2)]
    assert not reading.not_understood


@pytest.mark.parametrize(
    ("lines", "line", "reason"),
    [
        (four_lines()[:3], 1, "no line 'best config selected'"),
        (four_lines()[3:], 1, "without 'Triton autotuning for function'"),
        (one_line("num_warps: 4"), 1, "not a config with num_warps and num_stages: num_warps: 4"),
        (["x", *one_line("gibberish")], 2, "not a config"),
        (one_line(f"num_warps: {'9' * 5000}, num_stages: 4"), 1, "not a config"),
        ([f"Triton autotuning for function {KERNEL} was interrupted by a signal"], 1, "goes on otherwise"),
    ],
)
def test_a_malformed_record_is_listed_by_line(lines, line, reason):
    reading = read(lines)
    assert not reading.records
    [(_, at, why)] = reading.not_understood
    assert at == line
    assert reason in why


def test_foreign_lines_are_counted_and_are_no_errors():
    lines = ["INFO started", "finished after 3s", "with key as x", "autotuning is fun", *one_line()]
    reading = read(lines)
    assert (len(reading.records), reading.not_understood, reading.counts["foreign lines"]) == (1, [], 4)


def triton_cache(folder, *timings, name=KERNEL):
    """What Triton writes: failed configs are Infinity, which is not strict JSON."""
    pairs = [[{"kwargs": {"BK": 64}, "num_warps": w, "num_ctas": 1, "num_stages": s, "maxnreg": None, "pre_hook": None}, t]
             for w, s, t in timings]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.autotune.json").write_text(json.dumps({"key": [96, 128, "torch.bfloat16"], "configs_timings": pairs}))
    return folder


def test_triton_cache_winner_is_the_least_timing_list(tmp_path):
    inf = [float("inf")] * 3
    folder = triton_cache(tmp_path / "hash", (4, 2, [0.12, 0.1, 0.3]), (4, 4, [0.11, 0.2, 0.4]), (8, 4, inf), (2, 3, [0.11, 0.3, 0.3]))
    assert "Infinity" in next(folder.iterdir()).read_text()
    (folder / f"{KERNEL}.json").write_text('{"num_warps": 4, "shared": 1}')  # Triton's launch metadata beside it
    (folder / f"{KERNEL}.so").write_bytes(b"\0\1")
    findings, unread = lint([tmp_path], "hip:gfx950", "3.7.1")
    assert unread.empty
    got = [(r.role, r.config, r.where) for r in findings.itertuples()]
    assert got == [
        ("winner", "BK: 64, num_warps: 4, num_stages: 4", "Triton cache"),
        ("candidate", "BK: 64, num_warps: 2, num_stages: 3", "Triton cache"),
    ]
    assert findings.iloc[0]["key"] == '[96, 128, "torch.bfloat16"]'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"key": [1], "configs_timings": [[{"kwargs"', "not JSON"),
        ("[]", "no list configs_timings"),
        ('{"configs_timings": [[1, 2]]}', "not a pair of a config"),
        ('{"configs_timings": [[{"kwargs": {}, "num_warps": 4, "num_stages": 2}, [NaN]]]}', "not a pair"),
        ('{"configs_timings": [[{"kwargs": {}, "num_warps": 4, "num_stages": 2}, [Infinity]]]}', "there is no winner"),
    ],
)
def test_a_broken_cache_is_listed_and_the_others_are_still_read(tmp_path, content, reason):
    (tmp_path / "a.autotune.json").write_text(content)
    triton_cache(tmp_path, (4, 4, [0.1]), (4, 2, [0.2]))
    findings, unread = lint([tmp_path], "hip:gfx950", "3.6.0")
    assert len(findings) == 1
    assert reason in unread.iloc[0]["reason"]
    assert unread.iloc[0]["file"].endswith("a.autotune.json")


def test_fla_config_cache_names_version_and_gpu_itself(tmp_path):
    config = {"kwargs": {}, "num_warps": 4, "num_ctas": 1, "num_stages": 4, "maxnreg": None}
    content = {
        "kernel_name": KERNEL, "triton_version": "3.8.0", "default_config": config,
        "autotune_entries": {"d41d8cd98f00b204": {"autotune_key": [96, 128], "config": config}, "broken": {"autotune_key": [1]}},
    }  # fmt: skip
    for gpu in ("AMD_Instinct_MI355X", "NVIDIA_H200"):
        (tmp_path / gpu).mkdir()
        (tmp_path / gpu / f"{KERNEL}.json").write_text(json.dumps(content, indent=1))
    # the file's own word goes before the caller's
    findings, unread = lint([tmp_path], "cuda:90", "3.9.0")
    assert set(findings["file"]) == {str(tmp_path / "AMD_Instinct_MI355X" / f"{KERNEL}.json")}
    assert findings["conditional"].tolist() == [False, False]
    assert "fuzzy" in findings.iloc[0]["note"]
    assert "every shape" in findings.iloc[1]["note"]
    assert '"d41d8cd98f00b204"' in (tmp_path / "NVIDIA_H200" / f"{KERNEL}.json").read_text().splitlines()[findings.iloc[0]["line"] - 1]
    assert len(unread) == 2
    assert "broken" in unread.iloc[0]["reason"]


@pytest.mark.parametrize(
    ("folder", "target"),
    [("AMD_Instinct_MI300X", "hip:gfx942"), ("NVIDIA_H100_80GB_HBM3", "cuda:90"), ("NVIDIA_GB200", "cuda:100"),
     ("NVIDIA_B300_SXM6", "cuda:103"), ("NVIDIA_A100", ""), ("configs", "")],
)  # fmt: skip
def test_target_of_an_fla_folder(folder, target):
    assert target_of_gpu(folder) == target


def findings_of(kernel, config, target=None, triton=None, tmp_path=None):
    found, _ = lint([write(tmp_path / "x.log", *one_line(config, kernel))], target, triton)
    return {r.rule: r.conditional for r in found.itertuples()}


def config(warps, stages, **kwargs):
    return ", ".join([*[f"{k}: {v}" for k, v in kwargs.items()], f"num_warps: {warps}, num_ctas: 1, num_stages: {stages}, maxnreg: None"])


@pytest.mark.parametrize(
    ("kernel", "chosen", "target", "triton", "expected"),
    [
        (KERNEL, config(8, 4), "hip:gfx950", "3.8.0", {"recompute-w-u-gfx950-stages4": False}),
        ("recompute_w_u_fwd_kda_kernel", config(2, 4), "gfx950:sramecc+:xnack-", "3.6.0+rocm7", {"recompute-w-u-gfx950-stages4": False}),
        (KERNEL, config(8, 4), "hip:gfx950", "3.9.0", {}),
        (KERNEL, config(8, 4), "hip:gfx950", "3.5.1", {}),
        (KERNEL, config(8, 4), "hip:gfx950", None, {"recompute-w-u-gfx950-stages4": True}),
        (KERNEL, config(8, 4), None, "3.8.0", {"recompute-w-u-gfx950-stages4": True, "recompute-w-u-gfx942-stages4": True}),
        (KERNEL, config(8, 4), "cuda:90", "3.8.0", {}),
        (KERNEL, config(4, 3), "hip:gfx950", "3.7.1", {"recompute-w-u-gfx950-stages3": False}),
        (KERNEL, config(8, 3), "hip:gfx950", "3.7.1", {}),
        (KERNEL, config(4, 3), "hip:gfx950", "3.8.0", {}),
        (KERNEL, config(8, 3), "hip:gfx942", "3.7.1", {"recompute-w-u-gfx942-stages3": False}),
        (KERNEL, config(4, 2), None, None, {}),
        ("my_" + KERNEL, config(4, 4), None, None, {}),
        ("_chunk_scan_fwd_kernel", config(4, 4, BLOCK_SIZE_M=128), "sm_90", "3.6.0", {"wgmma-register-operand-sm90": True}),
        ("_chunk_scan_fwd_kernel", config(4, 1, BLOCK_SIZE_M=128), "sm_90", "3.6.0", {}),
        ("_chunk_scan_fwd_kernel", config(2, 4, BLOCK_SIZE_M=128), "sm_90", "3.6.0", {}),
        ("_chunk_scan_fwd_kernel", config(4, 4, BLOCK_SIZE_M=32), "sm_90", "3.6.0", {}),
        ("_chunk_scan_fwd_kernel", config(4, 4), "sm_90", "3.6.0", {"wgmma-register-operand-sm90": True}),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", config(4, 2, BV=64), "cuda:103", "3.7.0", {"fla-945-warps4": False}),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", config(8, 2, BV=32), "cuda:103", "3.7.0", {"fla-945-warps8": False}),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", config(2, 2, BV=64), "cuda:103", "3.7.0", {}),
        ("chunk_fwd_kernel_o", config(8, 3, BK=128, BV=128), "cuda:103", "3.6.0", {"fla-1228": False}),
        ("prepare_wy_repr_bwd_kernel", config(4, 2), "cuda:90", "3.7.1", {"fla-988": True}),
        ("chunk_gated_delta_rule_fwd_kkt_solve_kernel", config(1, 1), "cuda:100", "3.7.1", {"fla-913": True}),
    ],
)  # fmt: skip
def test_rules_apply_where_their_evidence_says(kernel, chosen, target, triton, expected, tmp_path):
    assert findings_of(kernel, chosen, target, triton, tmp_path) == expected


def test_the_recompute_rules_say_what_the_shipped_matrix_says():
    """The rules of recompute_w_u hold exactly where data/race_matrix.jsonl has a race, for both targets."""
    rules = all_rules()
    rows = [
        r for r in read_journal(Path(__file__).parents[1] / "data" / "race_matrix.jsonl") if r["async"] == "on" and not r["pointer_range"]
    ]
    raced: dict = {}
    for r in rows:
        key = (r["target"], r["triton"], r["warps"], r["stages"])
        raced[key] = raced.get(key, False) or r["verdict"] == "race"
    for (target, triton, w, s), race in raced.items():
        record = Record("x", 1, (KERNEL,), {"num_warps": w, "num_stages": s})
        hit = [r.id for r in rules if r.conditions(record, KERNEL, target, triton) is not None]
        assert bool(hit) == race, (target, triton, w, s, hit)
    assert sum(raced.values()) == 28


def test_a_user_adds_rules_and_replaces_shipped_ones(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        "[[rule]]\nid = 'mine'\nkernel = 'my_.*'\ncitation = 'c'\nfix = 'f'\nevidence = 'e'\n[rule.when]\nBLOCK = '>= 64'\n"
        "[[rule]]\nid = 'fla-913'\nkernel = 'nothing'\ncitation = 'c'\nfix = 'f'\nevidence = 'e'\n"
    )
    log = write(tmp_path / "a.log", *one_line(config(4, 2, BLOCK=64), "my_kernel"), *one_line(config(4, 2, BLOCK=32), "my_kernel"),
                *one_line(config(1, 1), "chunk_gated_delta_rule_fwd_kkt_solve_kernel"))  # fmt: skip
    findings, _ = lint([log], rules=mine)
    assert [(r.rule, r.line, r.conditional) for r in findings.itertuples()] == [("mine", 1, False)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule", "cannot be read as TOML"),
        ("x = 1", "expected [[rule]] tables"),
        ("[[rule]]\nid = 'a'", "rule a: needs the texts kernel"),
        ("[[rule]]\nid='a'\nkernel='('\ncitation='c'\nfix='f'\nevidence='e'", "rule a: missing ), unterminated"),
        ("[[rule]]\nid='a'\nkernel='k'\ncitation='c'\nfix='f'\nevidence='e'\ntriton='new'", "rule a: Invalid specifier"),
        ("[[rule]]\nid='a'\nkernel='k'\ncitation='c'\nfix='f'\nevidence='e'\ntarget=['mi355']", "'mi355' is not of the form"),
        ("[[rule]]\nid='a'\nkernel='k'\ncitation='c'\nfix='f'\nevidence='e'\nstages=4", "does not know stages"),
        ("[[rule]]\nid='a'\nkernel='k'\ncitation='c'\nfix='f'\nevidence='e'\nwhen={num_stages='about 4'}", "num_stages = 'about 4'"),
    ],
)
def test_a_wrong_rules_file_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=re.escape(message)):
        load_rules(path)


def test_shipped_rules_are_complete():
    rules = all_rules()
    assert len({r.id for r in rules}) == len(rules)
    for r in rules:
        assert r.target
        assert r.when or r.unknown
        assert r.triton or r.unknown, f"{r.id} holds for every version by nobody's measurement"
        assert "https://" in r.citation or "data/" in r.citation


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("absent", None, "no such file"), ("empty.log", "", "empty"), ("foreign.log", "hello\n", "no autotuning record in 1 lines"),
     ("x.json", '{"a": 1}', "neither Triton's"), ("x.bin", "\0", "binary")],
)  # fmt: skip
def test_bad_input_is_said_and_is_status_2(tmp_path, capsys, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert main(["lint", str(path)]) == 2
    seen = capsys.readouterr()
    assert message in seen.out + seen.err


def test_a_folder_without_records_is_bad_input(tmp_path):
    write(tmp_path / "a.log", "nothing")
    with pytest.raises(BadInput, match="no autotuning record in 1 log and JSON files"):
        read_paths([tmp_path])


@pytest.mark.parametrize("words", [("--target", "mi355"), ("--triton", "new"), ("--rules", "/no/such.toml")])
def test_wrong_options_are_bad_input(tmp_path, capsys, words):
    assert main(["lint", str(write(tmp_path / "a.log", *one_line())), *words]) == 2
    assert words[1] in capsys.readouterr().err


def test_command_says_in_text_and_json_what_the_library_finds(tmp_path, capsys):
    log = str(write(tmp_path / "a.log", *four_lines(), *four_lines(), *one_line("gibberish")))
    assert main(["lint", log]) == 1  # conditional, and a finding all the same
    text = capsys.readouterr().out
    assert f"{log}:4 and 1 more: {KERNEL} won with num_warps: 4, num_stages: 4" in text
    assert "conditional: recompute-w-u-gfx950-stages4" in text
    assert f"{log}:9: not understood: not a config" in text
    assert "winners known to race: 2; read: winners 2" in text
    assert main(["lint", log, "--json", "--target", "hip:gfx950", "--triton", "3.6.0"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [f["line"] for f in data["findings"]] == [4, 8]
    assert data["counts"]["winners"] == 2
    assert data["not_understood"][0]["line"] == 9


@pytest.mark.slow
def test_fifty_megabytes_in_seconds(tmp_path):
    """Most lines foreign, as in a server's log."""
    noise = (
        "(APIServer pid=1) INFO 05-01 14:24:50 [loggers.py:123] Engine 000: Avg prompt throughput: 123.4 tokens/s, Running: 8 reqs\n" * 40
    )
    block = noise + "".join(f"(W pid=1) {x}\n" for x in four_lines())
    log = tmp_path / "big.log"
    log.write_text(block * (50_000_000 // len(block) + 1))
    began = time.process_time()
    findings, unread = lint([log], "hip:gfx950", "3.6.0")
    assert time.process_time() - began < 8
    assert len(findings) == log.stat().st_size // len(block)
    assert unread.empty


def test_json_nested_beyond_reading_is_not_understood(tmp_path):
    (tmp_path / "a.autotune.json").write_text("[" * 100_000)
    _, unread = lint([tmp_path / "a.autotune.json"])
    assert "not JSON" in unread["reason"][0]


@pytest.mark.parametrize("begin", ["with key as ", "best config selected: ", "Autotuning kernel f with config "])
def test_a_run_of_spaces_costs_no_more_than_its_length(begin):
    """It took minutes: a pattern that ends in any number of spaces tries each of them as a beginning."""
    assert not read([f"Triton autotuning for function {KERNEL},", begin + " " * 200_000 + "x"]).records
