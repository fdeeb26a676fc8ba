"""Triton versions installed beside the one in the environment, each in a folder of its own."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from k3lab.errors import BadInput

INSTALLED = "installed"


def toolchain_root() -> Path:
    """K3LAB_TOOLCHAINS, or toolchains/ in the user's cache folder."""
    if given := os.environ.get("K3LAB_TOOLCHAINS"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k3lab" / "toolchains"


def toolchains() -> list[str]:
    """Versions that have been added, in order."""
    found = [p.name.removeprefix("triton-") for p in toolchain_root().glob("triton-*") if (p / "triton" / "__init__.py").is_file()]
    return sorted(found, key=lambda v: [int(x) for x in re.findall(r"\d+", v)])


def toolchain_path(version: str) -> Path | None:
    """Folder to put before site-packages for a Triton version, None for the installed one. Raises BadInput if it is missing."""
    if version == INSTALLED:
        return None
    folder = toolchain_root() / f"triton-{version}"
    if not (folder / "triton" / "__init__.py").is_file():
        have = ", ".join(toolchains()) or "none"
        raise BadInput(f"Triton {version} is not among the toolchains (have: {have}); add it with: python -m k3lab toolchain add {version}")
    return folder


def add_toolchain(version: str) -> Path:
    """Install Triton `version` with pip into its own folder, nothing else; a folder that exists is kept as it is."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?([.\w+-]*)", version):
        raise BadInput(f"toolchain version {version!r} is not a version number like 3.8.0")
    folder = toolchain_root() / f"triton-{version}"
    if (folder / "triton" / "__init__.py").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # a killed install must not look like a finished one
    temporary = Path(tempfile.mkdtemp(prefix=f".triton-{version}-", dir=folder.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(temporary), f"triton=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not (temporary / "triton" / "__init__.py").is_file():
        shutil.rmtree(temporary)
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise BadInput(f"pip could not install triton=={version}: {last}")
    os.replace(temporary, folder)
    return folder
