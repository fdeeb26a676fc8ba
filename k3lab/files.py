"""Files that are never seen half-written: a group of them under temporary names, then renamed."""

import os
import tempfile
from pathlib import Path

from k3lab.errors import BadInput


def write_files(folder: str | os.PathLike, files: dict[str, str | bytes]) -> list[Path]:
    """Write texts (UTF-8) and bytes by file name into folder, made if missing: none is renamed before all are written.

    Raises BadInput for a folder that cannot be made or written, or a folder that stands where a file is to be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if taken := [name for name in files if (folder / name).is_dir()]:
            raise BadInput(f"{folder / taken[0]}: is a folder where a file is to be written; remove it or choose another folder")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".k3lab.") as work:
            for name, content in files.items():
                Path(work, name).write_bytes(content.encode() if isinstance(content, str) else content)
            for name in files:
                os.replace(Path(work, name), folder / name)
    except OSError as e:
        raise BadInput(f"{folder}: cannot be written: {e.strerror}; choose another folder (--out, K3LAB_OUT), or make room") from e
    return [folder / name for name in files]
