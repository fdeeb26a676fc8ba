"""The figures of notebook 02: their frames say what the rows and the compiled code say, and a wrong selection is refused."""

import os
from pathlib import Path

import pandas as pd
import pytest

from k3lab import figures, race_figures
from k3lab.errors import BadInput
from k3lab.races.compiled import compile_builds
from k3lab.races.controls import REPORTED
from k3lab.races.matrix import CONFIGS, INPUTS, matrix_builds, read_journal

triton = pytest.importorskip("triton", reason="Triton has no build for this platform")
DATA = Path(__file__).parent.parent / "data"
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def shipped() -> pd.DataFrame:
    rows = pd.DataFrame(read_journal(DATA / "race_matrix.jsonl"))
    return rows[(rows["target"] == "hip:gfx950") & (rows["async"] == "on")]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """w4s4, w4s3, w4s2 without pointer_range, compiled here; the waits below are those of Triton 3.7.1."""
    if triton.__version__ != "3.7.1":
        pytest.skip("the waits of this Triton version were not written down")
    old = os.environ.get("K3LAB_ARTEFACTS")
    os.environ["K3LAB_ARTEFACTS"] = str(tmp_path_factory.mktemp("artefacts"))
    builds = matrix_builds(["installed"], ["hip:gfx950"], (False,), (True,), ("undefined",), [(4, 4), (4, 3), (4, 2)])
    yield dict(zip(("w4s4", "w4s3", "w4s2"), [c.kernel() for c in compile_builds(builds)], strict=True))
    if old is None:
        del os.environ["K3LAB_ARTEFACTS"]
    else:
        os.environ["K3LAB_ARTEFACTS"] = old


def saved(fig, frame, folder):
    paths = {p.suffix: p for p in figures.export(fig, frame, "x", folder)}
    assert paths[".png"].read_bytes()[:4] == PNG
    assert figures.problems(fig) == []
    return pd.read_csv(paths[".csv"])


def test_race_card_counts_racy_configs_per_panel(shipped, tmp_path):
    rows = shipped[(shipped["triton"] == "3.7.1") & (shipped["padding"] == "undefined")]
    fig, frame = race_figures.race_card_figure(rows, "what ran")
    assert len(saved(fig, frame, tmp_path)) == len(rows) == len(CONFIGS) * len(INPUTS) * 2
    title = next(t.get_text() for t in fig.texts if t.get_gid() == "finding")
    assert " ".join(title.split()) == "pointer_range off: 5 of 9 configs race; pointer_range on: 0 of 9 configs race"
    cell = frame[~frame["pointer_range"] & (frame["config"] == "w4s4")].set_index("input")
    assert cell["race"].to_dict() == {"full": 16, "length1": 2, "middle": 16, "tail": 4}
    assert cell["enough"].to_dict() == {"full": "vmcnt(2)", "length1": "vmcnt(1)", "middle": "vmcnt(2)", "tail": "vmcnt(1)"}
    # letters stand beside the colours
    texts = [t.get_text() for t in fig.axes[0].texts]
    assert texts.count("R 16") == 4
    assert texts.count("U") == 8


def test_race_card_refuses_a_mixture(shipped):
    with pytest.raises(BadInput, match="one Triton version"):
        race_figures.race_card_figure(shipped, "mixed")


def test_versions_figure_names_the_clean_version(shipped, tmp_path):
    fig, frame = race_figures.versions_figure(shipped, "what ran")
    saved(fig, frame, tmp_path)
    title = next(t.get_text() for t in fig.texts if t.get_gid() == "finding")
    assert "Every version but 3.9.0" in " ".join(title.split())
    assert len(fig.axes) == 4
    fig, _ = race_figures.versions_figure(shipped[shipped["triton"] == "3.8.0"], "one version")
    assert "Every version has racy configs" in " ".join(next(t.get_text() for t in fig.texts if t.get_gid() == "finding").split())


