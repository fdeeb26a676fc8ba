"""The panel of notebook 03: the setting that is chosen, intervals, a log beside it, and what is shown in place of a picture."""

import os
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from k3lab import explore, figures
from k3lab.errors import BadInput
from k3lab.panels import drafter_panel
from k3lab.panels.log_input import LogInput

DATA = Path(__file__).parents[1] / "data"
LOGS = Path(__file__).parent / "logs"
WRONG = DATA / "drafter_fed_prefix.log"


@pytest.fixture(scope="module")
def summary() -> pd.DataFrame:
    return drafter_panel.load(DATA / "drafter_counts.csv", resamples=300)


@pytest.fixture(scope="module")
def counts() -> pd.DataFrame:
    return pd.read_csv(DATA / "drafter_counts.csv")


def caption(fig, gid: str) -> str:
    return " ".join(next(t.get_text() for t in fig.texts if t.get_gid() == gid).split())


@pytest.mark.parametrize(("drafter", "stream", "offset", "domain"), [("mixture", "prefix", 0, "all"), ("prefix", "mixture", 1, "code")])
def test_the_picture_holds_the_summed_counts_of_the_setting(summary, counts, drafter, stream, offset, domain):
    fig, frame = drafter_panel.draw(summary, drafter=drafter, stream=stream, offset=offset, domain=domain)
    rows = counts[(counts["drafter"] == drafter) & (counts["stream"] == stream) & (counts["offset"] == offset)]
    rows = rows if domain == "all" else rows[rows["domain"] == domain]
    mean = rows["emitted"].sum() / rows["drafts"].sum()
    assert f"fed {stream}" in caption(fig, "finding")
    assert f": {mean:.2f} (" in caption(fig, "finding")
    at = frame[(frame["stream"] == stream) & (frame["offset"] == offset)].set_index(["metric", frame.index.name or "position"])
    survival = at.loc["survival"]["value"].tolist()
    assert survival == pytest.approx([rows[f"accepted_{j}"].sum() / rows["drafts"].sum() for j in range(7)])
    means = frame[frame["metric"] == "mean_emitted"]
    assert len(means) == 7  # two streams at three offsets, and zeros
    assert (means["low"] <= means["value"]).all()
    assert (means["value"] <= means["high"]).all()
    assert (means["low"] < means["high"]).all()
    assert figures.problems(fig) == []


def test_seeds_are_pooled_and_prompts_resampled(summary, counts):
    """The unit is the prompt: as many as there are, whatever the number of seeds."""
    row = summary[(summary["domain"] == "prose") & (summary["metric"] == "mean_emitted")].iloc[0]
    assert row["prompts"] == counts[counts["domain"] == "prose"]["prompt"].nunique()
    assert row["seeds"] == 3
    assert set(summary["domain"]) == {"all", *counts["domain"]}


def test_a_log_is_drawn_with_its_diagnosis(summary):
    fig, frame = drafter_panel.draw(summary, stream="prefix", log=str(WRONG))
    seen = frame[frame["of"] == "log"]
    assert seen.loc[seen["metric"] == "mean_emitted", "value"].item() == pytest.approx(75083 / 36141)
    assert seen["stream"].unique().tolist() == ["prefix"]
    assert (seen["metric"] == "survival").sum() == 7
    assert "log: 2.08" in caption(fig, "finding")
    assert "Log: Collapse at position 0" in caption(fig, "ran")
    text = drafter_panel.draw(summary, stream="prefix", log=WRONG.read_text())[1]
    pd.testing.assert_frame_equal(text, frame)


def test_a_log_without_positions_or_mean_still_shows_what_it_says(summary):
    fig, frame = drafter_panel.draw(summary, log=str(LOGS / "sglang.log"))
    assert frame[frame["of"] == "log"]["metric"].tolist() == ["mean_emitted"]
    mixed = (LOGS / "sglang.log").read_text() + (LOGS / "vllm_0.33.log").read_text()
    fig, frame = drafter_panel.draw(summary, log=mixed)
    assert "log" not in set(frame["of"])
    assert "no mean" in caption(fig, "finding")
    assert "different servers" in caption(fig, "ran")
    assert figures.problems(fig) == []


