"""The figures of the notebooks by name: on the shipped data, on a log or a capture of one's own, and what is refused."""

from pathlib import Path

import pytest

from k3lab import figure_pack, figures
from k3lab.__main__ import main
from k3lab.errors import BadInput

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "tests" / "logs"


def ran(fig) -> str:
    return " ".join(next(t.get_text() for t in fig.texts if t.get_gid() == "ran").split())


@pytest.mark.parametrize("name", list(figure_pack.FIGURES))
def test_a_figure_of_the_shipped_data_is_readable_at_half_size_and_in_grey(name):
    ((made, (fig, frame)),) = figure_pack.make([name])
    assert made == name
    assert len(frame)
    assert figures.problems(fig) == []


def test_a_log_given_makes_the_figures_of_a_log_alone():
    made = dict(figure_pack.make(log=LOGS / "vllm_0.33.log"))
    assert list(made) == ["03_log", "03_overlay"]
    for fig, _ in made.values():
        assert "vllm_0.33.log" in ran(fig)
    assert made["03_overlay"][1]["value"].iloc[0] == pytest.approx(2.85, abs=0.005)


def test_a_capture_given_makes_the_figures_of_its_kind():
    made = dict(figure_pack.make(capture=ROOT / "data" / "captures" / "attn_res_layer4.safetensors"))
    assert list(made) == ["03_weights", "03_streams"]
    assert made["03_weights"][1]["after layer"].tolist() == [4]
    assert "attn_res_layer4.safetensors" in ran(made["03_streams"][0])


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    with pytest.raises(BadInput, match="kind"):
        list(figure_pack.make(["03_streams"], capture=figure_pack.SHIPPED))
    with pytest.raises(BadInput, match=r"unknown\.log"):
        list(figure_pack.make(["03_overlay"], log=LOGS / "unknown.log"))
    with pytest.raises(BadInput, match="no such file"):
        list(figure_pack.make(["03_log"], log=tmp_path / "none.log"))


def test_an_input_that_no_named_figure_shows_is_refused():
    """A figure of the shipped data must not pass for one of the file that was given."""
    with pytest.raises(BadInput, match=r"--capture .*: 03_log shows other data; figures of a capture: 01_tiles"):
        list(figure_pack.make(["03_log"], capture=figure_pack.SHIPPED))
    with pytest.raises(BadInput, match=r"--log .*: 01_routes shows other data; figures of a log: 03_log, 03_overlay"):
        list(figure_pack.make(["01_routes"], log=LOGS / "vllm_0.33.log"))


def test_the_command_takes_a_log_and_says_how_to_make_the_figure_again(tmp_path, capsys):
    assert main(["figures", "03_log", "--log", str(LOGS / "vllm_0.33.log"), "--out", str(tmp_path)]) == 0
    assert "Reproduce: `python -m k3lab figures 03_log --log vllm_0.33.log`" in (tmp_path / "03_log.md").read_text()
    assert main(["figures", "03_log", "--log", str(LOGS / "unknown.log"), "--out", str(tmp_path / "none")]) == 2
    assert "unknown.log" in capsys.readouterr().err
    assert not list((tmp_path / "none").glob("03_log*"))
