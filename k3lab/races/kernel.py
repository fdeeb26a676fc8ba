"""A compiled kernel to analyse (assembly, TTGIR, launch metadata) and the integer inputs to run it with."""

import json
import re
import reprlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from k3lab.errors import BadInput
from k3lab.races.asm import Instruction, Program, parse
from k3lab.races.state import Memory
from k3lab.shapes import CHUNK

INTEGERS = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "u32": np.uint32, "u64": np.uint64}
LIMIT = 64 * 2**20  # characters; the assembly of a kernel is a few hundred KB
LDS_BYTES = {"gfx950": 160 * 1024}  # per compute unit; 64 KiB on every other gfx9


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel. args are (name, TTGIR type) of what the launch passes, in order; ttgir may be empty."""

    program: Program
    warps: int
    lds_bytes: int
    args: tuple
    ttgir: str
    where: str

    @property
    def arg_names(self) -> tuple:
        """One name per entry of the kernel descriptor; Triton appends scratch pointers that no source argument has."""
        names = [n for n, _ in self.args]
        return tuple(names[k] if k < len(names) else f"arg{k}" for k in range(len(self.program.args)))


@dataclass(frozen=True)
class Input:
    """Integers that decide a kernel's control flow: buffer contents and scalars by argument name, program ids.

    Buffers that are not named here hold opaque data; a kernel that branches on them or addresses LDS with them is refused.
    """

    name: str
    buffers: dict = field(default_factory=dict)
    scalars: dict = field(default_factory=dict)
    workgroup: tuple = (0, 0, 0)


def _text(path: Path) -> str:
    with path.open(encoding="utf-8") as f:
        text = f.read(LIMIT + 1)
    if len(text) > LIMIT:
        raise BadInput(f"{path}: has more than {LIMIT:,} characters, which no kernel has; pass the .amdgcn file that Triton caches")
    return text


def load_kernel(path: str | Path) -> Kernel:
    """Kernel from a .amdgcn file, its .ttgir and .json (Triton's launch metadata) read beside it where they exist."""
    path = Path(path)
    try:
        text = _text(path)
        ttgir = path.with_suffix(".ttgir")
        types = _text(ttgir) if ttgir.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: it, or the .ttgir beside it, cannot be read as text: {error}") from None
    meta = path.with_suffix(".json")
    metadata = {}
    if meta.is_file():
        try:
            metadata = json.loads(meta.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BadInput(f"{meta}: launch metadata is not JSON: {error}") from None
        if not isinstance(metadata, dict):
            raise BadInput(f"{meta}: launch metadata is not a JSON object")
    return make_kernel(text, types, metadata, str(path))


def make_kernel(amdgcn: str, ttgir: str = "", metadata: dict | None = None, where: str = "assembly") -> Kernel:
    """Kernel from texts; warps come from the metadata or, without it, from the workgroup size in the assembly."""
    metadata = metadata or {}
    for key in ("num_warps", "shared"):
        if metadata.get(key) is not None and (type(metadata[key]) is not int or metadata[key] < 0):
            raise BadInput(f"{where}: launch metadata: {key} is {reprlib.repr(metadata[key])}, expected a whole number")
    program = parse(amdgcn, where)
    size = re.search(r"\.max_flat_workgroup_size:\s+(\d{1,9})\b", amdgcn)
    warps = metadata.get("num_warps") or (int(size[1]) // 64 if size else 0)
    if not 1 <= warps <= 16:
        raise BadInput(f"{where}: {warps} waves of 64 per workgroup; expected 1 to 16 (num_warps or .max_flat_workgroup_size)")
    limit = LDS_BYTES.get(program.arch, 64 * 1024)
    shared = metadata.get("shared") or 0
    if shared > limit:
        raise BadInput(f"{where}: the launch asks for {shared} bytes of LDS, {program.arch} has {limit}")
    return Kernel(program, warps, shared or limit, tuple(_signature(ttgir)), ttgir, where)


def _signature(ttgir: str) -> list[tuple[str, str]]:
    head = re.search(r"tt\.func public @[\w.$]+\((.*?)\)\s*(?:attributes|\{|loc)", ttgir, re.S)
    if not head:
        return []
    found = re.findall(r'%(\w+): (!tt\.ptr<[^>]*>|[\w!.]+(?:<[^>]*>)?)(?:\s*\{[^}]*\})?(?:\s*loc\("(\w+)"\(#loc\w*\)\))?', head[1])
    return [(source or name, kind) for name, kind, source in found]


def make_memory(kernel: Kernel, given: Input) -> Memory:
    """The launch's arguments for `given`; raises BadInput for a name or type that the kernel does not have."""
    kinds = dict(kernel.args)
    names = kernel.arg_names
    buffers = {}
    for name, values in given.buffers.items():
        if name not in names:
            raise BadInput(f"input {given.name}: buffer {name!r} is not an argument of {kernel.program.name}: {', '.join(names)}")
        pointee = re.sub(r"!tt\.ptr<(\w+).*", r"\1", kinds.get(name) or "!tt.ptr<i32>")  # no TTGIR: cu_seqlens as engines pass it
        if pointee not in INTEGERS:
            raise BadInput(f"input {given.name}: buffer {name!r} has element type {pointee}; only integers are given")
        try:
            buffers[name] = np.asarray(values, dtype=INTEGERS[pointee])
        except OverflowError as error:
            raise BadInput(f"input {given.name}: buffer {name!r} holds a number that is no {pointee}: {error}") from None
    for name in given.scalars:
        if name not in names:
            raise BadInput(f"input {given.name}: scalar {name!r} is not an argument of {kernel.program.name}: {', '.join(names)}")
    return Memory(names, buffers, dict(given.scalars))


def standard_input(kernel: Kernel, name: str) -> Input:
    """The chunk that one workgroup sees, by name, for kernels that take cu_seqlens and chunk_indices, or a plain length T.

    full     64 of 64 rows            length1  1 row, the only token of its sequence; lengthN: the last chunk of N tokens
    middle   third chunk of a 200-token sequence that is not the first      tail   its last chunk, 8 rows
    The head (program id 1) is 3, so that a mistake in a head stride would show.
    """
    names = kernel.arg_names
    last = re.fullmatch(r"length(\d+)", name)
    if name == "full":
        lengths, sequence, chunk = [CHUNK], 0, 0
    elif last and int(last[1]) > 0:
        lengths, sequence, chunk = [int(last[1])], 0, (int(last[1]) - 1) // CHUNK
    elif name in ("middle", "tail"):
        lengths, sequence, chunk = [CHUNK, 200], 1, 2 if name == "middle" else 3
    else:
        raise BadInput(f"input {name!r} is not full, length1, lengthN, middle, tail or a JSON file")
    cu = [0, *np.cumsum(lengths).tolist()]
    scalars = {"T": cu[-1]} if "T" in names else {}
    if "cu_seqlens" in names:
        if "chunk_indices" not in names:
            raise BadInput(f"{kernel.where}: takes cu_seqlens but no chunk_indices; give the inputs as a JSON file instead of {name!r}")
        return Input(name, {"cu_seqlens": cu, "chunk_indices": [sequence, chunk]}, scalars, (0, 3, 0))
    if "T" in names:
        # one sequence per launch: the chunk is program id 0
        scalars = {"T": lengths[sequence]}
    return Input(name, {}, scalars, (chunk, 3, 0))


def read_input(path: str | Path) -> Input:
    """Input from JSON: {"name": …, "buffers": {argument: [integers]}, "scalars": {argument: integer}, "workgroup": [x, y, z]}."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not a JSON input: {error}") from None
    if not isinstance(data, dict) or set(data) - {"name", "buffers", "scalars", "workgroup"}:
        raise BadInput(f"{path}: expected an object with the keys name, buffers, scalars, workgroup")
    workgroup = data.get("workgroup", [0, 0, 0])
    if not isinstance(workgroup, list) or len(workgroup) != 3 or not all(type(x) is int for x in workgroup):
        raise BadInput(f"{path}: workgroup is {reprlib.repr(workgroup)}, expected three integers")
    buffers, scalars = data.get("buffers", {}), data.get("scalars", {})
    if not isinstance(buffers, dict) or not all(isinstance(v, list) and all(type(x) is int for x in v) for v in buffers.values()):
        raise BadInput(f"{path}: buffers is {reprlib.repr(buffers)}, expected argument name to list of integers")
    if not isinstance(scalars, dict) or not all(type(x) is int for x in scalars.values()):
        raise BadInput(f"{path}: scalars is {reprlib.repr(scalars)}, expected argument name to integer")
    return Input(str(data.get("name", Path(path).stem)), buffers, scalars, tuple(workgroup))


# ---------------------------------------------------------------- how tiles reach LDS


COPY_PATHS = {
    "global_load_lds": "LDS-DMA by global_load_lds (no pointer_range): masked lanes are skipped and their LDS bytes keep what was there",
    "buffer_load_lds": "LDS-DMA by buffer_load ... lds (pointer_range): masked lanes go out of bounds",
    "registers": "through registers and ds_write: no asynchronous copy",
    "none": "no tile goes through LDS",
}


def is_dma(ins: Instruction) -> bool:
    """True for a copy from memory into LDS."""
    return ins.op.startswith("global_load_lds") or (ins.op.startswith("buffer_load") and "lds" in ins.mods)


def copy_path(program: Program) -> str:
    """Which of COPY_PATHS brings the kernel's tiles into LDS; the first named wins where there are several."""
    copies = [i.op for i in program.instructions if is_dma(i)]
    if copies:
        return "global_load_lds" if any(op.startswith("global") for op in copies) else "buffer_load_lds"
    return "registers" if any(i.op.startswith("ds_write") for i in program.instructions) else "none"


def ttgir_copies(ttgir: str) -> list[tuple[str, int]]:
    """(source "file:line", bytes) of every asynchronous copy into LDS in the TTGIR."""
    locations = dict(re.findall(r"^(#loc\w*) = loc\((.*)\)$", ttgir, re.M))

    def resolve(reference: str) -> str:
        text = locations.get(reference, "")
        if m := re.search(r'"([^"]+)":(\d+)', text):
            return f"{m[1].rsplit('/', 1)[-1]}:{m[2]}"
        inner = re.findall(r"#loc\w*", text)  # callsite(helper at caller): the caller's line, as in the assembly
        return resolve(inner[-1]) if inner else "?"

    out = []
    for line in ttgir.split("\n"):
        if not re.search(r"ttg\.async_copy_global_to_local|buffer_load_to_local", line):
            continue
        shape = re.findall(r"->\s*(?:!ttg\.memdesc)?<([\dx]+)x([a-z]+)(\d+)", line)
        where = re.search(r"loc\((#loc\w*)\)\s*$", line)
        if shape:
            dims, _, bits = shape[-1]
            out.append((resolve(where[1]) if where else "?", int(np.prod([int(d) for d in dims.split("x")])) * int(bits) // 8))
    return out