def test_a_changed_file_is_read_again(summary, tmp_path):
    log = tmp_path / "server.log"
    for name, mean in (("prefix", "2.08"), ("mixture", "4.56")):
        log.write_text((DATA / f"drafter_fed_{name}.log").read_text())
        assert f"log: {mean}" in caption(drafter_panel.draw(summary, log=str(log))[0], "finding")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"drafter": "x"}, "mixture, prefix"), ({"domain": "x"}, "all, code"), ({"stream": "zeros", "offset": 1}, r"zeros \+1 was not"),
        ({"log": "no/such.log"}, "no such file"), ({"log": "one line\nand another\n"}, "one line"),
        ({"log": "-"}, "is no file"), ({"log": os.devnull}, "is no file"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_says_why(summary, wrong, said):
    """Also what a kernel would wait for without end: standard input, a pipe."""
    with pytest.raises(BadInput, match=said):
        drafter_panel.draw(summary, **wrong)


def test_a_path_from_the_home_folder_is_found(summary, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.log").write_text((DATA / "drafter_fed_prefix.log").read_text())
    assert "log: 2.0" in caption(drafter_panel.draw(summary, log="~/my.log")[0], "finding")


def test_counts_that_are_none_are_refused(tmp_path):
    with pytest.raises(BadInput, match="not a table of counts"):
        drafter_panel.load(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="no column 'domain'"):
        drafter_panel.load(tmp_path / "other.csv")


def test_controls_redraw_zeros_stand_at_offset_0_and_an_error_takes_the_pictures_place(summary, tmp_path, monkeypatch):
    monkeypatch.setenv("K3LAB_OUT", str(tmp_path))
    widgets = drafter_panel.controls(summary, {"stream": "prefix", "offset": 1})
    again = "k3lab.panels.drafter_panel.draw(summary, "
    box = explore.panel(partial(drafter_panel.draw, summary), widgets, "03_panel", drafter_panel.adapt, again)
    message, picture, button = box.children[1:4]
    assert "fed prefix +1" in picture.value
    widgets["stream"].value = "zeros"
    assert (widgets["offset"].value, widgets["offset"].disabled) == (0, True)
    assert "fed zeros" in picture.value
    widgets["stream"].value = "mixture"
    assert not widgets["offset"].disabled
    widgets["log"].box.value = "nothing that an engine\nhas printed"
    assert 'role="alert"' in message.value
    assert "nothing that an engine" in message.value
    assert picture.value == ""
    widgets["log"].box.value = WRONG.read_text()
    assert "Collapse at position 0" in picture.value
    button.click()
    snippet = (tmp_path / "03_panel.md").read_text()
    assert "Collapse" in snippet
    assert "log='pasted.log')`" in snippet  # not the text itself
    widgets["log"].clear.click()
    assert widgets["log"].value == ""
    assert "Collapse" not in picture.value


def test_a_picked_file_is_taken_byte_for_byte_and_pasting_replaces_it():
    control = LogInput()
    seen = []
    control.observe(lambda change: seen.append(change["new"]), "value")
    content = WRONG.read_bytes() + b"\xff\x00 not utf-8"
    control._pick({"new": ({"name": "server.log", "content": memoryview(content)},)})
    assert control.value.encode("utf-8", "surrogateescape") == content + b"\n"
    assert (repr(control.value), control.picked.value, control.box.value) == ("'server.log'", "server.log", "")
    control.box.value = "a path/of.log "
    assert (control.value, control.picked.value) == ("a path/of.log", "")
    assert len(seen) == 2
    control.value = "set/from/outside.log"
    assert control.box.value == "set/from/outside.log"
