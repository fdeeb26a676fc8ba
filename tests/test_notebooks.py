"""Every notebook has a light, rendered twin, and the tool that checks the twins notices what it must.

Executing the real notebooks is left to `.ci/notebooks.py check`, so that a CI run executes each once.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / ".ci" / "notebooks.py"
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))

spec = importlib.util.spec_from_file_location("notebooks_tool", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_every_source_has_a_rendered_twin_and_no_twin_is_alone():
    assert SOURCES, "notebooks/ holds no source"
    assert tool.orphans(ROOT / "notebooks") == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_rendered_notebook_is_of_this_source_valid_executed_and_light(source):
    twin = source.with_suffix(".ipynb")
    nb = nbformat.read(twin, as_version=4)
    nbformat.validate(nb)
    assert tool.stale(jupytext.read(source), nb) == []
    assert set(nb.metadata) == {"kernelspec", "language_info"}, "widget state or other session metadata was committed"
    assert twin.stat().st_size < tool.SIZE_LIMIT
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code), "a cell was never executed"
    assert not any(o.output_type == "error" for c in code for o in c.outputs)
    kinds = [kind for c in code for o in c.outputs for kind in o.get("data", {})]
    assert "image/png" in kinds
    assert not [k for k in kinds if "widget" in k], "widgets show nothing on a hosting page"
    assert str(ROOT) not in json.dumps(nb), "a path of this machine is in the outputs"


DEMO = """# %% [markdown]
# # A notebook of two cells

# %%
import sys

print("on stderr", file=sys.stderr)
print("rows 7, error 3.1e-07, share 0.1234, took 1.5 s", object())

# %%
7
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_demo.py").write_text(DEMO)
    return tmp_path


def call(folder, *args):
    return subprocess.run(
        [sys.executable, TOOL, *args, "--folder", folder / "notebooks", "--out", folder / "out"], capture_output=True, text=True
    )


@pytest.mark.slow
def test_render_then_check_passes_and_an_edit_of_either_side_fails(folder):
    rendered = call(folder, "render")
    assert rendered.returncode == 0, rendered.stdout + rendered.stderr
    assert "on stderr" in rendered.stderr
    twin = folder / "notebooks" / "01_demo.ipynb"
    assert "on stderr" not in twin.read_text().replace('print(\\"on stderr\\"', "")
    assert (folder / "out" / "notebooks" / "01_demo.ipynb").exists()
    checked = call(folder, "check")
    assert checked.returncode == 0, checked.stdout
    assert "notebooks: 1 passed, 0 failed" in checked.stdout

    twin.write_text(twin.read_text().replace("rows 7,", "rows 8,", 1))
    edited = call(folder, "check")
    assert edited.returncode == 1
    assert "-rows 8" in edited.stdout
    assert "+rows 7" in edited.stdout

    (folder / "notebooks" / "01_demo.py").write_text(DEMO.replace("# %%\n7", "# %%\n8"))
    moved = call(folder, "check")
    assert moved.returncode == 1
    assert "-7" in moved.stdout
    assert "+8" in moved.stdout


@pytest.mark.slow
def test_a_cell_that_raises_fails_the_run_and_shows_the_error(folder):
    (folder / "notebooks" / "01_demo.py").write_text("# %%\nraise ValueError('the third head')\n")
    done = call(folder, "run")
    assert done.returncode == 1
    assert "the third head" in done.stdout
    assert "notebooks: 0 passed, 1 failed" in done.stdout
    assert not (folder / "notebooks" / "01_demo.ipynb").exists()


def test_an_unknown_name_is_refused_and_the_known_ones_listed(folder):
    done = call(folder, "check", "07")
    assert done.returncode == 1
    assert "01_demo" in done.stderr


def test_twins_without_partner_are_named(folder):
    (folder / "notebooks" / "02_lost.ipynb").write_text("{}")
    assert tool.orphans(folder / "notebooks") == ["01_demo.py has no 01_demo.ipynb: make render", "02_lost.ipynb has no 02_lost.py"]


def notebook(*outputs):
    cell = nbformat.v4.new_code_cell("x", outputs=list(outputs))
    return nbformat.v4.new_notebook(cells=[cell])


def text(x):
    return nbformat.v4.new_output("stream", name="stdout", text=x)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("took 1.5 s", "took 22 ms", True),
        ("<object at 0x7f00aa11>", "<object at 0x7f00bb22>", True),
        ("k3lab 0.1.0 · torch 2.13.0+cpu · cpu", "k3lab 0.2.0 · torch 2.14.0 · cpu", True),
        ("torch 2.13.0 · cpu", "torch 2.13.0 · gfx950", False),
        ("error 3.1e-07", "error 4.4e-07", True),
        ("error 3.1e-07", "error 3.1e-05", False),
        ("share 0.1234", "share 0.1235", True),
        ("share 0.1234", "share 0.1334", False),
        ("share -0.1", "share 0.1", False),
        ("7 of 128", "8 of 128", False),
        ("finite", "not finite", False),
        ("nan", "0.0", False),
        ("a  b", "a b", True),
        ("one\ntwo", "one", False),
    ],
)
def test_text_is_compared_without_noise_and_only_without_noise(old, new, same):
    assert (tool.differences(notebook(text(old)), notebook(text(new))) == []) is same


def test_kinds_of_output_are_compared_and_picture_bytes_are_not():
    def picture(data, kind="image/png"):
        return nbformat.v4.new_output("display_data", data={kind: data})

    assert tool.differences(notebook(picture("AAAA")), notebook(picture("BBBB"))) == []
    assert tool.differences(notebook(picture("AAAA")), notebook(picture("AAAA", "image/svg+xml")))
    assert tool.differences(notebook(picture("AAAA")), notebook())


def test_one_print_delivered_in_two_pieces_is_the_same_output():
    assert tool.differences(notebook(text("a\n"), text("b\n")), notebook(text("a\nb\n"))) == []


def test_widget_state_is_refused():
    old = notebook()
    old.metadata["widgets"] = {}
    assert any("widget" in line for line in tool.differences(old, notebook()))


@pytest.mark.slow
def test_a_bad_input_is_one_line_and_another_failure_a_traceback_without_colours(folder):
    source = folder / "notebooks" / "01_demo.py"
    source.write_text("# %%\nfrom k3lab.errors import BadInput\n\nraise BadInput('x.safetensors: no such file')\n")
    told = call(folder, "run")
    assert told.returncode == 1
    assert told.stdout.splitlines()[1] == "BadInput: x.safetensors: no such file"
    source.write_text("# %%\n1 / 0\n")
    told = call(folder, "run")
    assert "ZeroDivisionError" in told.stdout
    assert "\x1b" not in told.stdout
