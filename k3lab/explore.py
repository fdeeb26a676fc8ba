"""Pictures always, controls when someone is there to move them.

    explore(draw, shown=[{"length": 1}, {"length": 64}], controls=lambda: {"length": ipywidgets.IntSlider(1, 1, 130)})

draw is a pure function of its keyword arguments and returns a figure and its numbers. The pictures for `shown`, the values that the
text discusses, are emitted as PNG wherever the notebook runs, so a rendered notebook or a hosting page lacks nothing. In a live
session a panel follows: controls, the picture that they choose, and a button that writes it to files.
"""

import base64
import html
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from k3lab import figures
from k3lab.errors import K3labError

if TYPE_CHECKING:
    from ipywidgets import VBox, Widget

Draw = Callable[..., tuple[Figure, pd.DataFrame]]
PANEL_DPI = 120  # a redraw of a panel is waited for; figures.DPI is for what is kept


def live() -> bool:
    """True in a notebook kernel, unless K3LAB_STATIC=1.

    A kernel cannot see whether a page is attached to it: JupyterLab, VS Code and nbclient look alike from inside. So whoever runs a
    notebook with nobody there says so; `.ci/notebooks.py` sets the variable. A plain `python notebook.py` has no kernel.
    """
    if os.environ.get("K3LAB_STATIC", "0") == "1":
        return False
    try:
        from IPython import get_ipython
    except ModuleNotFoundError:
        return False
    return hasattr(get_ipython(), "kernel")


def explore(
    draw: Draw,
    shown: Sequence[Mapping[str, Any]],
    controls: Callable[[], Mapping[str, "Widget"]],
    name: str = "panel",
    adapt: Callable[[Mapping[str, "Widget"]], None] | None = None,
    again: str = "draw(",
) -> None:
    """Display draw(**values) for each of shown; in a live session (see live) also a panel of controls.

    draw      keyword values to (figure, frame); raises K3labError for values that cannot be drawn
    controls  makes the widgets by the name of the value they set; called in a live session alone, so it may import ipywidgets
    name      file name of what the panel's button writes
    adapt     called before each redraw to fit ranges of widgets to the values of others
    again     how a call of draw begins in the "Reproduce" line of what is exported; the values follow
    """
    from IPython.display import display

    for values in shown:
        try:
            display(draw(**values)[0])
        except K3labError as error:  # the input of a user may lack what the text discusses
            print(f"not drawn for {dict(values)}: {error}")
    if not live():
        return
    try:
        widgets = controls()
    except ModuleNotFoundError as error:
        print(f"no controls: {error.name} is not installed; pip install ipywidgets, then restart the kernel and reload the page")
        return
    display(panel(draw, widgets, name, adapt, again))


def panel(
    draw: Draw,
    controls: Mapping[str, "Widget"],
    name: str = "panel",
    adapt: Callable[[Mapping[str, "Widget"]], None] | None = None,
    again: str = "draw(",
) -> "VBox":
    """The controls, what they choose, and a button that exports it. A change redraws; an error is shown in place of the picture."""
    import ipywidgets as w

    picture = w.HTML().add_class("k3lab-picture")
    message = w.HTML().add_class("k3lab-message")
    button = w.Button(description="Save picture", tooltip="PNG, SVG, CSV and Markdown, to K3LAB_OUT or out/")
    adapting = False

    def values() -> dict[str, Any]:
        return {key: control.value for key, control in controls.items()}

    def attempt(action: Callable[[], str]) -> bool:
        """Show what the action says, or in red why it failed: a traceback in a server's log helps nobody who looks at the panel."""
        try:
            role, color, text = "status", "#333333", action()
        except K3labError as error:
            role, color, text = "alert", "#b00020", str(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error} (not an error of the input that k3lab knows; values: {values()})"
            role, color = "alert", "#b00020"
        message.value = f'<div role="{role}" style="color:{color};line-height:1.4">{html.escape(text)}</div>'
        return role == "status"

    def draw_now() -> str:
        if adapt:
            adapt(controls)
        picture.value = image(draw(**values())[0])
        return ""

    def redraw(_change: object = None) -> None:
        nonlocal adapting
        if adapting:  # a control that adapt moved
            return
        adapting = True
        button.disabled = not attempt(draw_now)
        adapting = False
        if button.disabled:
            picture.value = ""

    def save(_button: object) -> None:
        again_with = again + ", ".join(f"{key}={value!r}" for key, value in values().items()) + ")"
        attempt(lambda: "written: " + ", ".join(map(str, figures.export(*draw(**values()), name, reproduce=again_with))))

    for control in controls.values():
        control.observe(redraw, "value")
    button.on_click(save)
    redraw()
    box = w.Box([*controls.values()], layout=w.Layout(flex_flow="row wrap", align_items="flex-start"))
    return w.VBox([box, message, picture, button]).add_class("k3lab-panel")


def image(fig: Figure) -> str:
    """The figure as an <img> with its finding and subtitle as alternative text."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(figures.RC):
        fig.savefig(buffer, format="png", dpi=PANEL_DPI, pil_kwargs={"compress_level": 1})
    alt = ". ".join(" ".join(t.get_text().split()) for t in fig.texts if t.get_gid() in ("finding", "ran"))
    data = base64.b64encode(buffer.getvalue()).decode()
    width = round(100 * fig.get_figwidth())
    return f'<img alt="{html.escape(alt)}" style="max-width:100%;width:{width}px" src="data:image/png;base64,{data}">'