def test_timeline_shows_the_copy_in_flight_at_the_read(kernels, tmp_path):
    racy, safe = (race_figures.timeline(kernels[n], "full", n) for n in ("w4s4", "w4s2"))
    for t, hazard in ((racy, True), (safe, False)):
        f = t.frame[t.frame["wave"] == 1]
        read = f[(f["event"] == "read") & (f["copy"] == 0)]["row"].item()
        landed = f[(f["event"] == "copy") & (f["copy"] == 0)]["landed"]
        assert len(landed) == 2
        assert (landed > read).all() == hazard
        assert f["racing"].any() == hazard
        assert f[f["event"] == "copy"]["copy"].tolist() == [0, 0, 1, 1]
    fig, frame = race_figures.timelines_figure([racy, safe], "finding", "what ran")
    assert set(saved(fig, frame, tmp_path)["build"]) == {"w4s4", "w4s2"}


def test_timeline_at_length_1_has_one_wave_that_copies(kernels):
    """Masked lanes branch around their copies; numbers of copies stay those of a full chunk."""
    f = race_figures.timeline(kernels["w4s3"], "length1", "w4s3").frame
    assert f[f["event"] == "copy"][["wave", "copy"]].to_numpy().tolist() == [[0, 0], [0, 1]]
    assert set(f[(f["event"] == "read") & f["racing"]]["wave"]) == {0, 1, 2, 3}
    assert f[f["event"] == "barrier"].groupby("wave").size().nunique() == 1


def test_timeline_refuses_a_tile_that_is_not_copied(kernels):
    with pytest.raises(BadInput, match="no asynchronous copy of tile 'beta'"):
        race_figures.timeline(kernels["w4s2"], "full", "w4s2", tile="beta")


def test_what_a_read_too_early_would_take(kernels):
    """Every racing byte has one content; an ordered kernel has none."""
    stale = race_figures.stale_frame(kernels["w4s4"], "full").set_index("content")["bytes"].to_dict()
    assert stale == {"A of this workgroup": 7744, "gk of an earlier one": 448}
    assert race_figures.stale_frame(kernels["w4s2"], "full").empty


def test_waits_are_patched_down_to_zero(kernels, tmp_path):
    frame = race_figures.waits_frame(kernels["w4s4"])
    table = {i: dict(zip(g["value"], g["pairs"], strict=True)) for i, g in frame.groupby("input")}
    assert table == {
        "full": {4: 16, 3: 8, 2: 0, 1: 0, 0: 0}, "middle": {4: 16, 3: 8, 2: 0, 1: 0, 0: 0},
        "length1": {4: 2, 3: 2, 2: 2, 1: 0, 0: 0}, "tail": {4: 4, 3: 4, 2: 4, 1: 0, 0: 0},
    }  # fmt: skip
    saved(race_figures.waits_figure(frame, "what ran"), frame, tmp_path)
    assert race_figures.waits_frame(kernels["w4s2"], ["full"]).empty
    with pytest.raises(BadInput, match="no input has a race"):
        race_figures.waits_figure(frame[:0], "nothing")


def test_controls_figure_adds_up(tmp_path):
    counts = pd.read_csv(DATA / "race_controls.csv")
    two = counts[counts["build"].isin(counts["build"].unique()[:2])]
    fig = race_figures.controls_figure(two, "what ran")
    saved(fig, two, tmp_path)
    lengths = sum(sum(p.get_width() for p in bars) for bars in fig.axes[0].containers)
    assert lengths == two["mutants"].sum()
    reported = counts[counts["outcome"] == REPORTED]["mutants"].sum()
    card = (DATA / "race_controls.md").read_text()
    assert f"{counts['mutants'].sum()} mutants of {counts['build'].nunique()} builds" in card
    assert 0 < reported < counts["mutants"].sum()
    with pytest.raises(BadInput, match="unknown outcome lost"):
        race_figures.controls_figure(two.assign(outcome="lost"), "wrong")
