"""Exported figures: the same bytes for the same input, nothing outside the folder, readable without colour."""

import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from k3lab import figures, provenance
from k3lab.errors import BadInput

FRAME = pd.DataFrame({"length": [1, 64, 130], "route": ["chunk_all", "split", "a|b"], "error": [0.123456789, 1e-7, float("nan")]})


def draw(frame=FRAME, finding="Length 1 is hit", ran="chunk_kda, fp32, N = 3"):
    fig, ax = figures.new(finding, ran, size=(4, 2.5))
    figures.plot(ax, 0, frame["length"], frame["error"], label="error")
    figures.bar(ax, 1, frame["length"], frame["error"].fillna(0))
    ax.legend()
    return fig


def test_export_writes_picture_table_and_snippet_from_one_frame(tmp_path):
    paths = figures.export(draw(), FRAME, "hit", tmp_path / "new" / "folder")
    assert [p.name for p in paths] == ["hit.png", "hit.svg", "hit.csv", "hit.md"]
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == ["hit.csv", "hit.md", "hit.png", "hit.svg"]
    pd.testing.assert_frame_equal(pd.read_csv(paths[2]), FRAME)
    text = paths[3].read_text()
    for part in ("### Length 1 is hit", "![Length 1 is hit (chunk_kda, fp32, N = 3)](hit.png)", "| 1 | chunk_all | 0.1235 |", "a\\|b"):
        assert part in text
    assert f"commit {provenance.commit()}" in text
    assert provenance.versions() in text
    with Image.open(paths[0]) as picture:
        assert picture.size[0] == 4 * figures.DPI
        assert picture.getpixel((0, 0))[:3] == (255, 255, 255)
        assert not picture.text, "library versions or dates in the PNG"
    assert ElementTree.parse(paths[1]).getroot().tag.endswith("svg")


def test_two_processes_give_the_same_bytes(tmp_path):
    """Hash seeds, dates and object addresses must not reach the files."""
    program = textwrap.dedent("""
        import sys, pandas as pd
        from k3lab import figures
        frame = pd.DataFrame({"x": [1, 2, 3], "y": [0.1, 0.4, 0.2]})
        fig, axes = figures.new("Two panels", "numbers", ncols=2)
        for i, ax in enumerate(axes):
            figures.plot(ax, i, frame["x"], frame["y"], label="y")
            ax.legend()
        figures.export(fig, frame, "same", sys.argv[1])
    """)
    for seed, folder in (("1", "a"), ("2", "b")):
        subprocess.run([sys.executable, "-c", program, tmp_path / folder], check=True, env={"PYTHONHASHSEED": seed, "PATH": ""})
    for kind in ("png", "svg", "csv", "md"):
        assert (tmp_path / "a" / f"same.{kind}").read_bytes() == (tmp_path / "b" / f"same.{kind}").read_bytes(), kind


