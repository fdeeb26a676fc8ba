"""What K3LAB_CAPTURE and K3LAB_LOG may point to: the input cell of a notebook ends in the package's error; names of files stay names."""

import contextlib
import io
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pandas as pd
import pytest
import torch
from hostile import CAPTURES, ROOT, Escaped, cases, garbled, own_errors, watch
from hypothesis import given
from hypothesis import strategies as st

from k3lab import figures, provenance
from k3lab.capture import Capture, record
from k3lab.errors import K3labError
from k3lab.files import write_files

NOTEBOOKS = ROOT / "notebooks"
LOG = (ROOT / "tests" / "logs" / "vllm_0.33.log").read_bytes()


def cells_to(variable: str, notebook: Path) -> list[str]:
    """The code cells of a notebook, up to the one that reads the environment variable."""
    out = []
    for cell in re.split(r"^# %%", notebook.read_text(encoding="utf-8"), flags=re.M)[1:]:
        kind, _, source = cell.partition("\n")
        if "[markdown]" in kind:
            continue
        out.append(source)
        if variable in source:
            return out
    return []


READERS = [(variable, p) for variable in ("K3LAB_CAPTURE", "K3LAB_LOG") for p in sorted(NOTEBOOKS.glob("*.py")) if cells_to(variable, p)]


@pytest.fixture(scope="module")
def ready() -> dict:
    """The names that the cells before the input cell make, by notebook: they run once."""
    return {}


@pytest.mark.parametrize(("variable", "notebook"), READERS, ids=[f"{p.stem}-{v}" for v, p in READERS])
@cases(15)
@given(data=st.data())
def test_the_input_cell_says_what_is_wrong(tmp_path_factory, ready, variable, notebook, data):
    folder = tmp_path_factory.getbasetemp()
    base = LOG if variable == "K3LAB_LOG" else (CAPTURES / "attn_res_layer4.safetensors").read_bytes()
    path = folder / data.draw(st.sampled_from(["a", "a.safetensors", "a.log"]))
    path.write_bytes(data.draw(st.one_of(garbled(base), st.binary(max_size=20), st.just(base), st.just(b""))))
    odd = ["", " ", "../..", str(folder), "/dev/null", "absent", "\x1b[2J", "a" * 300]
    value = data.draw(st.sampled_from([*[str(path)] * 6, *odd]))
    before, here, config = os.environ.get(variable), os.getcwd(), dict(os.environ)
    *setup, cell = cells_to(variable, notebook)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            os.chdir(NOTEBOOKS)
            os.environ[variable] = value
            if notebook not in ready:
                ready[notebook] = {}
                for source in setup:
                    exec(source, ready[notebook])
            with watch(folder), own_errors():
                exec(compile(cell, notebook.name, "exec"), dict(ready[notebook]))
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(config)
    assert os.environ.get(variable) == before


def test_a_notebook_that_reads_a_capture_was_found():
    """Else the test above tests nothing."""
    assert any(variable == "K3LAB_CAPTURE" for variable, _ in READERS)


NAMES = st.one_of(
    st.sampled_from(["..", ".", "/etc/x", "../x", "a/b", "a\\b", "~", "C:x", "a\x00", "", " ", "-x", "x" * 300, "\ud800", "a\n", "a..b"]),
    st.text(max_size=12),
)  # fmt: skip


@cases(40)
@given(name=NAMES)
def test_a_figure_stays_in_its_folder(tmp_path_factory, name):
    """Whatever its name: four files in the folder, or none anywhere."""
    folder = tmp_path_factory.mktemp("run")
    fig, ax = figures.new("Finding", "what ran", (3, 2))
    ax.plot([1, 2])
    made = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "commit", lambda: "0" * 7)
        with watch(folder), own_errors():
            made = figures.export(fig, pd.DataFrame({"x": [1]}), name, folder / "out")
    found = {p for p in folder.rglob("*") if p.is_file()}
    assert found == set(made or [])
    assert all(p.parent == folder / "out" for p in found)


@cases(30)
@given(name=NAMES, kernel=NAMES, data=st.binary(max_size=8))
def test_recorded_files_stay_in_their_folder(tmp_path_factory, name, kernel, data):
    """The recorder's file names come from a count and the process, not from what the call passes."""
    folder = tmp_path_factory.mktemp("run")
    module = types.ModuleType("k3lab_fuzz_engine")
    module.call = lambda **kwargs: kwargs.get("q")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "k3lab_fuzz_engine", module)
        with watch(folder):
            handle = record("k3lab_fuzz_engine:call", folder / "out", max_calls=1)
            module.call(**{"q": torch.zeros(2), name: torch.zeros(1), "kernel": kernel, "blob": data})
            handle.stop()
    for p in folder.rglob("*"):
        assert p == folder / "out" or (p.parent == folder / "out" and p.suffix == ".safetensors"), p


@cases(15)
@given(name=NAMES)
def test_a_capture_is_saved_where_it_is_told_or_not_at_all(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("run")
    try:
        with watch(folder):
            Capture({"x": torch.zeros(1)}, {"kind": "call", "model": name}).save(folder / "a.safetensors")
            write_files(folder / "out", {"a.txt": name, "b.json": "{}"})
    except K3labError:
        pass
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} <= {"a.safetensors", "out/a.txt", "out/b.json"}
    assert not (folder / "out" / "a.txt").exists() or (folder / "out" / "b.json").exists(), "half of the files"


def test_the_watch_itself_sees_what_it_is_for(tmp_path):
    """A hostile reader: each of these must end the case, or the tests of this folder prove nothing."""
    hostile = {
        "write": lambda: (tmp_path.parent / "outside").write_text("x"),
        "rename": lambda: os.rename(tmp_path / "a", tmp_path.parent / "b"),
        "process": lambda: subprocess.run(["true"]),
        "system": lambda: os.system("true"),
        "pickle": lambda: pickle.loads(b"cposix\ngetpid\n(tR."),
        "exec": lambda: exec("k3lab_canary = 1"),
        "import": lambda: __import__("k3lab_canary"),
        "time": lambda: [None for _ in iter(int, 1)],
    }
    (tmp_path / "a").write_text("x")
    for what, act in hostile.items():
        with pytest.raises(Escaped), watch(tmp_path, seconds=0.2):
            act()
        assert not (tmp_path.parent / "outside").exists(), what
    with watch(tmp_path):
        (tmp_path / "inside").write_text("x")
