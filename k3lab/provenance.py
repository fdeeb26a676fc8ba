"""Where a result came from, in one line: versions, device, how Triton kernels ran, and the commit for what is exported."""

import hashlib
import os
import subprocess
from pathlib import Path

from k3lab import __version__

DATA = Path(__file__).resolve().parents[1] / "data"  # of the checkout; an installed copy has none


def sha256(path: str | os.PathLike) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def device_name() -> str:
    """The GPU that torch sees, with its gfx architecture on ROCm, or "cpu"."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name} {properties.gcnArchName}" if torch.version.hip else properties.name


def triton_mode() -> str:
    """How the Triton kernels of k3lab run here: "interpreter", "native", or "none" (no GPU, and TRITON_INTERPRET set to 0)."""
    import torch

    from k3lab.kda.runtime import interpret_without_gpu

    if interpret_without_gpu():
        return "interpreter"
    return "native" if torch.cuda.is_available() else "none"


def versions() -> str:
    """One line for the first cell of a notebook and the foot of a figure; the same on every run of the same installation."""
    import torch

    mode = triton_mode()  # before triton is imported, which reads the switch
    try:
        import triton

        kernels = f"triton {triton.__version__} ({mode})"
    except ModuleNotFoundError:
        kernels = "no triton"
    return f"k3lab {__version__} · torch {torch.__version__} · {kernels} · {device_name()}"


def commit() -> str:
    """Short hash of the checkout that this k3lab runs from, "+changes" after it if files were edited; "unknown" outside one."""
    here = Path(__file__).resolve()

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(here.parent), *args], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed copy may lie inside somebody else's repository
        return git("describe", "--always", "--exclude=*", "--dirty=+changes")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
