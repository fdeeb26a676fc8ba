"""The state of the waves of one workgroup while a kernel is executed: registers, exec mask, known memory, the trace.

Integers are kept per lane as arrays [waves, 64]; loaded data and floats are opaque and only remember the arguments they
came from. What must be known and is not raises Unsupported.

Source: LLVM AMDGPU usage guide (kernel descriptor, initial registers).
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from k3lab.errors import Unsupported
from k3lab.races.alu import M32, M64, U
from k3lab.races.asm import EXEC, NAMED, Instruction, Program

LANES = 64
LANE_ID = np.arange(LANES, dtype=U)[None, :]
KERNARG = 1 << 32
ARG_SHIFT = 40  # argument k of the kernel lives at address (k + 1) << 40, so an address tells its argument


@dataclass(frozen=True, eq=False)
class Access:
    """One LDS access of one wave: first byte of each active lane's piece(s), `width` bytes each."""

    wave: int
    instruction: Instruction
    kind: str  # "dma" (memory to LDS), "write" or "read"
    starts: np.ndarray
    width: int
    lanes: int
    tile: str
    zero_filled: int = 0
    data: np.ndarray | None = None  # what a write stores, [words, active lanes]; None where it is opaque


@dataclass
class Trace:
    """What each wave did: steps[w] = (instruction, Access or None) for memory, waits and barriers; path[w] = every index."""

    program: Program
    steps: list = field(default_factory=list)
    path: list = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Value:
    """Bits [waves or 1, lanes or 1] as uint64, None if wholly opaque; `opaque` marks the opaque places, None if there are none."""

    bits: np.ndarray | None
    opaque: np.ndarray | None = None
    tiles: frozenset = frozenset()

    @property
    def known(self) -> bool:
        return self.bits is not None and (self.opaque is None or not self.opaque.any())


NOTHING = Value(None)


def constant(x: int, width: int = 1) -> Value:
    return Value(np.full((1, 1), x & (0xFFFFFFFF if width == 1 else 0xFFFFFFFFFFFFFFFF), U))


def any_opaque(values: Iterable[Value]) -> np.ndarray | None:
    marks = [v.opaque for v in values if v.opaque is not None]
    out = marks[0] if marks else None
    for m in marks[1:]:
        out = out | m
    return out


def tiles_of(values: Iterable[Value]) -> frozenset:
    out: frozenset = frozenset()
    for v in values:
        if v.tiles:
            out = out | v.tiles
    return out


def _not_known(what: str, value: Value) -> Unsupported:
    names = ", ".join(sorted(value.tiles - {"?"}))
    came = f" (it comes from {names}; an input file can give it if it is an integer)" if names else ""
    return Unsupported(f"{what} depends on data that is not known here{came}")


