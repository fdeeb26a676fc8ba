"""A race planted on NVIDIA, the positive control of the sweep: an asynchronous copy whose wait is too weak, beside its correct twin.

A program copies one 64 x 64 tile of bfloat16 from src to dst by way of shared memory (Gluon, Triton's explicit-memory dialect):

    cp.async global -> shared;  commit_group;  wait_group(WAIT);  barrier;  read shared;  store

wait_group(n) returns once at most n groups are in flight. One group was committed, so `planted_correct` (WAIT = 0) waits for
it and `planted_faulty` (WAIT = 1) waits for nothing: the read races with the copy. It is the mistake of recompute_w_u at
num_stages=4 on gfx950 (a wait count that a removed copy made too weak), written out by hand.

What the read finds instead of the tile is what shared memory held before. The launcher therefore first fills the shared
memory of every multiprocessor with a fixed pattern of bits, as another kernel of a serving step would leave its own tiles
there; without it, a repeated launch may find the right tile left over from the launch before, and pass. About one
pattern in nine is above 1e30 when it is read as bfloat16.

Large grids differ in every run. A small one is wrong in nearly the same way each time, so runs compared with each other alone
may call it clean: compare with the source as well.
Compiles with Triton 3.6 (gl.thread_barrier) and 3.7 or later (gl.barrier). NVIDIA, compute capability 8.0 or later.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from k3lab.errors import BadInput, Unsupported
from k3lab.races.sweep_targets import Problem

TILE = 64
WAITS = {"planted_faulty": 1, "planted_correct": 0}

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the name changed in Triton 3.7


@gluon.jit
def tile_copy_kernel(src, dst, WAIT: gl.constexpr, N: gl.constexpr, num_warps: gl.constexpr):
    """dst[tile] = src[tile] for tile = program_id(0), [N, N] each; right only if WAIT = 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])  # 8 bf16 a thread: one 16-byte cp.async
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    o_n = gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    o_nd = gl.program_id(0) * (N * N) + o_n[:, None] * N + o_d[None, :]
    tile = gl.allocate_shared_memory(gl.bfloat16, [N, N], shared)
    async_copy.async_copy_global_to_shared(tile, src + o_nd)
    async_copy.commit_group()
    async_copy.wait_group(WAIT)
    barrier()
    gl.store(dst + o_nd, tile.load(layout))


@gluon.jit
def fill_shared_kernel(sink, N: gl.constexpr, num_warps: gl.constexpr):
    """Leave a fixed pattern of bits in N * 128 words of shared memory, and read it back so that no compiler drops it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    o_n = gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    o_nd = o_n[:, None] * 128 + o_d[None, :]
    b_x = o_nd * 1640531527  # Knuth's multiplicative hash, so that both halves of a word vary
    b_x = b_x ^ (b_x >> 15)
    words = gl.allocate_shared_memory(gl.int32, [N, 128], shared)
    words.store(b_x)
    barrier()
    gl.store(sink + o_nd, words.load(layout))


def problem(kernel: str, spec: Mapping, device: str) -> Problem:
    """`spec["workgroups"]` tiles of randn in bfloat16 [workgroups * 64, 64]; the truth is the source, bit for bit.

    Raises BadInput for an unknown kernel or number of workgroups, Unsupported away from an NVIDIA GPU.
    """
    if kernel not in WAITS:
        raise BadInput(f"kernel {kernel!r} is not one of {', '.join(WAITS)}")
    count = spec.get("workgroups")
    if not isinstance(count, int) or count < 1:
        raise BadInput(f"input {spec.get('name')}: workgroups is {count!r}, expected a positive integer")
    if device == "cpu" or torch.version.hip:
        what = "a CPU" if device == "cpu" else "an AMD GPU"
        raise Unsupported(f"the planted race is cp.async code for an NVIDIA GPU; the device here is {what}")
    gen = torch.Generator(device).manual_seed(int(spec.get("seed", 0)))
    src = torch.randn(count * TILE, TILE, generator=gen, device=device).bfloat16()
    # a copy has no rounding: float64 as the precision leaves a budget of nothing
    return Problem({"src": src, "wait": WAITS[kernel]}, {"dst": torch.empty_like(src)}, {"dst": src}, {"dst": src}, torch.float64)


def launch(config: Mapping, inputs: Mapping, outputs: Mapping[str, Tensor]) -> None:
    """Fill shared memory with the pattern, then copy every tile of src to dst."""
    src = inputs["src"]
    many = 8 * torch.cuda.get_device_properties(src.device).multi_processor_count
    fill_shared_kernel[(many,)](torch.empty(64 * 128, dtype=torch.int32, device=src.device), N=64, num_warps=4)
    tile_copy_kernel[(len(src) // TILE,)](src, outputs["dst"], WAIT=inputs["wait"], N=TILE, num_warps=config["num_warps"])


def racecheck(kernel: str, workgroups: int = 8, num_warps: int = 4, timeout: float = 60.0) -> dict:
    """What compute-sanitizer's racecheck says of one launch: {"status", "hazards", "errors", "warnings", "text"}.

    status is "ok" (the tool ran; hazards 0 means that it found nothing), "hang" (no answer within timeout seconds) or
    "error" (the tool is missing or refused; text says why).
    """
    tool = shutil.which("compute-sanitizer") or next((str(p) for p in Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None)
    if tool is None:
        return {"status": "error", "text": "compute-sanitizer is not on the PATH"}
    program = [sys.executable, "-m", "k3lab.races.planted", kernel, "--workgroups", str(workgroups), "--warps", str(num_warps)]
    command = [tool, "--tool", "racecheck", *program]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+") as out:
        # its own process group, because the sanitizer starts the program as a child that a timeout must end too
        with subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True) as process:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return {"status": "hang", "text": f"no answer within {timeout:g} s"}
        out.seek(0)
        return parse_racecheck(out.read())


def parse_racecheck(text: str) -> dict:
    """The verdict in racecheck's output: its summary line, and the first hazard that it describes."""
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", text)
    lines = [re.sub(r"^=+\s*", "", x).strip() for x in text.splitlines()]
    # a program that failed under the tool also leaves a summary, of nothing
    if summary is None or "planted: done" not in text:
        last = [x for x in lines if x and not x.startswith("RACECHECK SUMMARY")]
        return {"status": "error", "text": " | ".join(last[-6:])[-600:] or "no output"}
    first = next((x for x in lines if re.search(r"\bhazard\b|Race reported", x) and "SUMMARY" not in x), "")
    hazards, errors, warnings = map(int, summary.groups())
    words = " | ".join(filter(None, [summary[0], first]))[:400]
    return {"status": "ok", "hazards": hazards, "errors": errors, "warnings": warnings, "text": words}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m k3lab.races.planted", description="Launch a planted kernel once, for racecheck.")
    parser.add_argument("kernel", choices=WAITS)
    parser.add_argument("--workgroups", type=int, default=8)
    parser.add_argument("--warps", type=int, default=4)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("planted: no GPU is visible")
    src = torch.randn(args.workgroups * TILE, TILE).bfloat16().cuda()
    tile_copy_kernel[(args.workgroups,)](src, torch.empty_like(src), WAIT=WAITS[args.kernel], N=TILE, num_warps=args.warps)
    torch.cuda.synchronize()
    print("planted: done")


if __name__ == "__main__":
    main()
