"""Compile a Triton kernel for a GPU that need not be here, with the installed Triton or another version beside it.

Every batch runs in a subprocess of its own, without TRITON_INTERPRET (an interpreted kernel cannot be compiled), and a
compiler that dies costs the one build it died on. Artefacts (TTGIR, LLIR, assembly, launch metadata) are kept in a folder
named by the hash of everything that decides them: kernel source with its callees, Triton version, target and options.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import joblib
import torch
from tqdm import tqdm

import k3lab
from k3lab.errors import BadInput
from k3lab.kda.call import KdaCall
from k3lab.races.kernel import Kernel, load_kernel
from k3lab.races.toolchain import INSTALLED, toolchain_path
from k3lab.shapes import CHUNK, KIMI_K3_TP8, SUB_CHUNK

TARGETS = ("hip:gfx90a", "hip:gfx942", "hip:gfx950", "cuda:80", "cuda:90", "cuda:100")
ASSEMBLY = {"hip": "amdgcn", "cuda": "ptx"}
RECOMPUTE_W_U = "k3lab.kda.triton_chunk:recompute_w_u_fwd_kernel"
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int8: "i8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip

_D = KIMI_K3_TP8.head_dim
# what an argument of a KDA kernel is where no signature says otherwise: Kimi-K3 on one of eight ranks, bf16
FIELD_SIGNATURE: dict = {
    **dict.fromkeys(("q", "k", "v", "q_n", "k_n", "kg", "w", "u", "A", "o", "v_new", "h", "Aqk", "raw_g", "raw_beta"), "*bf16"),
    **dict.fromkeys(("beta", "g", "gk", "h0", "ht", "Akk", "A_log", "dt_bias"), "*fp32"),
    **dict.fromkeys(("cu_seqlens", "chunk_indices", "chunk_offsets"), "*i32"),
    **dict.fromkeys(("scale", "lower_bound"), "fp32"),
    "qg": None, "BOUNDED": True, "T": "i32", "H": KIMI_K3_TP8.num_heads, "HV": KIMI_K3_TP8.num_heads, "K": _D, "V": _D,
    "BT": CHUNK, "BK": 64, "BV": 64, "BC": SUB_CHUNK, "PADDING": "undefined",
}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """One compilation.

    kernel         "module:name" or "file.py:name"; heuristics and autotune wrappers are taken off
    signature      argument name to type ("*bf16", "i32", …) or to the value of a constexpr (None for an absent tensor);
                   "i32:16" is an integer that is a multiple of 16 in every launch, which decides whether rows are copied
                   asynchronously; a plain integer is specialised as Triton does it at a launch (1, or a multiple of 16)
                   what is not named is taken from FIELD_SIGNATURE, then from the kernel's heuristics and defaults
    pointer_range  every pointer argument carries tt.pointer_range = 32: Triton may use buffer operations (AMD)
    divisible      every pointer argument is divisible by 16
    async_copy     TRITON_HIP_USE_ASYNC_COPY on or off; None leaves it to this Triton version
    toolchain      "installed" or a version that was added (races.toolchain)
    """

    kernel: str
    num_warps: int
    num_stages: int
    target: str = "hip:gfx950"
    signature: Mapping = field(default_factory=dict)
    pointer_range: bool = True
    divisible: bool = True
    async_copy: bool | None = None
    toolchain: str = INSTALLED


@dataclass(frozen=True)
class Compiled:
    """What came of a Build: the folder of its artefacts, or the compiler's error."""

    build: Build
    triton: str = ""
    folder: Path | None = None
    error: str = ""

    def text(self, kind: str) -> str:
        """An artefact: ttgir, llir, amdgcn, ptx or json."""
        if self.folder is None:
            raise BadInput(f"{self.build.kernel} was not built: {self.error}")
        path = self.folder / f"kernel.{kind}"
        if not path.is_file():
            raise BadInput(f"{self.build.kernel} for {self.build.target} has no {kind}")
        return path.read_text()

    def kernel(self) -> Kernel:
        """The assembly ready for races.lds; AMD targets alone."""
        self.text("amdgcn")
        return load_kernel(self.folder / "kernel.amdgcn")


