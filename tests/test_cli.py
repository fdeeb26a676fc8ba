"""The command line: exit status 0 clean, 1 a finding, 2 bad input; text and JSON say the same; nothing heavy before it is needed."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import assert_bad_input, run, run_json

from k3lab import doctor, figure_pack
from k3lab.__main__ import build_parser, main
from k3lab.capture.format import Capture
from k3lab.kda.layer import kda_layer_step
from k3lab.nonfinite import ranges
from k3lab.provenance import sha256
from k3lab.races import kernel
from k3lab.testing import random_call

ROOT = Path(__file__).parents[1]
LENGTHS = (1, 1, 70, 64)  # two decodes, a prefill with a ragged last chunk, one without


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    """ok: what the fixed route gives. bad: recorded with NaN in masked rows. wrong: finite outputs of other inputs. bare: no outputs."""
    folder = tmp_path_factory.mktemp("captures")
    call = random_call(LENGTHS, heads=1, head_dim=64)
    good = kda_layer_step(call, "split", padding="zero")
    bad = kda_layer_step(call, "chunk_all", padding="nan")
    Capture.from_call(call, good.o, good.final_state).save(folder / "ok.safetensors")
    Capture.from_call(call, bad.o, bad.final_state).save(folder / "bad.safetensors")
    Capture.from_call(call, good.o * 1.5, good.final_state).save(folder / "wrong.safetensors")
    Capture.from_call(call).save(folder / "bare.safetensors")
    return folder


def test_building_the_parser_imports_nothing_heavy():
    """What makes --help answer at once."""
    program = (
        "import sys; from k3lab.__main__ import build_parser; build_parser().format_help();"
        "print([m for m in ('torch', 'triton', 'numpy', 'pandas', 'matplotlib', 'safetensors') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["doctor", "check", "nan"])
def test_every_command_has_help_with_an_example_that_parses_and_the_exit_status(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert "exit status: 0 clean, 1 a finding, 2 bad input" in out
    example = out.split("python -m k3lab ")[-1].split()
    assert example[0] == command
    parsed = vars(build_parser().parse_args(example))
    for path in [parsed["capture"]] if "capture" in parsed else parsed.get("captures", []):
        assert (ROOT / path).exists(), f"the example names {path}"


@pytest.mark.parametrize("args", [(), ("mend",), ("check",), ("nan",), ("nan", "x", "--route", "all"), ("nan", "x", "--padding", "nan")])
def test_a_wrong_command_line_is_bad_input(capsys, args):
    status, out, err = run(capsys, *args)
    assert status == 2
    assert out == ""
    assert "usage:" in err


def test_status_reaches_the_shell(captures):
    """Once through a real process: python -m k3lab."""
    for name, expected in (("ok", 0), ("bad", 1), ("absent", 2)):
        done = subprocess.run(
            [sys.executable, "-m", "k3lab", "check", captures / f"{name}.safetensors"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == expected, done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_check_passes_a_sound_capture_and_finds_recorded_nan(capsys, captures):
    status, out, err = run(capsys, "check", captures / "ok.safetensors")
    assert (status, err) == (0, "")
    assert "ok.safetensors: kda" in out
    status, out, _ = run(capsys, "check", captures / "bad.safetensors")
    assert status == 1
    assert "error: o" in out


def test_check_takes_folders_and_patterns_each_file_once(capsys, captures):
    status, report = run_json(capsys, "check", captures, captures / "b*.safetensors", captures / "ok.safetensors")
    assert status == 1
    assert [Path(c["path"]).name for c in report["captures"]] == [f"{n}.safetensors" for n in ("bad", "bare", "ok", "wrong")]
    assert report["clean"] is False
    severities = {Path(c["path"]).stem: {f["severity"] for f in c["findings"]} for c in report["captures"]}
    assert "error" in severities["bad"]
    assert severities["ok"] <= {"note"}


def test_check_goes_on_after_a_file_that_cannot_be_read(capsys, captures, tmp_path):
    (tmp_path / "cut.safetensors").write_bytes((captures / "ok.safetensors").read_bytes()[:500])
    status, out, err = run(capsys, "check", tmp_path / "cut.safetensors", captures / "bad.safetensors")
    assert status == 2, "bad input outweighs a finding"
    assert "cut.safetensors" in err
    assert len(err.splitlines()) == 1
    assert "bad.safetensors: kda" in out
    status, report = run_json(capsys, "check", tmp_path / "cut.safetensors", captures / "ok.safetensors")
    assert status == 2
    assert "cut.safetensors" in report["captures"][0]["unreadable"]
    assert report["captures"][1]["unreadable"] is None


def test_bad_input_is_one_line_that_names_the_file(capsys, tmp_path):
    pickle = tmp_path / "state.pt"
    torch.save({"q": torch.zeros(2)}, pickle)
    for command in ("check", "nan"):
        assert_bad_input(run(capsys, command, pickle), "state.pt", "pickle")
        assert_bad_input(run(capsys, command, tmp_path / "absent"), "absent", "no such file")
    (tmp_path / "empty").mkdir()
    assert_bad_input(run(capsys, "check", tmp_path / "empty"), "empty", "no .safetensors file")


def test_a_name_too_long_for_a_file_is_bad_input(capsys):
    for command in ("check", "nan"):
        assert_bad_input(run(capsys, command, "a" * 300), "File name too long")


def test_text_of_a_file_cannot_steer_the_terminal(capsys, tmp_path):
    """Names and values of a capture are untrusted: escape sequences and newlines are shown, not sent."""
    path = tmp_path / "a.safetensors"
    Capture({"q\x1b[31m\nX": torch.tensor([float("nan")])}, {"kind": "call"}).save(path)
    status, out, _ = run(capsys, "check", path)
    assert status == 1
    assert "\x1b" not in out
    assert "error: q\\x1b[31m X" in out
    _, _, err = run(capsys, "check", tmp_path / "\x1b[31m")
    assert "\x1b" not in err


def test_check_looks_at_any_dtype_that_a_file_can_hold(capsys, tmp_path):
    """Packed, unsigned and 8-bit types have no arithmetic in torch; the doctor reports, it does not fall over."""
    tensors = {"arg.fp8": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn), "arg.mx": torch.zeros(4, dtype=torch.uint8)}
    tensors["arg.mx"] = tensors["arg.mx"].view(torch.float4_e2m1fn_x2)
    tensors |= {"raw_g": torch.zeros(8, 2, 8).to(torch.float8_e4m3fn), "raw_beta": torch.zeros(64, 1).to(torch.float8_e5m2)}
    tensors |= {"token_ids": torch.arange(9).to(torch.uint32)}
    Capture(tensors, {"kind": "kda"}).save(tmp_path / "a.safetensors")
    status, out, _ = run(capsys, "check", tmp_path / "a.safetensors")
    assert status == 1
    assert "error: arg.fp8" in out
    assert "note: arg.mx: dtype torch.float4_e2m1fn_x2 is not looked into" in out


@pytest.mark.parametrize(
    ("trouble", "expected"), [(OSError(28, "No space left on device"), 2), (MemoryError(), 2), (KeyboardInterrupt(), 130)]
)
def test_a_full_disk_and_ctrl_c_end_in_one_line(capsys, monkeypatch, trouble, expected):
    def examine():
        raise trouble

    monkeypatch.setattr(doctor, "examine", examine)
    status, out, err = run(capsys, "doctor")
    assert (status, out) == (expected, "")
    assert len(err.splitlines()) == 1
    assert "No space left" in err or "interrupted" in err or "memory" in err


def test_nan_tells_exposed_from_observed(capsys, captures):
    """The recorded outputs are right, so this is clean, although NaN padding would reach sequences."""
    status, report = run_json(capsys, "nan", captures / "ok.safetensors")
    assert status == 0
    assert set(report) == {"finite", "first", "nonfinite_sequences", "relative_error", "observed", "exposed"}
    assert report["finite"] is True
    assert report["first"] is None
    assert report["nonfinite_sequences"] == []
    assert 0 < report["relative_error"] < 1e-4
    assert report["exposed"]["chunk_all"]["sequences"] == [0, 1, 2]
    assert report["exposed"]["split"]["sequences"] == [2]
    _, out, _ = run(capsys, "nan", captures / "ok.safetensors")
    assert "OBSERVED  final_state, o finite" in out
    assert "EXPOSED   chunk_all: NaN in masked rows would reach sequences 0-2\n" in out


def test_nan_finds_recorded_nan(capsys, captures):
    status, report = run_json(capsys, "nan", captures / "bad.safetensors")
    assert status == 1
    assert report["finite"] is False
    assert report["nonfinite_sequences"] == [0, 1, 2]
    place = {k: report["first"][k] for k in ("layer", "stage", "sequence", "length", "row", "head", "channel")}
    assert place == {"layer": -1, "stage": "recorded", "sequence": 0, "length": 1, "row": 0, "head": 0, "channel": 0}
    status, out, _ = run(capsys, "nan", captures / "bad.safetensors")
    assert status == 1
    assert "OBSERVED  final_state, o not finite in sequences 0-2\n" in out


def test_nan_finds_finite_outputs_that_are_wrong(capsys, captures):
    status, report = run_json(capsys, "nan", captures / "wrong.safetensors")
    assert status == 1
    assert report["finite"] is True
    assert report["observed"]["away_sequences"] == [0, 1, 2, 3]
    _, out, _ = run(capsys, "nan", captures / "wrong.safetensors")
    assert "further away than the error budget: sequences 0-3\n" in out


def test_nan_of_a_capture_without_outputs_observes_nothing(capsys, captures):
    status, report = run_json(capsys, "nan", captures / "bare.safetensors")
    assert status == 0
    assert report["finite"] is None
    assert report["relative_error"] is None
    _, out, _ = run(capsys, "nan", captures / "bare.safetensors")
    assert "OBSERVED  nothing" in out


@pytest.mark.parametrize(
    ("route", "padding", "impl", "hit"),
    [
        ("chunk_all", "nan", "torch", [0, 1, 2]),
        ("chunk_all", "zero", "torch", []),
        ("split", "nan", "torch", [2]),
        ("split", "zero", "torch", []),
        ("gather_split", "nan", "torch", [2]),
        ("split", "zero", "reference", []),
    ],
)
def test_a_replay_is_a_finding_if_it_is_not_finite(capsys, captures, route, padding, impl, hit):
    status, report = run_json(capsys, "nan", captures / "ok.safetensors", "--route", route, "--padding", padding, "--impl", impl)
    assert status == int(bool(hit))
    assert report["nonfinite_sequences"] == hit
    assert report["finite"] is not bool(hit)
    assert (report["first"] is None) is not bool(hit)
    assert 0 < report["relative_error"] < 1e-4
    assert report["observed"] is report["exposed"] is None


def test_a_replay_takes_the_padding_that_its_implementation_has(capsys, captures):
    """undefined for the kernels; the reference has no tiles, so no masked rows."""
    assert "padding undefined, impl torch" in run(capsys, "nan", captures / "ok.safetensors", "--route", "split")[1]
    assert "padding zero, impl reference" in run(capsys, "nan", captures / "ok.safetensors", "--route", "split", "--impl", "reference")[1]
    given = run(capsys, "nan", captures / "ok.safetensors", "--route", "split", "--impl", "reference", "--padding", "nan")
    assert_bad_input(given, "reference")


@pytest.mark.slow
def test_a_triton_replay_runs_under_the_interpreter_without_a_gpu(captures):
    """In a process of its own: the interpreter switch is read when the kernels are defined."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible, so the kernels run natively")
    command = [sys.executable, "-m", "k3lab", "nan", captures / "ok.safetensors", "--route", "split", "--impl", "triton"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "every stage is finite" in done.stdout
    assert "undefined looks like zero here" in done.stdout


@pytest.mark.parametrize(("name", "expected"), [("mixed_split_layer1", 0), ("mixed_chunk_all_nan_layer0", 1), ("attn_res_layer4", 2)])
def test_the_shipped_captures_are_what_their_names_say(capsys, name, expected):
    """Recorded by the fixed route, by the faulty one with NaN in masked rows, and not a KDA call."""
    assert run(capsys, "nan", ROOT / "data" / "captures" / f"{name}.safetensors")[0] == expected


def test_no_shipped_capture_is_bad_input(capsys):
    status, _, err = run(capsys, "check", ROOT / "data" / "captures")
    assert (status, err) == (1, ""), "one was recorded with the fault, so there are findings"


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")])
def test_ranges_name_every_number_and_no_other(numbers, text):
    assert ranges(numbers) == text


def test_doctor_finds_this_environment_sound(capsys):
    status, report = run_json(capsys, "doctor")
    assert status == 0, report
    assert report["ok"] is True
    items = {i["item"]: i for i in report["items"]}
    assert torch.__version__ in items["packages"]["value"]
    assert {"python", "device", "Triton kernels", "TRITON_HIP_USE_ASYNC_COPY", "AMDGCN_USE_BUFFER_OPS"} <= set(items)
    status, out, _ = run(capsys, "doctor")
    assert "nothing that is needed is missing" in out


def test_doctor_names_a_missing_package_and_the_fix(capsys, monkeypatch):
    version = importlib.metadata.version

    def without(name):
        if name in ("pandas", "jupyterlab"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0" if name == "scipy" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    status, report = run_json(capsys, "doctor")
    assert status == 1
    items = {i["item"]: i for i in report["items"]}
    assert items["packages"]["status"] == "missing"
    assert "pandas is not installed" in items["packages"]["value"]
    assert "scipy 1.0, needs >=1.13" in items["packages"]["value"]
    assert items["packages of [notebook]"]["status"] == "optional"
    assert items["packages of [notebook]"]["fix"] == 'pip install -e ".[notebook]"'


def test_doctor_shows_the_switches_that_are_set(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_HIP_USE_ASYNC_COPY", "1")
    assert "TRITON_HIP_USE_ASYNC_COPY  1\n" in run(capsys, "doctor")[1]


def test_doctor_compares_data_with_its_cards(capsys, monkeypatch, tmp_path):
    data = tmp_path / "data" / "captures"
    data.mkdir(parents=True)
    (data / "a.safetensors").write_bytes(b"one")
    (data / "a.md").write_text(f"sha256 `{sha256(data / 'a.safetensors')}`\n")
    (data / "b.safetensors").write_bytes(b"two")
    monkeypatch.setattr(doctor, "DATA", tmp_path / "data")
    status, report = run_json(capsys, "doctor")
    items = {i["item"]: i for i in report["items"]}
    assert status == 0
    assert items["data/captures/b.safetensors"]["status"] == "optional"
    assert items["data"]["value"].startswith("1 of 2 .safetensors files")

    (data / "a.safetensors").write_bytes(b"on")
    status, report = run_json(capsys, "doctor")
    items = {i["item"]: i for i in report["items"]}
    assert status == 1
    assert items["data/captures/a.safetensors"]["fix"] == "git checkout -- data/captures/a.safetensors"

    (data / "both.md").write_text(f"a.safetensors, b.safetensors: `{sha256(data / 'b.safetensors')}`\n")
    (data / "a.safetensors").write_bytes(b"one")
    items = {i["item"]: i for i in run_json(capsys, "doctor")[1]["items"]}
    assert items["data"]["value"].startswith("2 of 2 .safetensors files")


def test_a_command_without_torch_points_to_the_doctor_and_the_doctor_still_answers():
    """The doctor is for broken installations: it must not need what it looks for."""
    block = "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'pandas', 'safetensors'))); from k3lab.__main__ import main;"
    done = subprocess.run([sys.executable, "-c", f"{block} sys.exit(main(['nan', 'x']))"], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "python -m k3lab doctor" in done.stderr
    done = subprocess.run([sys.executable, "-c", f"{block} sys.exit(main(['doctor']))"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "torch  " in done.stdout
    assert "cannot be imported" in done.stdout
    assert "TRITON_HIP_USE_ASYNC_COPY" in done.stdout


def test_nan_replays_a_bfloat16_capture_under_the_interpreter_as_float32(tmp_path, capsys):
    """bf16 arithmetic is refused under the interpreter, and the message names the flag that goes round it."""
    path = Capture.from_call(random_call((1, 20), heads=1, head_dim=64, dtype=torch.bfloat16)).save(tmp_path / "a.safetensors")
    command = ["nan", str(path), "--route", "split", "--padding", "zero", "--impl", "triton"]
    if not torch.cuda.is_available():
        assert main(command) == 2
        assert "--dtype float32" in capsys.readouterr().err
    assert main([*command, "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finite"]


def test_every_command_has_the_same_two_flags_an_example_and_its_exit_status():
    """--json and --out mean the same everywhere, and help shows how to call it."""
    commands = next(a for a in build_parser()._actions if a.dest == "command").choices
    assert len(commands) >= 9
    for name, sub in commands.items():
        assert {"--json", "--out"} <= {s for a in sub._actions for s in a.option_strings}, name
        assert "exit status: 0" in sub.epilog, name
        assert f"python -m k3lab {name}" in sub.epilog, name


def test_out_writes_what_was_printed_as_text_and_as_json(captures, capsys, tmp_path):
    """Both files at once, whatever was asked for on the screen; a place that cannot be written is bad input."""
    status, out, _ = run(capsys, "nan", captures / "bad.safetensors", "--out", tmp_path / "new")
    assert status == 1
    assert (tmp_path / "new" / "k3lab-nan.txt").read_text() == out
    assert json.loads((tmp_path / "new" / "k3lab-nan.json").read_text())["finite"] is False
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["k3lab-nan.json", "k3lab-nan.txt"]
    (tmp_path / "file").write_text("")
    assert_bad_input(run(capsys, "nan", captures / "ok.safetensors", "--out", tmp_path / "file"), "file", "cannot be written")


def test_figures_come_by_name_from_shipped_data_or_a_capture(captures, capsys, tmp_path):
    """The pack holds picture, table and snippet; the snippet names the command that made it, without a folder of this machine."""
    status, out, _ = run(capsys, "figures", "01_routes", "01_tiles", "--capture", captures / "ok.safetensors", "--out", tmp_path)
    assert status == 0
    assert sorted(p.name for p in tmp_path.glob("01_*")) == [
        f"01_{n}.{k}" for n in ("routes", "tiles") for k in ("csv", "md", "png", "svg")
    ]
    assert "Reproduce: `python -m k3lab figures 01_routes --capture ok.safetensors`" in (tmp_path / "01_routes.md").read_text()
    assert str(tmp_path) not in (tmp_path / "01_routes.md").read_text()
    assert "ok.safetensors" in (tmp_path / "01_routes.md").read_text()
    assert "01_routes" in out
    assert_bad_input(run(capsys, "figures", "no_such", "--out", tmp_path), "no_such", "01_routes")
    status, listed = run_json(capsys, "figures", "--list")
    assert status == 0
    assert {"01_tiles", "02_race_card"} <= {f["name"] for f in listed["figures"]}


def test_every_figure_of_a_notebook_can_be_made_from_the_command_line():
    """Names are the same in notebooks and in the pack."""
    exported = {n for f in (ROOT / "notebooks").glob("*.py") for n in re.findall(r'figures\.export\([^"]*"(\w+)"', f.read_text())}
    assert exported <= set(figure_pack.FIGURES)


def test_a_folder_in_the_way_of_a_report_leaves_none_of_its_files(capsys, captures, tmp_path):
    """All files of --out or none: the first is not renamed before the second is known to have a place."""
    (tmp_path / "k3lab-check.json").mkdir()
    assert_bad_input(run(capsys, "check", captures / "ok.safetensors", "--out", tmp_path), "k3lab-check.json", "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["k3lab-check.json"]


@pytest.mark.parametrize("command", [["check", ""], ["acceptance", ""], ["figures", "--out", ""]])
def test_an_empty_argument_is_refused_and_no_name_for_this_folder(capsys, command):
    """What a shell makes of "$UNSET" must not be taken for the current folder, nor for no --out."""
    status, out, err = run(capsys, *command)
    assert (status, out) == (2, "")
    assert "an argument is empty" in err


def test_a_file_name_with_a_line_end_makes_no_line_of_its_own(captures, capsys, tmp_path):
    """Nobody reads a file's name as a line of the report."""
    path = tmp_path / "a\nOBSERVED  o finite.safetensors"
    path.write_bytes((captures / "bad.safetensors").read_bytes())
    for command in (["check"], ["nan"], ["nan", "--route", "split"]):
        out = run(capsys, *command, path)[1]
        assert out.splitlines()[0].startswith(f"{tmp_path}/a OBSERVED  o finite.safetensors".replace("  ", " ")), command


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_not_utf8_is_said_to_be_the_trouble(captures, capsys, tmp_path):
    """The file is sound: safetensors alone cannot open it."""
    path = tmp_path / os.fsdecode(b"\xff.safetensors")
    path.write_bytes((captures / "ok.safetensors").read_bytes())
    assert_bad_input(run(capsys, "nan", path), "not UTF-8", "rename")


def test_doctor_lists_the_toolchains_or_how_to_add_one(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("K3LAB_TOOLCHAINS", str(tmp_path))
    item = next(i for i in run_json(capsys, "doctor")[1]["items"] if i["item"] == "toolchains")
    assert (item["status"], item["fix"]) == ("optional", "python -m k3lab toolchain add 3.8.0")
    (tmp_path / "triton-3.8.0" / "triton").mkdir(parents=True)
    (tmp_path / "triton-3.8.0" / "triton" / "__init__.py").touch()
    item = next(i for i in run_json(capsys, "doctor")[1]["items"] if i["item"] == "toolchains")
    assert item["status"] == "ok"
    assert item["value"].startswith("Triton 3.8.0 beside the installed one")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
def test_assembly_without_an_end_is_refused_before_it_fills_the_memory(capsys, monkeypatch):
    monkeypatch.setattr(kernel, "LIMIT", 1000)
    assert_bad_input(run(capsys, "lds", "/dev/zero"), "/dev/zero", "more than 1,000 characters")
    assert_bad_input(run(capsys, "lint", "/dev/zero"), "/dev/zero", "a device")


def test_names_may_stand_on_both_sides_of_an_option(captures, capsys):
    """argparse gives the names after an option back as not understood."""
    status, out, _ = run(capsys, "check", captures / "ok.safetensors", "--json", captures / "bare.safetensors")
    assert [Path(c["path"]).name for c in json.loads(out)["captures"]] == ["ok.safetensors", "bare.safetensors"]
    status, out, err = run(capsys, "toolchain", "add", "--json", "no-version")
    assert "'no-version' is not a version number" in err
    for wrong in (["check", "x", "--jsn"], ["nan", "x", "y"], ["doctor", "x"]):
        status, out, err = run(capsys, *wrong)
        assert (status, out) == (2, "")
        assert f"k3lab {wrong[0]}" in err, "the usage shown is the command's own"
        assert "unrecognized arguments" in err