def test_saving_twice_replaces_and_leaves_the_figure_as_it_was(tmp_path):
    fig = draw()
    before = [t.get_text() for t in fig.texts]
    first = [p.read_bytes() for p in figures.export(fig, FRAME, "x", tmp_path)]
    assert [p.read_bytes() for p in figures.export(fig, FRAME, "x", tmp_path)] == first
    assert [t.get_text() for t in fig.texts] == before
    assert not any("commit" in t for t in before), "the commit belongs to exported files alone"


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "a\\b", "..", ".hidden", "", "x\0y", "x\n", "a" * 101, "-rf"])
def test_a_name_cannot_leave_the_folder(tmp_path, name):
    with pytest.raises(BadInput, match="figure name"):
        figures.export(draw(), FRAME, name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_folder_is_replaced_and_not_followed(tmp_path):
    outside = tmp_path / "outside.csv"
    outside.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x.csv").symlink_to(outside)
    figures.export(draw(), FRAME, "x", tmp_path / "out")
    assert outside.read_text() == "mine"


def test_a_failure_while_drawing_leaves_nothing_behind(tmp_path):
    fig = draw()
    fig.axes[0].set_title("$\\notatexcommand$")
    with pytest.raises(ValueError, match="notatexcommand"):
        figures.export(fig, FRAME, "x", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_out_defaults_to_the_environment_then_to_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("K3LAB_OUT", "chosen")
    assert figures.export(draw(), FRAME, "x")[0].resolve() == tmp_path / "chosen" / "x.png"
    monkeypatch.delenv("K3LAB_OUT")
    assert figures.export(draw(), FRAME, "x")[0].resolve() == tmp_path / "out" / "x.png"


def test_a_file_where_the_folder_should_be_is_named(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(BadInput, match=r"out: cannot be made a folder"):
        figures.export(draw(), FRAME, "x", tmp_path / "out")


def test_a_figure_without_caption_is_refused(tmp_path):
    fig = plt.figure()
    plt.close(fig)
    with pytest.raises(BadInput, match=r"figures\.new"):
        figures.export(fig, FRAME, "x", tmp_path)


def test_long_tables_are_folded_and_named_indices_kept(tmp_path):
    frame = pd.DataFrame({"y": range(30)}, index=pd.Index(range(30), name="length"))
    text = figures.export(draw(), frame, "x", tmp_path)[3].read_text()
    assert "<details><summary>30 rows</summary>" in text
    assert "| length | y |" in text
    assert pd.read_csv(tmp_path / "x.csv").columns.tolist() == ["length", "y"]


def test_long_titles_stay_inside_the_picture():
    fig = draw(finding="A finding in many words " * 8, ran="what ran, in as many words " * 8)
    fig.draw_without_rendering()
    width, height = fig.get_size_inches() * fig.dpi
    boxes = [t.get_window_extent() for t in fig.texts]
    for box in boxes:
        assert box.x0 >= 0
        assert box.x1 <= width
        assert box.y0 >= 0
        assert box.y1 <= height
    (title, ran, foot), plot = boxes, fig.axes[0].get_tightbbox()
    assert title.y0 >= ran.y1
    assert ran.y0 >= plot.y1
    assert plot.y0 >= foot.y1


def test_series_differ_in_colour_and_in_every_second_channel():
    for channel in ("color", "marker", "dash", "hatch"):
        assert len({getattr(s, channel) for s in figures.SERIES}) == len(figures.SERIES), channel
    assert all(max(to_rgb(s.color)) - min(to_rgb(s.color)) > 0.3 for s in figures.SERIES[:-1])


def test_the_commit_is_unknown_outside_a_checkout_and_never_somebody_elses(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "k3lab" / "provenance.py"))
    assert provenance.commit() == "unknown"


def test_sha256_is_of_the_bytes_of_the_file(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert provenance.sha256(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (FRAME.iloc[:, 0], "is a Series, expected a pandas DataFrame"),
        ({"a": 1}, "is a dict"),
        (FRAME.rename_axis(FRAME.columns[0]), "names both the index and a column"),
    ],
)
def test_numbers_that_are_no_table_are_refused(tmp_path, frame, reason):
    with pytest.raises(BadInput, match=reason):
        figures.export(draw(), frame, "x", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_leaves_nothing_half_written(tmp_path, monkeypatch):
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(BadInput, match=r"x\.csv: is a folder"):
        figures.export(draw(), FRAME, "x", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(BadInput, match="cannot be written: Permission denied"):
        figures.export(draw(), FRAME, "y", tmp_path)


def test_the_snippet_says_how_to_make_the_figure_again(tmp_path, monkeypatch):
    """A notebook's figure names its run, with the base name of the user's own input and never a folder of this machine."""
    monkeypatch.delenv("K3LAB_CAPTURE", raising=False)
    assert "Reproduce: `make run NOTEBOOKS=01`" in figures.export(draw(), FRAME, "01_x", tmp_path)[3].read_text()
    monkeypatch.setenv("K3LAB_CAPTURE", "/home/me/my run.safetensors")
    text = figures.export(draw(), FRAME, "01_x", tmp_path)[3].read_text()
    assert "Reproduce: `K3LAB_CAPTURE='my run.safetensors' make run NOTEBOOKS=01`" in text
    assert "Reproduce" not in figures.export(draw(), FRAME, "x", tmp_path)[3].read_text()
    assert "Reproduce: `mine`" in figures.export(draw(), FRAME, "x", tmp_path, "mine")[3].read_text()


def test_what_is_missing_is_an_empty_cell():
    frame = pd.DataFrame({"a": [1.5, float("nan")], "b": ["x", None]})
    assert figures.markdown_table(frame).splitlines()[2:] == ["| 1.5 | x |", "|  |  |"]


def test_what_half_size_or_grey_would_lose_is_named():
    """Small text, text outside the picture, and two series told apart by hue alone."""
    assert figures.problems(draw()) == []
    fig, ax = figures.new("A", "b", size=(4, 2.5))
    ax.plot([0, 1], [0, 1], color="#0072B2", label="blue")
    ax.plot([0, 1], [1, 0], color="#009E73", label="green")
    ax.text(0.5, 0.5, "tiny", fontsize=4)
    fig.text(0.99, 0.5, "far away to the right")
    found = " ".join(figures.problems(fig))
    for part in ("'blue' and 'green' are alike in grey", "'tiny' has 4 points", "'far away to the right' leaves the picture"):
        assert part in found
    ax.lines[1].set_linestyle("dashed")
    assert "alike" not in " ".join(figures.problems(fig))