@dataclass(frozen=True)
class Memory:
    """The kernel's arguments: names in order, contents of integer buffers (bytes), scalar values."""

    names: tuple
    buffers: dict
    scalars: dict

    def name(self, address: int) -> str:
        k = (address >> ARG_SHIFT) - 1
        return self.names[k] if 0 <= k < len(self.names) else "?"

    def dword(self, address: np.ndarray) -> Value:
        """The 32-bit words at `address`; opaque where the buffer's contents are not given."""
        out, opaque = np.zeros(address.shape, U), np.ones(address.shape, bool)
        owner = address >> U(ARG_SHIFT)
        for k in np.unique(owner):
            data = self.buffers.get(self.names[int(k) - 1]) if 1 <= k <= len(self.names) else None
            if data is None:
                continue
            offset = address & U((1 << ARG_SHIFT) - 1)
            inside = (owner == k) & (offset + U(4) <= U(data.size * data.itemsize)) & (offset % U(4) == 0)
            words = data.view(np.uint32).astype(U)
            out[inside] = words[(offset[inside] // U(4)).astype(int)]
            opaque &= ~inside
        return NOTHING if opaque.all() else Value(out, opaque if opaque.any() else None)


class Waves:
    """Some waves of the workgroup, in lockstep until a branch parts them."""

    def __init__(self, program: Program, memory: Memory, ids: np.ndarray, workgroup: tuple, lds_bytes: int):
        self.program, self.memory, self.ids, self.lds_bytes = program, memory, ids, lds_bytes
        self.v, self.a, self.s = [NOTHING] * 512, [NOTHING] * 512, [NOTHING] * 130
        self.scratch: dict = {}
        self.scc = NOTHING
        self.pc, self.steps, self.path = 0, [], []
        self.v[0] = Value(LANE_ID + U(LANES) * ids[:, None].astype(U))
        self._set_exec(np.full((1, 1), M64))
        self._launch(workgroup)

    def _launch(self, workgroup: tuple) -> None:
        """Kernel descriptor to starting SGPRs, in the order that the hardware fills them."""
        d, i = self.program.descriptor, 0
        order = (
            ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2), ("dispatch_id", 2),
            ("flat_scratch_init", 2), ("private_segment_size", 1),
        )  # fmt: skip
        for name, count in order:
            if d.get("user_sgpr_" + name):
                if name == "kernarg_segment_ptr":
                    self.s[i], self.s[i + 1] = constant(KERNARG), constant(KERNARG >> 32)
                i += count
        preload, skip = d.get("user_sgpr_kernarg_preload_length", 0), d.get("user_sgpr_kernarg_preload_offset", 0)
        for j in range(preload):
            self.s[i + j] = self.kernarg(np.full((1, 1), 4 * (skip + j), U))
        i = d.get("user_sgpr_count", i + preload)
        for axis in range(3):
            if d.get("system_sgpr_workgroup_id_" + "xyz"[axis]):
                self.s[i] = constant(workgroup[axis])
                i += 1

    def kernarg(self, offset: np.ndarray) -> Value:
        at = int(offset.flat[0])
        for k, (start, size, kind) in enumerate(self.program.args):
            if start <= at < start + size:
                name = self.memory.names[k]
                if kind == "global_buffer":
                    return constant(((k + 1) << ARG_SHIFT) >> (8 * (at - start)))
                if name in self.memory.scalars:
                    return constant(self.memory.scalars[name] >> (8 * (at - start)))
                return Value(None, tiles=frozenset([name]))
        return NOTHING

    def read(self, operand: tuple, width: int = 1) -> Value:
        kind, i, _ = operand
        if kind == "i":
            return constant(i, width)
        if kind == "x":
            raise Unsupported(f"operand {i}")
        bank = self.v if kind == "v" else self.a if kind == "a" else self.s
        if width == 1:
            return bank[i]
        lo, hi = bank[i], bank[i + 1]
        if lo.bits is None or hi.bits is None:
            return Value(None, tiles=tiles_of((lo, hi)))
        return Value(lo.bits | (hi.bits << U(32)), any_opaque((lo, hi)), lo.tiles | hi.tiles)

    def write(self, operand: tuple, value: Value, width: int = 1) -> None:
        kind, i, _ = operand
        for j in range(width):
            if value.bits is None:
                part = value
            else:
                bits = value.bits if j == 0 else value.bits >> U(32 * j)
                part = Value(bits & M32, value.opaque, value.tiles)
            if kind == "s":
                if i + j in (EXEC, EXEC + 1) and not part.known:
                    raise _not_known("exec", part)
                self.s[i + j] = part
            else:
                bank = self.v if kind == "v" else self.a
                bank[i + j] = part if self.all_lanes else self.mix(self.exec, part, bank[i + j])
        if kind == "s" and i <= EXEC + 1 and i + width > EXEC:
            self._set_exec(self.read(NAMED["exec"], 2).bits)

    @staticmethod
    def mix(pick: np.ndarray, yes: Value, no: Value) -> Value:
        """yes where pick is set, no elsewhere, place by place."""
        tiles = yes.tiles | no.tiles
        if yes.bits is None and no.bits is None:
            return Value(None, tiles=tiles)
        bits = np.where(pick, *(np.zeros((1, 1), U) if v.bits is None else v.bits for v in (yes, no)))
        marks = (np.full((1, 1), v.bits is None) if v.opaque is None else v.opaque for v in (yes, no))
        opaque = np.where(pick, *marks)
        return Value(bits, opaque if opaque.any() else None, tiles)

    def select(self, condition: Value, no: Value, yes: Value) -> Value:
        tiles = no.tiles | yes.tiles
        if not condition.known:
            return Value(None, tiles=tiles | condition.tiles)
        pick = condition.bits != 0
        return yes if pick.all() else self.mix(pick, yes, no) if pick.any() else no

    def lanes_of(self, mask: Value) -> Value:
        """A 64-bit mask per wave to one bit per lane."""
        if mask.bits is None:
            return mask
        return Value((mask.bits >> LANE_ID) & U(1), mask.opaque, mask.tiles)

    def _set_exec(self, mask: np.ndarray) -> None:
        self.s[EXEC], self.s[EXEC + 1] = Value(mask & M32), Value(mask >> U(32))
        self.exec = np.broadcast_to(((mask >> LANE_ID) & U(1)).astype(bool), (len(self.ids), LANES))
        self.all_lanes = bool(self.exec.all())

    def mask(self, lanes: np.ndarray, opaque: np.ndarray | None, tiles: frozenset) -> Value:
        """Per-lane booleans to a 64-bit mask per wave, inactive lanes 0; a wave with an opaque active lane is opaque."""
        lanes = np.broadcast_to(lanes, self.exec.shape) & self.exec
        bits = np.packbits(lanes, axis=1, bitorder="little").view(U)
        if opaque is None:
            return Value(bits, None, tiles)
        bad = (opaque & self.exec).any(axis=1, keepdims=True)
        return Value(bits, bad if bad.any() else None, tiles)

    def active(self, value: Value, what: str) -> np.ndarray:
        """The bits of a value whose active lanes must all be known."""
        if value.bits is None or (value.opaque is not None and (value.opaque & self.exec).any()):
            raise _not_known(what, value)
        return value.bits

    def known_here(self, value: Value) -> bool:
        return value.bits is not None and (value.opaque is None or not (value.opaque & self.exec).any())

    def uniform(self, value: Value, what: str) -> np.ndarray:
        if not value.known:
            raise _not_known(what, value)
        return value.bits

    def part(self, keep: np.ndarray) -> "Waves":
        def cut(value: Value) -> Value:
            if value.bits is None:
                return value
            bits = value.bits if value.bits.shape[0] == 1 else value.bits[keep]
            opaque = value.opaque if value.opaque is None or value.opaque.shape[0] == 1 else value.opaque[keep]
            return Value(bits, opaque, value.tiles)

        part = copy.copy(self)
        part.ids = self.ids[keep]
        part.v, part.a, part.s = ([cut(x) for x in bank] for bank in (self.v, self.a, self.s))
        part.scratch = {k: cut(x) for k, x in self.scratch.items()}
        part.scc = cut(self.scc)
        part.steps, part.path = list(self.steps), list(self.path)
        part._set_exec(part.read(NAMED["exec"], 2).bits)
        return part

    def record(self, ins: Instruction, accesses: dict | None = None) -> None:
        self.steps.append((ins, accesses))
