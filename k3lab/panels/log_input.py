"""A box to paste a log into and a file picker, as one control of a panel."""

import ipywidgets as w
import traitlets


class LogText(str):
    """The text of a log. Its repr is the name of the file it came from or belongs in, so that a written-out call stays one line."""

    name: str = "pasted.log"

    def __repr__(self) -> str:
        return repr(self.name)


class LogInput(w.VBox):
    """value is what k3lab.drafter.logs reads: a path that was typed, the text that was pasted or picked, or "" for nothing.

    A picked file is taken byte for byte and never written to disk; the box then says which. What is typed or pasted later replaces it.
    """

    value = traitlets.Unicode("")

    def __init__(self) -> None:
        hint = "log: paste lines of a server's log, or type the path of a file"
        self.box = w.Textarea(placeholder=hint, continuous_update=False, layout=w.Layout(width="38em", height="5em"))
        self.picker = w.FileUpload(description="Pick a log", multiple=False)
        self.picked = w.Label()
        self.clear = w.Button(description="No log")
        super().__init__([self.box, w.HBox([self.picker, self.clear, self.picked])])
        self.box.observe(self._typed, "value")
        self.picker.observe(self._pick, "value")
        self.clear.on_click(lambda _button: self.set_trait("value", ""))

    def _typed(self, change: dict) -> None:
        text = change["new"]
        if text or not self.picked.value:  # emptied by _pick: the file counts
            self.picked.value = ""
            self.value = LogText(text) if "\n" in text.strip() else text.strip()

    def _pick(self, change: dict) -> None:
        if not change["new"]:
            return
        file = change["new"][0]
        text = LogText(bytes(file["content"]).decode("utf-8", "surrogateescape") + "\n")  # the line break says: a text, not a path
        text.name = file["name"]
        self.picked.value = file["name"]
        self.box.value = ""
        self.value = text

    @traitlets.observe("value")
    def _shown(self, change: dict) -> None:
        """Set from outside: the box shows it."""
        if not self.picked.value or not change["new"]:
            self.picked.value = ""
            self.box.value = change["new"]