def cache_root() -> Path:
    """K3LAB_ARTEFACTS, or artefacts/ in the user's cache folder."""
    if given := os.environ.get("K3LAB_ARTEFACTS"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k3lab" / "artefacts"


def signature_of(arguments: Mapping) -> dict:
    """Signature from example arguments: tensors give pointer types; integers, floats and None are passed on as values."""
    out: dict = {}
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            if x.dtype not in TYPES:
                raise BadInput(f"argument {name}: dtype {x.dtype} has no Triton type here; known: {', '.join(map(str, TYPES))}")
            out[name] = "*" + TYPES[x.dtype]
        elif x is None or isinstance(x, bool | int | float | str):
            out[name] = {"value": x}
        else:
            raise BadInput(f"argument {name}: {type(x).__name__} is neither a tensor nor a plain value")
    return out


def recompute_w_u_signature(call: KdaCall, padding: str = "undefined") -> dict:
    """Signature of this package's recompute_w_u_fwd_kernel as the chunk forward would launch it on a captured call."""
    dtype = "*" + TYPES[call.q.dtype]
    types = {**dict.fromkeys(("k", "kg", "v", "w", "u", "A"), dtype), "beta": "*fp32", "gk": "*fp32"}
    return {**types, "cu_seqlens": "*i32", "chunk_indices": "*i32", "T": "i32", "H": call.q.shape[1], "K": call.q.shape[2],
            "V": call.v.shape[2], "BT": CHUNK, "BK": 64, "BV": 64, "PADDING": padding}  # fmt: skip


def compile_builds(builds: Iterable[Build], jobs: int = 1, progress: bool = False) -> list[Compiled]:
    """Compile all builds, one subprocess per toolchain and job; the order is kept.

    Raises BadInput if a target or toolchain is unknown, a kernel cannot be loaded (a missing import is named) or a signature
    does not fit it; what a compiler says against one build is in that row's error.
    """
    builds = list(builds)
    if jobs < 1:
        raise BadInput(f"jobs is {jobs}; compiling needs at least one process")
    groups: dict = {}
    for n, b in enumerate(builds):
        if b.target not in TARGETS:
            raise BadInput(f"target {b.target!r} is not one of {', '.join(TARGETS)}")
        if b.kernel.count(":") != 1:
            raise BadInput(f"kernel {b.kernel!r} is not module:kernel or file.py:kernel")
        toolchain_path(b.toolchain)
        groups.setdefault(b.toolchain, []).append(n)
    batches = []
    for version, members in groups.items():
        share = max(1, -(-len(members) // max(1, jobs)))
        batches += [(version, members[i : i + share]) for i in range(0, len(members), share)]
    with tqdm(total=len(builds), desc="compile", disable=not progress, ascii=True) as bar:
        done = joblib.Parallel(n_jobs=jobs, prefer="threads")(joblib.delayed(_batch)(v, m, builds, bar) for v, m in batches)
    results = {n: c for part in done for n, c in part.items()}
    return [results[n] for n in range(len(builds))]


def _batch(version: str, members: list[int], builds: list[Build], bar: tqdm) -> dict[int, Compiled]:
    """Run one worker, and another for what is left if the compiler takes the process down."""
    out: dict[int, Compiled] = {}
    left = list(members)
    while left:
        status, words = _worker(version, left, builds, out, bar)
        left = [n for n in left if n not in out]
        if left:
            died = f"signal {-status}" if status < 0 else f"exit status {status}"
            out[left[0]] = Compiled(builds[left[0]], error=f"the compiler process ended with {died}: {words}")
            bar.update()
            left = left[1:]
    return out


def _worker(version: str, members: list[int], builds: list[Build], out: dict, bar: tqdm) -> tuple[int, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")}
    folder = toolchain_path(version)
    paths = [str(folder)] if folder else []
    env["PYTHONPATH"] = os.pathsep.join([*paths, str(Path(k3lab.__file__).parent.parent), *filter(None, [env.get("PYTHONPATH")])])
    jobs = [{**asdict(builds[n]), "signature": dict(builds[n].signature), "number": n} for n in members]
    order = {"jobs": jobs, "field": FIELD_SIGNATURE, "cache": str(cache_root()), "assembly": ASSEMBLY}
    with tempfile.TemporaryDirectory(prefix="k3lab-compile-") as scratch, open(Path(scratch) / "stderr", "w+") as errors:
        env |= {"TRITON_CACHE_DIR": scratch, "TRITON_ALWAYS_COMPILE": "1"}
        command = [sys.executable, "-m", "k3lab.races.compile_worker"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env) as process:
            process.stdin.write(json.dumps(order))
            process.stdin.close()
            refused = None
            for line in process.stdout:
                answer = json.loads(line)
                if "refused" in answer:
                    refused = answer["refused"]
                    continue
                n = answer["number"]
                out[n] = Compiled(builds[n], answer["triton"], Path(answer["folder"]) if answer["folder"] else None, answer["error"])
                bar.update()
        errors.seek(0)
        lines = [x for x in errors.read().splitlines() if x.strip()]
    if refused:
        raise BadInput(refused)
    return process.returncode, re.sub(r"\s+", " ", lines[-1]) if lines else "no message"
