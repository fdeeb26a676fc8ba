"""What the scripts in data/ share: where a record was made, and files that are never seen half-written."""

import os
import platform
from pathlib import Path

import torch

from k3lab import __version__
from k3lab.provenance import device_name


def made_with(device: str) -> dict[str, str]:
    """Device and versions that a record was made with."""
    name = device_name() if device == "cuda" else f"{platform.machine()} CPU"
    return {"device_type": device, "device": name, "python": platform.python_version(), "torch": torch.__version__, "k3lab": __version__}


def made_on(made: dict[str, str]) -> str:
    """The same as a cell of a card."""
    return f"{made['device']}, Python {made['python']}, torch {made['torch']}, k3lab {made['k3lab']}"


def write_text(path: Path, text: str) -> None:
    """Write text under a temporary name, then rename."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)
