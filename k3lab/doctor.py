"""`python -m k3lab doctor`: what this installation can do, and the fix for each thing that is missing.

Imports nothing heavy at the top and survives a missing torch or Triton: it is what a broken installation runs first.
"""

import importlib
import importlib.metadata
import os
import platform
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from k3lab import __version__
from k3lab.provenance import DATA, device_name, sha256, triton_mode
from k3lab.races.toolchain import toolchain_root, toolchains

# what Triton does where the variable is not set: measured by cross-compiling for gfx950, see notebook 02
TRITON_SWITCHES = {
    "TRITON_HIP_USE_ASYNC_COPY": "off up to Triton 3.7, on for gfx950 from 3.8",
    "AMDGCN_USE_BUFFER_OPS": "on",
}


class Item(NamedTuple):
    """One thing looked at. status: "ok", "optional" (missing, needed for a part only) or "missing" (needed)."""

    item: str
    status: str
    value: str
    fix: str = ""


def examine() -> list[Item]:
    """Every item, in the order a new user needs them."""
    return [Item("python", "ok", platform.python_version()), *_packages(), *_device(), *_switches(), *_toolchains(), *_data()]


def _packages() -> Iterator[Item]:
    """Installed versions against the ranges of pyproject.toml, as the installed metadata has them, one item per extra."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        yield Item("packaging", "missing", "not installed", 'pip install -e ".[triton,notebook,test]"')
        return
    try:
        wanted = [Requirement(r) for r in importlib.metadata.requires("k3lab") or []]
    except importlib.metadata.PackageNotFoundError:
        yield Item("k3lab", "missing", f"{__version__}, imported but not installed", 'pip install -e ".[triton,notebook,test]"')
        return
    yield Item("k3lab", "ok", __version__)
    groups: dict[str, list[Requirement]] = defaultdict(list)
    for r in wanted:
        extra = next((e for e in ("triton", "notebook", "test") if r.marker and r.marker.evaluate({"extra": e})), "")
        if extra or r.marker is None or r.marker.evaluate({"extra": ""}):
            groups[extra].append(r)
    for extra, requirements in groups.items():
        found = {r.name: _version(r.name) for r in requirements}
        wrong = [
            f"{r.name} {found[r.name] or 'is not installed'}{f', needs {r.specifier}' if found[r.name] else ''}"
            for r in requirements
            if not found[r.name] or not r.specifier.contains(found[r.name].split("+")[0], prereleases=True)
        ]
        name = f"packages of [{extra}]" if extra else "packages"
        if wrong:
            yield Item(name, "optional" if extra else "missing", "; ".join(wrong), f'pip install -e ".{f"[{extra}]" if extra else ""}"')
        else:
            shown = [n for n in found if n in ("torch", "triton", "jupyterlab", "pytest", "fla-core")]
            yield Item(name, "ok", ", ".join(f"{n} {found[n]}" for n in shown) + f" ({len(found)} in range)")


def _version(name: str) -> str:
    """The version of a distribution, "" if there is none. ROCm builds of Triton have another name and the same module."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "triton":
            return ""
    try:
        return importlib.import_module(name).__version__
    except ModuleNotFoundError:
        return ""


def _device() -> Iterator[Item]:
    try:
        import torch
    except (ImportError, OSError) as e:
        yield Item("torch", "missing", f"cannot be imported: {e}", "install the build of torch for this machine, see README.md")
        return
    mode = triton_mode()
    if torch.cuda.is_available():
        runtime = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        yield Item("device", "ok", f"{device_name()}, {runtime}")
    else:
        built = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        fix = "" if built == "CPU" else "torch sees no GPU: check the driver, and CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES"
        yield Item("device", "optional" if fix else "ok", f"cpu (torch is a {built} build)", fix)
    text = {
        "native": "compiled for the GPU",
        "interpreter": "under the interpreter: small shapes, fp32 and fp16, no races; torch stages for real sizes",
        "none": "cannot run: no GPU, and TRITON_INTERPRET is set to something else than 1",
    }[mode]
    yield Item("Triton kernels", "optional" if mode == "none" else "ok", text, "unset TRITON_INTERPRET" if mode == "none" else "")


def _switches() -> Iterator[Item]:
    for name, default in TRITON_SWITCHES.items():
        yield Item(name, "ok", os.environ.get(name, f"not set (Triton's default: {default})"))


def _toolchains() -> Iterator[Item]:
    """Triton versions beside the installed one, which `races --toolchain` compiles with."""
    try:
        added = toolchains()
    except OSError as e:
        yield Item("toolchains", "optional", f"{toolchain_root()} cannot be read: {e.strerror}", "set K3LAB_TOOLCHAINS to another folder")
        return
    if added:
        yield Item("toolchains", "ok", f"Triton {', '.join(added)} beside the installed one, in {toolchain_root()}")
    else:
        fix = "python -m k3lab toolchain add 3.8.0"
        yield Item("toolchains", "optional", f"no Triton beside the installed one in {toolchain_root()}", fix)


def _data() -> Iterator[Item]:
    """Each data file against the sha256 that its card names."""
    files = sorted(DATA.rglob("*.safetensors"))
    if not files:
        yield Item("data", "optional", f"no .safetensors file under {DATA}", "run from a clone of the repository, which holds data/")
        return
    sound = 0
    for file in files:
        name = str(file.relative_to(DATA.parent))
        # a card of its own, or one that it shares with the files made with it
        own = [file.with_suffix(".md")]
        if not own[0].is_file():
            own = sorted(set(file.parent.glob("*.md")) - {DATA / "README.md"})
        naming = [c for c in own if c.stem == file.stem or file.name in c.read_text(encoding="utf-8")]
        card = next((c for c in naming if sha256(file) in c.read_text(encoding="utf-8")), naming[0] if naming else None)
        if card is None:
            card = file.with_suffix(".md")
            yield Item(name, "optional", f"has no data card {card.name}", f"git checkout -- {card.relative_to(DATA.parent)}")
        elif sha256(file) not in card.read_text(encoding="utf-8"):
            yield Item(name, "missing", f"its sha256 is not the one in {card.name}: altered or cut short", f"git checkout -- {name}")
        else:
            sound += 1
    yield Item("data", "ok", f"{sound} of {len(files)} .safetensors files are the ones that their cards describe")
