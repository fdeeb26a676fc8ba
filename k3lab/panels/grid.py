"""A grid of buttons of which one is chosen, as a control of a panel."""

from collections.abc import Hashable, Mapping

import ipywidgets as w
import traitlets


class Grid(w.GridBox):
    """Buttons by key, in rows of `columns`; value is the key of the chosen one, the first to begin with.

    buttons are ipywidgets Buttons, so that a panel may colour and rename them; the chosen one has a thick border.
    """

    value = traitlets.Any()

    def __init__(self, labels: Mapping[Hashable, str], columns: int):
        self.buttons = {key: w.Button(description=label, layout=w.Layout(width="8em")) for key, label in labels.items()}
        layout = w.Layout(grid_template_columns=f"repeat({columns}, 8.5em)", grid_gap="0")
        super().__init__(list(self.buttons.values()), layout=layout)
        for key, button in self.buttons.items():
            button.on_click(lambda _, key=key: self.set_trait("value", key))
        self.value = next(iter(labels))

    @traitlets.validate("value")
    def _known(self, proposal: dict) -> Hashable:
        if proposal["value"] not in self.buttons:
            raise traitlets.TraitError(f"{proposal['value']!r} is not one of {list(self.buttons)}")
        return proposal["value"]

    @traitlets.observe("value")
    def _mark(self, _change: dict) -> None:
        for key, button in self.buttons.items():
            button.layout.border = "3px solid black" if key == self.value else "3px solid transparent"
