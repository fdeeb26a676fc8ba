"""Inputs made to exhaust memory, time or the stack: bounded address space, an exit status, and one line."""

import gzip
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile import ROOT

MEMORY = 700 << 20  # resident bytes beyond those of an idle process; the largest inputs below have 99 MB
SECONDS = 30  # of processor time
VLLM = (ROOT / "tests" / "logs" / "vllm_0.33.log").read_bytes().split(b"\n")[5]
HEAD = b'\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\ndemo:\n'
TAIL = b"\n\ts_endpgm\n\t.amdhsa_kernel demo\n\t\t.amdhsa_user_sgpr_count 2\n    .max_flat_workgroup_size: 128\n"


def header(document: dict, body: bytes = b"") -> bytes:
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + body


def sparse(path: Path, head: bytes, size: int) -> None:
    """A file of `size` bytes that takes no disk: a head, then a hole."""
    with path.open("wb") as f:
        f.write(head)
        f.truncate(size)


def tensor(shape: list[int], size: int, dtype: str = "F32") -> dict:
    about = {"format_version": "1", "kind": "kda", "lower_bound": "-5", "state_layout": "vk"}
    return {"__metadata__": about, "q": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}


def metadata(value: str) -> dict:
    return {"__metadata__": {"format_version": "1", "kind": "call", "model": value}}


FILES: dict[str, bytes | Callable[[Path], None]] = {
    # captures
    "length.safetensors": struct.pack("<Q", 2**63) + b"{",
    "claims99.safetensors": lambda p: sparse(p, struct.pack("<Q", 99_000_000) + b"{", 99_000_100),
    "beyond.safetensors": header(tensor([2**40], 2**42)),
    "overflow.safetensors": header(tensor([2**40, 2**40], 2**63 - 1)),
    "no_elements.safetensors": header(tensor([2**62, 0, 2**40], 0)),
    "three_gib.safetensors": lambda p: sparse(p, header(tensor([3 << 28], 3 << 30)), len(header(tensor([3 << 28], 3 << 30))) + (3 << 30)),
    "nested.safetensors": header(metadata("[" * 1_000_000)),
    "digits.safetensors": header(metadata("9" * 1_000_000)),
    "keys.safetensors": header({"__metadata__": {"format_version": "1"} | {f"k{i}": "1" for i in range(200_000)}}),
    # logs
    "line.log": b"x" * 50_000_000,
    "spec.log": VLLM[:60] * (50_000_000 // 60),
    "bomb.log.gz": lambda p: p.write_bytes(gzip.compress(b"y" * 400_000_000, 1)),
    "nested.log": b'{"speculative_decoding": ' + b"[" * 10_000_000,
    "digits.log": b'{"spec_verify_ct": ' + b"9" * 10_000_000 + b"}",
    "spaces.log": b"SpecDecoding metrics: " + b" " * 2_000_000 + b"Mean acceptance length: ",
    # JSON and tables
    "nested.json": b"[" * 10_000_000,
    "objects.json": b'{"a":' * 2_000_000,
    "digits.json": b'{"num_target_layers": ' + b"9" * 10_000_000 + b"}",
    "size.json": lambda p: sparse(p, b"{", 70 << 20),
    "bars.txt": b"|metric|value|" + b"|" * 1_000_000 + b"\n" + b"|-" * 1_000_000,
    "dashes.txt": b"|tasks|metric|value|\n|" + b"- " * 500_000 + b"|m|1|\n",
    # autotuning
    "tuned.autotune.json": b"[" * 10_000_000,
    "key.log": b"Triton autotuning for function f,\nwith key as " + b" " * 200_000 + b"x\nbest config selected: " + b" " * 200_000 + b"x\n",
    "candidate.log": b"Autotuning kernel f with config " + b" " * 200_000 + b"x\n" + b"utotuning for" * 2_000_000,
    # assembly
    "commas.amdgcn": HEAD + b"\tv_mov_b32_e32 v0" + b", v0" * 200_000 + TAIL,
    "loop.amdgcn": HEAD + b".L1:\n\ts_branch .L1\n" + TAIL,
    "copies.amdgcn": HEAD + b".L1:\n\ts_barrier\n\tds_read_b128 v[0:3], v0\n\ts_branch .L1\n" + TAIL,
    "wide.amdgcn": HEAD + b"\tv_mfma_f32_x v[0:99999999], v0, v0, v0\n" + TAIL,
}  # fmt: skip
COMMANDS = {
    ".safetensors": [["check"], ["nan"]], ".log": [["acceptance"], ["lint"]], ".gz": [["acceptance"]],
    ".json": [["passport", "--engine", "vllm", "--version", "1"], ["lint"]], ".txt": [["evaldelta", str(ROOT / "README.md")]],
    ".amdgcn": [["lds"]],
}  # fmt: skip
CASES = [(name, command) for name in FILES for command in COMMANDS[Path(name).suffix]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Callable[[str, list[str]], dict]]:
    """Runs a command on a file of FILES, in a fork of one process that has imported what it needs."""
    folder = tmp_path_factory.mktemp("limits")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(__file__).with_name("limits.py"), folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as p:

        def one(name: str, args: list[str]) -> dict:
            path, content = folder / name, FILES[name]
            content(path) if callable(content) else path.write_bytes(content)
            p.stdin.write(json.dumps([args[0], str(path), *args[1:]]) + "\n")
            p.stdin.flush()
            found = json.loads(p.stdout.readline())
            path.unlink()
            return found

        yield one
        p.stdin.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are set as Linux has them")
@pytest.mark.parametrize(("name", "command"), CASES, ids=[f"{name}-{command[0]}" for name, command in CASES])
def test_memory_time_and_words_are_bounded(run, name, command):
    """Status 0, 1 or 2 (99: an exception of another kind; below 0: killed), one line at most, whatever the file claims."""
    case = run(name, command)
    assert case["status"] in (0, 1, 2), case
    assert len(case["stderr"].splitlines()) <= 1, case["stderr"]
    assert len(case["stderr"]) < 3000
    assert case["more"] < MEMORY, f"{case['more'] >> 20} MiB"
    assert case["seconds"] < SECONDS
