"""Text and JSON that users hand in: read with limits, nothing executed; every refusal is one BadInput that names the file."""

import json
import sys
from pathlib import Path

from k3lab.errors import BadInput

LIMIT = 64 * 2**20  # bytes; a config or a results file is a few KB, one with per-sample records a few MB


def read_text(path: str | Path) -> str:
    """The text of a file, or of standard input for `-`. Raises BadInput if it is missing, empty, binary or larger than LIMIT."""
    name = shown_name(path)
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(LIMIT + 1)
        else:
            with open(path, "rb") as f:
                data = f.read(LIMIT + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise BadInput(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > LIMIT:
        raise BadInput(f"{name}: larger than {LIMIT >> 20} MiB, which no file of this kind is; give the config or the results file itself")
    if b"\0" in data:
        raise BadInput(f"{name}: binary (it holds NUL bytes), not text; give the JSON or the text file, not the weights")
    text = data.decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise BadInput(f"{name}: empty")
    return text


def parse_json(text: str, path: str | Path) -> dict:
    """The JSON object in a text. Raises BadInput if it is not one, is nested too deeply, or says one key twice."""
    name = shown_name(path)

    def once(pairs: list[tuple[str, object]]) -> dict:
        found: dict = {}
        for key, value in pairs:
            if key in found:
                raise BadInput(f"{name}: the key {key[:80]!r} is there twice in one object; keep the one that is meant")
            found[key] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise BadInput(f"{name}: JSON nested too deeply to be a file of this kind") from None
    except ValueError as error:  # also an integer of more digits than Python reads
        raise BadInput(f"{name}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{name}: expected a JSON object at the top, found {type(value).__name__}")
    return value


def shown_name(path: str | Path) -> str:
    """How messages name an input."""
    return "standard input" if str(path) == "-" else str(path)
