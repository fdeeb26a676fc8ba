"""k3lab.explore: pictures wherever a notebook runs, controls in a live session alone, errors in the panel and never a traceback."""

import IPython
import ipywidgets as w
import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from k3lab import explore, figures
from k3lab.errors import BadInput


def draw(n: int = 1, color: str = "blue") -> tuple:
    if n < 0:
        raise BadInput(f"n: {n} is below 0 <b>; raise it")
    if n == 7:
        raise ZeroDivisionError("seven")
    fig, ax = figures.new(f"n is {n}", f"color {color}")
    ax.bar([0], [n], color=color)
    return fig, pd.DataFrame({"n": [n]})


def controls() -> dict:
    return {"n": w.IntSlider(value=1, min=-1, max=9), "color": w.Dropdown(options=["blue", "red"])}


@pytest.fixture
def panel():
    widgets = controls()
    box = explore.panel(draw, widgets, "shot", again="module.draw(")
    return widgets, *box.children[1:]


def test_a_change_redraws_with_all_values(panel):
    widgets, _, picture, _ = panel
    seen = {picture.value}
    widgets["n"].value = 3
    assert 'alt="n is 3. color blue"' in picture.value
    seen.add(picture.value)
    widgets["color"].value = "red"
    assert 'alt="n is 3. color red"' in picture.value
    seen.add(picture.value)
    assert len(seen) == 3
    assert "data:image/png;base64,iVBOR" in picture.value


@pytest.mark.parametrize(("n", "words"), [(-1, "n: -1 is below 0 &lt;b&gt;; raise it"), (7, "ZeroDivisionError: seven")])
def test_an_error_stands_in_the_panel_and_the_panel_goes_on(panel, n, words):
    """Known or not, an error is text, with what it quotes escaped; the old picture does not stay under new values."""
    widgets, message, picture, button = panel
    widgets["n"].value = n
    assert words in message.value
    assert 'role="alert"' in message.value
    assert picture.value == ""
    assert button.disabled
    widgets["n"].value = 2
    assert "alert" not in message.value
    assert "n is 2" in picture.value
    assert not button.disabled


def test_save_exports_what_is_shown_and_says_how_to_draw_it_again(panel, tmp_path, monkeypatch):
    widgets, message, _, button = panel
    monkeypatch.setenv("K3LAB_OUT", str(tmp_path / "out"))
    widgets["n"].value = 4
    button.click()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["shot.csv", "shot.md", "shot.png", "shot.svg"]
    assert "module.draw(n=4, color='blue')" in (tmp_path / "out" / "shot.md").read_text()
    assert "shot.png" in message.value
    monkeypatch.setenv("K3LAB_OUT", str(tmp_path / "out" / "shot.md"))
    button.click()
    assert 'role="alert"' in message.value


def test_adapt_moves_controls_without_a_second_redraw():
    calls = []

    def counted(**values):
        calls.append(values)
        return draw(**values)

    def adapt(widgets):
        widgets["color"].value = "red" if widgets["n"].value > 2 else "blue"

    widgets = controls()
    explore.panel(counted, widgets, adapt=adapt)
    widgets["n"].value = 5
    assert calls == [{"n": 1, "color": "blue"}, {"n": 5, "color": "red"}]


def test_without_a_kernel_or_with_the_variable_it_is_not_live(monkeypatch):
    monkeypatch.delenv("K3LAB_STATIC", raising=False)
    assert not explore.live()
    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": object()})())
    assert explore.live()
    monkeypatch.setenv("K3LAB_STATIC", "1")
    assert not explore.live()


CELL = """
import pandas as pd
from k3lab import figures
from k3lab.errors import BadInput
from k3lab.explore import explore

def draw(n):
    if n > 2:
        raise BadInput("n: too many")
    fig, ax = figures.new("finding", "ran")
    return fig, pd.DataFrame()

def controls():
    import ipywidgets
    return {"n": ipywidgets.IntSlider(value=1, min=1, max=2)}

explore(draw, [{"n": 1}, {"n": 3}, {"n": 2}], controls)
"""


@pytest.mark.slow
@pytest.mark.parametrize("static", ["1", "0"])
def test_in_a_kernel_the_pictures_come_first_and_widgets_only_when_live(static, monkeypatch):
    """A picture per value, words for one that cannot be drawn; K3LAB_STATIC=1 leaves no widget in the outputs."""
    monkeypatch.setenv("K3LAB_STATIC", static)
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(nb, timeout=120, kernel_name="python3").execute()
    kinds = [
        o.get("text") or [k for k in o.data if "widget" in k or k == "image/png"] for o in nb.cells[0].outputs if o.get("name") != "stderr"
    ]
    view = ["application/vnd.jupyter.widget-view+json"]
    assert kinds == [["image/png"], "not drawn for {'n': 3}: n: too many\n", ["image/png"]] + ([view] if static == "0" else [])
