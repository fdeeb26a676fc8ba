"""acceptance, passport and evaldelta as commands: exit status, the same in text and JSON, files by --out, one line for bad input."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run, run_json

PUBLISHED = Path(__file__).parents[1] / "data/published/vllm_pr_50649_gsm8k.csv"
AUX = "(EngineCore_DP0 pid=7) INFO 05-01 14:24:40 Kimi-K3 aux hidden capture: layers=({}) mode={} (VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1)\n"
LINE = (
    "(APIServer pid=1) INFO 05-01 14:24:50 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 3.10, Accepted throughput: 8.90 "
    "tokens/s, Drafted throughput: 97.50 tokens/s, Accepted: 2100 tokens, Drafted: 3000 tokens, Per-position acceptance rate: "
    "0.850, 0.700, 0.550, Avg Draft acceptance rate: 70.0%\n"
)
WRONG = LINE.replace("3.10", "1.30").replace("2100", "300").replace("0.850, 0.700, 0.550", "0.250, 0.040, 0.010").replace("70.0", "10.0")
MODAL = {"architectures": ["DFlashDraftModel"], "hidden_size": 7168, "dflash_config": {"target_layer_ids": [19, 37, 54, 66, 78, 90]}}
FLAG = "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"


@pytest.fixture
def put(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_acceptance_says_the_same_in_text_and_json(capsys, put):
    log = put("server.log", AUX.format("20, 38", "prefix_only") + LINE + LINE + "SpecDecoding metrics: Mean acceptance length: 3\n")
    status, found = run_json(capsys, "acceptance", log)
    assert status == 0
    assert {"mean_emitted", "survival", "drafts", "accepted", "drafted", "mode", "diagnosis", "not_understood"} <= set(found)
    assert (found["drafts"], found["drafted"], found["accepted"], found["mode"]) == (2000, 6000, 4200, "prefix")
    assert found["mean_emitted"] == pytest.approx(3.1)
    assert found["survival"] == pytest.approx([0.85, 0.70, 0.55])
    _, text, _ = run(capsys, "acceptance", log)
    for part in (
        "mean emitted  3.100",
        "drafts 2,000",
        "0.850 0.700 0.550",
        "1 + sum of survival = 3.100",
        "mode          prefix",
        "server.log:4",
    ):
        assert part in text


def test_acceptance_checks_no_sum_of_some_positions(capsys, put):
    """A bench report cut after position 0 of 7: no sum to hold against the mean."""
    cut = (
        "---------------Speculative Decoding---------------\nDrafts:   1234\nDraft tokens:   8638\nAccepted tokens:   3085\n"
        "  Position 0:      76.00\n=====\n"
    )
    path = put("bench.txt", cut)
    found = run_json(capsys, "acceptance", path)[1]
    assert (found["k"], found["survival"]) == (7, pytest.approx([0.76], abs=1e-3))
    text = run(capsys, "acceptance", path)[1]
    assert "check         none: 1 of 7 positions are given" in text
    assert "1 + sum" not in text


def test_acceptance_finding_is_status_1(capsys, put):
    status, found = run_json(capsys, "acceptance", put("server.log", WRONG))
    assert status == 1
    assert found["diagnosis"]["kind"] == "collapse at position 0"


def test_acceptance_of_an_unknown_engine_shows_its_first_lines(capsys, put):
    log = put("other.log", "engine foo started\nfoo: drafts were fine\n")
    status, text, _ = run(capsys, "acceptance", log)
    assert status == 2
    assert "nothing understood" in text
    assert "other.log:1: engine foo started" in text
    status, found = run_json(capsys, "acceptance", log)
    assert status == 2
    assert found["not_understood"][0]["first"][0]["text"] == "engine foo started"


def test_acceptance_out_writes_report_and_figure(capsys, put, tmp_path):
    status, _, _ = run(capsys, "acceptance", put("server.log", LINE + LINE), "--out", tmp_path / "o")
    assert status == 0
    assert {"k3lab-acceptance.txt", "k3lab-acceptance.json", "acceptance.png", "acceptance.svg", "acceptance.csv", "acceptance.md"} == {
        p.name for p in (tmp_path / "o").iterdir()
    }
    assert "k3lab acceptance" in (tmp_path / "o/acceptance.md").read_text()


def test_acceptance_reads_standard_input(capsys, monkeypatch):
    class Stdin:
        buffer = io.BytesIO(LINE.encode())

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert run_json(capsys, "acceptance", "-")[1]["drafts"] == 1000


def test_passport_mismatch_match_and_no_op(capsys, put):
    config = put("config.json", MODAL)
    common = ("passport", config, "--engine", "vllm", "--version", "0.33.0", "--platform")
    assert run_json(capsys, *common, "cuda")[0] == 1
    status, found = run_json(capsys, *common, "cuda", "--env", f"{FLAG}=1")
    assert (status, found["verdict"], found["warnings"]) == (0, "match", [])
    status, text, _ = run(capsys, *common, "rocm", "--env", f"{FLAG}=1")
    assert status == 1
    for part in ("verdict: mismatch", "silent no-op", "56434", "modal-labs/Kimi-K3-DFlash"):
        assert part in text


def test_passport_takes_stream_and_layers_from_a_log(capsys, put):
    config = put("config.json", MODAL)
    fed = put("fed.log", AUX.format("20, 38, 55, 67, 79, 91", "attn_res_stream"))
    status, found = run_json(capsys, "passport", config, "--engine", "vllm", "--version", "unknown", "--log", fed)
    assert found["verdict"] == "match"
    assert found["fed"]["stream_status"] == "observed"
    assert (status, found["warnings"]) == (0, [])  # the flag was not given, so the log answers what was only assumed
    status, found = run_json(capsys, "passport", config, "--engine", "vllm", "--version", "0.33.0", "--env", f"{FLAG}=0", "--log", fed)
    assert status == 1
    assert "the log is taken" in found["warnings"][0]  # it contradicts what was given
    early = put("early.log", AUX.format("19, 37, 54, 66, 78, 90", "attn_res_stream"))
    found = run_json(capsys, "passport", config, "--engine", "vllm", "--version", "0.33.0", "--log", early)[1]
    assert any("1 layer too early" in r for r in found["reasons"])
    twice = put("twice.log", Path(early).read_text() + Path(fed).read_text())
    found = run_json(capsys, "passport", config, "--engine", "vllm", "--version", "0.33.0", "--log", twice)[1]
    assert any("twice.log:2, the last of 2 lines that differ" in s["source"] for s in found["statements"])
    none = put("none.log", LINE)
    found = run_json(capsys, "passport", config, "--engine", "sglang", "--version", "0.5.23", "--log", none)[1]
    assert any(s["what"] == "log" and s["status"] == "unknown" for s in found["statements"])


def test_evaldelta_of_the_published_table(capsys):
    status, found = run_json(capsys, "evaldelta", f"{PUBLISHED}:before", f"{PUBLISHED}:PR")
    assert status == 0
    assert [(r["wrong_before"], r["wrong_after"], r["n_before"]) for r in found["rows"]] == [(145, 41, 1319), (145, 40, 1319)]
    _, text, _ = run(capsys, "evaldelta", f"{PUBLISHED}:before", f"{PUBLISHED}:PR")
    for part in ("wrong answers 145 to 41 of 1319 (inferred), times 0.28 (95% 0.20 to 0.40)", "z 7.91", "unpaired"):
        assert part in text
    assert run_json(capsys, "evaldelta", f"{PUBLISHED}:PR", f"{PUBLISHED}:before")[0] == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("acceptance", "missing.log"), "missing.log"),
        (("passport", "missing.json", "--engine", "vllm", "--version", "1"), "missing.json"),
        (("passport", "{config}", "--engine", "vllm", "--version", "1", "--env", "X"), "expected NAME=VALUE"),
        (("passport", "{config}", "--engine", "vllm", "--version", "1", "--pipeline", "0"), "--pipeline 0"),
        (("passport", "{config}", "--engine", "vllm", "--version", "1", "--log", "missing.log"), "missing.log"),
        (("evaldelta", "missing.txt", "{config}"), "missing.txt"),
        (("evaldelta", "-", "-"), "only one of them"),
        (("evaldelta", "{csv}", "{csv}"), "name one as"),
        (("evaldelta", "{csv}:before", "{csv}:PR", "--n", "1"), "at least 2"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(capsys, put, args, says):
    status, out, err = run(capsys, *(a.format(config=put("c.json", MODAL), csv=PUBLISHED) for a in args))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert says in err


def test_a_control_character_in_a_file_does_not_reach_the_terminal(capsys, put):
    config = put("config.json", MODAL | {"aux_hidden_stream": "\x1b[31mred"})
    _, text, _ = run(capsys, "passport", config, "--engine", "vllm\x1b[2J", "--version", "1")
    assert "\x1b" not in text


@pytest.mark.parametrize("command", ["acceptance", "passport", "evaldelta"])
def test_help_imports_nothing_heavy(command):
    code = f"import sys; from k3lab.__main__ import main\ntry: main(['{command}', '--help'])\nexcept SystemExit: pass\n" \
           "sys.exit(bool({'torch', 'pandas', 'scipy', 'numpy', 'matplotlib'} & set(sys.modules)))"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
