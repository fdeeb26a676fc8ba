"""What a notebook is about: shipped data, or the user's own by K3LAB_CAPTURE and K3LAB_LOG, looked at before anything runs on it."""

import os

import pandas as pd

from k3lab.capture import Capture


def chosen(variable: str, shipped: str = "") -> str:
    """The path that the environment variable names, the shipped one (or "") where it is not set.

    A relative path is meant from the notebook's folder, or else from the one above, where `make run` is typed.
    """
    path = os.environ.get(variable) or shipped
    above = os.path.join("..", path)
    return above if path and not os.path.exists(path) and os.path.exists(above) else path


def examined(path: str) -> tuple[Capture, pd.DataFrame]:
    """The capture in path and the doctor's findings, printed and displayed first. Raises BadInput for a file that is none."""
    from IPython.display import display

    capture = Capture.load(path)
    report = capture.check()
    print(f"capture: {os.path.basename(path)}, kind {capture.kind}")
    print("capture doctor:", "nothing found" if report.empty else f"{len(report)} findings")
    if len(report):
        display(report[["severity", "tensor", "finding"]])
    return capture, report
