"""Where Triton kernels may run: the interpreter switch, decided in one place, and the checks before a launch."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from k3lab.errors import BadInput, Unsupported


def interpret_without_gpu() -> bool:
    """Set TRITON_INTERPRET=1 if no GPU is visible and the user has not chosen; return whether the interpreter is on.

    Call it before triton is imported: @triton.jit reads the switch when it decorates.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_interpreted(kernel: object) -> bool:
    """True if this kernel was decorated while TRITON_INTERPRET=1 was set."""
    return type(kernel).__name__ == "InterpretedFunction"


def check_launch(kernel: object, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise Unsupported if the kernel cannot run where the tensors are, BadInput if they are on several devices."""
    given = {name: x for name, x in tensors.items() if x is not None}
    devices = {name: x.device for name, x in given.items()}
    if len(set(devices.values())) > 1:
        raise BadInput(f"tensors on several devices: {', '.join(f'{n} on {d}' for n, d in devices.items())}; move them to one")
    if not is_interpreted(kernel):
        if any(d.type == "cpu" for d in devices.values()):
            raise Unsupported(
                f"{next(iter(given))} is on the CPU and this Triton kernel was compiled for a GPU; "
                'set TRITON_INTERPRET=1 before triton is imported (small shapes), or use impl="torch"'
            )
        return
    for name, x in given.items():
        if x.dtype == torch.bfloat16:
            raise Unsupported(
                f"{name} is bfloat16, whose arithmetic is silently wrong under the Triton interpreter; "
                'use float32 or float16 there (call.to(dtype=torch.float32), or nan --dtype float32), a GPU, or impl="torch"'
            )
