"""The input of a notebook: shipped data, or what K3LAB_CAPTURE and K3LAB_LOG name, from either folder."""

from k3lab import inputs
from k3lab.testing import random_call


def test_a_path_is_meant_from_the_notebook_or_from_the_folder_above(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "mine.log").write_text("")
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.delenv("K3LAB_LOG", raising=False)
    assert inputs.chosen("K3LAB_LOG") == ""
    assert inputs.chosen("K3LAB_LOG", "shipped.log") == "shipped.log"
    monkeypatch.setenv("K3LAB_LOG", "mine.log")
    assert inputs.chosen("K3LAB_LOG", "shipped.log") == "../mine.log"
    monkeypatch.setenv("K3LAB_LOG", "absent.log")
    assert inputs.chosen("K3LAB_LOG") == "absent.log", "the error then names what was asked for"


def test_the_doctor_speaks_before_anything_runs(tmp_path, capsys):
    from k3lab.capture import Capture

    Capture.from_call(random_call((1, 5), heads=1, head_dim=16)).save(tmp_path / "a.safetensors")
    capture, report = inputs.examined(str(tmp_path / "a.safetensors"))
    assert capture.kind == "kda"
    out = capsys.readouterr().out
    assert "capture: a.safetensors, kind kda" in out
    assert f"{len(report)} findings" in out or "nothing found" in out
    assert str(tmp_path) not in out
