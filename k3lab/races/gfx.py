"""Concrete execution of one workgroup of an AMDGCN kernel (gfx9, wave64), as far as its LDS accesses need it.

Integers are computed per lane; loaded data and floats are opaque and only remember the arguments they came from. An
opaque value that reaches an LDS address, exec, m0 or a branch is an error that names the instruction: nothing is guessed.
Waves run in lockstep as arrays [waves, 64] and part where a branch divides them. Nothing that a wave computes may depend
on LDS contents, so neither waits nor barriers change the trace: lds.py decides order afterwards.

Source: AMD Instinct MI300 and CDNA4 instruction set architecture manuals; LLVM AMDGPU usage guide (kernel descriptor).
"""

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from k3lab.errors import Unsupported
from k3lab.races.alu import COMPARE, LOW5, LOW6, M32, M64, OPAQUE, SALU, VALU, VALU_CARRY, VALU_MAD64, U, signed
from k3lab.races.asm import EXEC, M0, NAMED, Instruction, Program

LANES = 64
LANE_ID = np.arange(LANES, dtype=U)[None, :]
KERNARG = 1 << 32
ARG_SHIFT = 40  # argument k of the kernel lives at address (k + 1) << 40, so an address tells its argument
MAX_STEPS = 400_000


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


def _constant(x: int, width: int = 1) -> Value:
    return Value(np.full((1, 1), x & (0xFFFFFFFF if width == 1 else 0xFFFFFFFFFFFFFFFF), U))


def _any(values: Iterable[Value]) -> np.ndarray | None:
    marks = [v.opaque for v in values if v.opaque is not None]
    out = marks[0] if marks else None
    for m in marks[1:]:
        out = out | m
    return out


def _tiles(values: Iterable[Value]) -> frozenset:
    out: frozenset = frozenset()
    for v in values:
        if v.tiles:
            out = out | v.tiles
    return out


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
                    self.s[i], self.s[i + 1] = _constant(KERNARG), _constant(KERNARG >> 32)
                i += count
        preload, skip = d.get("user_sgpr_kernarg_preload_length", 0), d.get("user_sgpr_kernarg_preload_offset", 0)
        for j in range(preload):
            self.s[i + j] = self._kernarg(np.full((1, 1), 4 * (skip + j), U))
        i = d.get("user_sgpr_count", i + preload)
        for axis in range(3):
            if d.get("system_sgpr_workgroup_id_" + "xyz"[axis]):
                self.s[i] = _constant(workgroup[axis])
                i += 1

    def _kernarg(self, offset: np.ndarray) -> Value:
        at = int(offset.flat[0])
        for k, (start, size, kind) in enumerate(self.program.args):
            if start <= at < start + size:
                name = self.memory.names[k]
                if kind == "global_buffer":
                    return _constant(((k + 1) << ARG_SHIFT) >> (8 * (at - start)))
                if name in self.memory.scalars:
                    return _constant(self.memory.scalars[name] >> (8 * (at - start)))
                return Value(None, tiles=frozenset([name]))
        return NOTHING

    # ------------------------------------------------ registers

    def read(self, operand: tuple, width: int = 1) -> Value:
        kind, i, _ = operand
        if kind == "i":
            return _constant(i, width)
        if kind == "x":
            raise Unsupported(f"operand {i}")
        bank = self.v if kind == "v" else self.a if kind == "a" else self.s
        if width == 1:
            return bank[i]
        lo, hi = bank[i], bank[i + 1]
        if lo.bits is None or hi.bits is None:
            return Value(None, tiles=_tiles((lo, hi)))
        return Value(lo.bits | (hi.bits << U(32)), _any((lo, hi)), lo.tiles | hi.tiles)

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
                    raise Unsupported("exec depends on data that is not known here")
                self.s[i + j] = part
            else:
                bank = self.v if kind == "v" else self.a
                bank[i + j] = part if self.all_lanes else self._mix(self.exec, part, bank[i + j])
        if kind == "s" and i <= EXEC + 1 and i + width > EXEC:
            self._set_exec(self.read(NAMED["exec"], 2).bits)

    @staticmethod
    def _mix(pick: np.ndarray, yes: Value, no: Value) -> Value:
        """yes where pick is set, no elsewhere, place by place."""
        tiles = yes.tiles | no.tiles
        if yes.bits is None and no.bits is None:
            return Value(None, tiles=tiles)
        bits = np.where(pick, *(np.zeros((1, 1), U) if v.bits is None else v.bits for v in (yes, no)))
        marks = (np.full((1, 1), v.bits is None) if v.opaque is None else v.opaque for v in (yes, no))
        opaque = np.where(pick, *marks)
        return Value(bits, opaque if opaque.any() else None, tiles)

    def _set_exec(self, mask: np.ndarray) -> None:
        self.s[EXEC], self.s[EXEC + 1] = Value(mask & M32), Value(mask >> U(32))
        self.exec = np.broadcast_to(((mask >> LANE_ID) & U(1)).astype(bool), (len(self.ids), LANES))
        self.all_lanes = bool(self.exec.all())

    def _mask(self, lanes: np.ndarray, opaque: np.ndarray | None, tiles: frozenset) -> Value:
        """Per-lane booleans to a 64-bit mask per wave, inactive lanes 0; a wave with an opaque active lane is opaque."""
        lanes = np.broadcast_to(lanes, self.exec.shape) & self.exec
        bits = np.packbits(lanes, axis=1, bitorder="little").view(U)
        if opaque is None:
            return Value(bits, None, tiles)
        bad = (opaque & self.exec).any(axis=1, keepdims=True)
        return Value(bits, bad if bad.any() else None, tiles)

    def _active(self, value: Value, what: str) -> np.ndarray:
        """The bits of a value whose active lanes must all be known."""
        if value.bits is None or (value.opaque is not None and (value.opaque & self.exec).any()):
            came = f" (it comes from {', '.join(sorted(value.tiles))})" if value.tiles else ""
            raise Unsupported(f"{what} depends on data that is not known here{came}")
        return value.bits

    def _uniform(self, value: Value, what: str) -> np.ndarray:
        if not value.known:
            came = f" (it comes from {', '.join(sorted(value.tiles))})" if value.tiles else ""
            raise Unsupported(f"{what} depends on data that is not known here{came}")
        return value.bits

    # ------------------------------------------------ running

    def run(self) -> list["Waves"]:
        """Run to the end, or to a branch that divides the waves: then the two parts are returned."""
        instructions = self.program.instructions
        while True:
            if self.pc >= len(instructions):
                raise Unsupported("the program runs past its last instruction")
            ins = instructions[self.pc]
            self.path.append(self.pc)
            if len(self.path) > MAX_STEPS:
                raise Unsupported(f"{ins}: more than {MAX_STEPS} instructions executed; a loop that this input does not end?")
            if ins.op == "s_endpgm":
                return []
            self.pc += 1
            try:
                taken = self._step(ins)
            except Unsupported as error:
                raise Unsupported(f"{ins}: {error}") from None
            if taken is None or not taken.any():
                continue
            label = ins.operands[0][1]
            if label not in self.program.labels:
                raise Unsupported(f"{ins}: unknown label")
            if taken.all():
                self.pc = self.program.labels[label]
                continue
            parts = self._part(~taken), self._part(taken)
            parts[1].pc = self.program.labels[label]
            return list(parts)

    def _part(self, keep: np.ndarray) -> "Waves":
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

    def _record(self, ins: Instruction, accesses: dict | None = None) -> None:
        self.steps.append((ins, accesses))

    def _step(self, ins: Instruction) -> np.ndarray | None:
        op = ins.op
        if op[0] == "v":
            return self._vector(ins)
        if op in ("s_waitcnt", "s_barrier"):
            return self._record(ins)
        if op.startswith("ds_"):
            return self._ds(ins)
        if op.startswith(("buffer_", "global_", "scratch_")):
            return self._vmem(ins)
        if op.startswith("s_cbranch_") or op == "s_branch":
            return self._branch(op)
        if op in ("s_nop", "s_setprio", "s_sleep", "s_sched_barrier", "s_icache_inv", "s_dcache_wb", "s_setreg_imm32_b32", "s_round_mode"):
            return None
        if op.startswith("s_"):
            return self._scalar(ins)
        raise Unsupported("instruction not known to the analysis")

    def _branch(self, op: str) -> np.ndarray:
        everyone = np.ones(len(self.ids), bool)
        if op == "s_branch":
            return everyone
        what, want = re.fullmatch(r"s_cbranch_(exec|vcc|scc)(z|nz|0|1)", op).groups()
        if what == "exec":
            zero = ~self.exec.any(axis=1)
        else:
            value = self.scc if what == "scc" else self.read(NAMED["vcc"], 2)
            zero = (self._uniform(value, "the branch") == 0)[:, 0]
        return everyone & (zero if want in ("z", "0") else ~zero)

    # ------------------------------------------------ scalar

    def _scalar(self, ins: Instruction) -> None:
        op, o = ins.op, ins.operands
        if m := re.fullmatch(r"s_(buffer_)?load_dword(?:x(\d+))?", op):
            return self._smem(ins, bool(m[1]), int(m[2] or 1))
        if m := re.fullmatch(r"s_cmpk?_(\w+)_([iu])(32|64)", op):
            n = int(m[3]) // 32
            x, y = self.read(o[0], n), self.read(o[1], n)
            return self._set_scc(m[1], x, y, m[2] == "i", int(m[3]))
        if m := re.fullmatch(r"s_bitcmp([01])_b(32|64)", op):
            n = int(m[2]) // 32
            x, y = self.read(o[0], n), self.read(o[1])
            if x.bits is None or y.bits is None:
                self.scc = Value(None, tiles=x.tiles | y.tiles)
            else:
                self.scc = Value(((x.bits >> (y.bits & (LOW5 if n == 1 else LOW6))) & U(1) == U(int(m[1]))).astype(U), _any((x, y)))
            return None
        if m := re.fullmatch(r"s_cselect_b(32|64)", op):
            n = int(m[1]) // 32
            x, y = self.read(o[1], n), self.read(o[2], n)
            return self.write(o[0], self._select(self.scc, y, x), n)
        if m := re.fullmatch(r"s_(and|or|andn2|orn2|xor)_saveexec_b64", op):
            old, x = self.read(NAMED["exec"], 2), self.read(o[1], 2)
            new = self._logic(SALU[f"s_{m[1]}_b64"][2], x, old, m[1])
            self.write(o[0], old, 2)
            self.write(NAMED["exec"], new, 2)
            self.scc = Value((new.bits != 0).astype(U))
            return None
        if op not in SALU:
            raise Unsupported("instruction not known to the analysis")
        widths, n, f, scc = SALU[op]
        sources = [o[0], o[1]] if op in ("s_addk_i32", "s_mulk_i32") else list(o[1:])
        values = [self.read(q, int(w)) for q, w in zip(sources, widths, strict=False)]
        if "c" in widths:
            values.append(self.scc)
        name = op[2:].partition("_")[0]
        if len(values) == 2 and name in ("and", "andn2", "or"):
            result, own = self._logic(f, *values, name), None
        elif any(v.bits is None for v in values):
            result = own = Value(None, tiles=_tiles(values))
        else:
            out = f(*(v.bits for v in values))
            bits, flag = out if isinstance(out, tuple) else (out, None)
            mark, tiles = _any(values), _tiles(values)
            result, own = Value(bits & (M32 if n == 1 else M64), mark, tiles), None if flag is None else Value(flag.astype(U), mark, tiles)
        self.write(o[0], result, n)
        if scc == "own":
            self.scc = own
        elif scc == "nz":
            self.scc = result if result.bits is None else Value((result.bits != 0).astype(U), result.opaque, result.tiles)
        return None

    def _logic(self, f: Callable, x: Value, y: Value, name: str) -> Value:
        """A bitwise operation; `and` with a known 0 is 0 and `or` with all ones is all ones, whatever the other side holds."""
        if x.known and y.known:
            return Value(f(x.bits, y.bits), None, x.tiles | y.tiles)
        if name == "and" and any(v.known and not v.bits.any() for v in (x, y)):
            return _constant(0)
        if name == "andn2" and x.known and not x.bits.any():
            return _constant(0)
        return Value(None, tiles=x.tiles | y.tiles)

    def _select(self, condition: Value, no: Value, yes: Value) -> Value:
        tiles = no.tiles | yes.tiles
        if not condition.known:
            return Value(None, tiles=tiles | condition.tiles)
        pick = condition.bits != 0
        return yes if pick.all() else self._mix(pick, yes, no) if pick.any() else no

    def _set_scc(self, compare: str, x: Value, y: Value, is_signed: bool, bits: int) -> None:
        if x.bits is None or y.bits is None:
            self.scc = Value(None, tiles=x.tiles | y.tiles)
            return
        a, b = (signed(x.bits, bits), signed(y.bits, bits)) if is_signed else (x.bits, y.bits)
        self.scc = Value(COMPARE[compare](a, b).astype(U), _any((x, y)), x.tiles | y.tiles)

    def _smem(self, ins: Instruction, buffer: bool, count: int) -> None:
        o = ins.operands
        base = self._uniform(self.read(o[1], 2), "the scalar load's address")
        if buffer:
            base = base & U(0xFFFFFFFFFFFF)
        address = base + self._uniform(self.read(o[2]), "the scalar load's offset") + U(int(ins.mods.get("offset", 0)))
        for j in range(count):
            at = address + U(4 * j)
            if (at >> U(ARG_SHIFT)).any():
                word = self.memory.dword(at)
                word = Value(word.bits, word.opaque, frozenset([self.memory.name(int(at.flat[0]))]))
            else:
                word = self._kernarg(at - U(KERNARG))
            self.write(("s", o[0][1] + j, 1), word)
        self._record(ins)

    # ------------------------------------------------ vector ALU

    def _vector(self, ins: Instruction) -> None:
        op, o = ins.op, ins.operands
        if op in VALU:
            widths, n, f = VALU[op]
            values = [self.read(q, int(w)) for q, w in zip(o[1:], widths, strict=True)]
            return self.write(o[0], self._apply(f, values), n)
        if OPAQUE.match(op):
            tiles = _tiles(self.read((q[0], q[1] + j, 1)) for q in o[1:] if q[0] in "vas" for j in range(q[2]))
            if op.startswith(("v_permlane16_swap", "v_permlane32_swap")):
                self.write(o[1], Value(None, tiles=tiles))
            if op.startswith("v_div_scale"):
                self.write(o[1], Value(None, tiles=tiles), 2)
            return self.write(o[0], Value(None, tiles=tiles), o[0][2])
        if op in VALU_CARRY:
            values = [self.read(o[2]), self.read(o[3])]
            if len(o) == 5:
                values.append(self._lanes(self.read(o[4], 2)))
            if any(v.bits is None for v in values):
                self.write(o[0], Value(None, tiles=_tiles(values)))
                return self.write(o[1], Value(None, tiles=_tiles(values)), 2)
            bits, carry = VALU_CARRY[op](*(v.bits for v in values))
            mark, tiles = _any(values), _tiles(values)
            self.write(o[0], Value(bits, mark, tiles))
            return self.write(o[1], self._mask(carry != 0, mark, tiles), 2)
        if op in VALU_MAD64:
            values = [self.read(q, w) for q, w in zip(o[2:], (1, 1, 2), strict=True)]
            self.write(o[0], self._apply(VALU_MAD64[op], values), 2)
            return self.write(o[1], NOTHING, 2)
        if op == "v_bitop3_b32":
            return self._bitop3(ins)
        if m := re.fullmatch(r"v_cmp(x?)_(\w+?)_([iufb])(16|32|64)", op):
            return self._compare(ins, *m.groups())
        if op == "v_cmp_class_f32":
            return self.write(o[0], NOTHING, 2)
        if op == "v_cndmask_b32":
            mask = self._lanes(self.read(o[3], 2))
            return self.write(o[0], self._select(mask, self.read(o[1]), self.read(o[2])))
        if op in ("v_readfirstlane_b32", "v_readlane_b32"):
            return self._readlane(ins)
        if op == "v_writelane_b32":
            lane = self._uniform(self.read(o[2]), "the lane number") & LOW6
            self.v[o[0][1]] = self._mix(lane == LANE_ID, self.read(o[1]), self.v[o[0][1]])
            return None
        if op == "v_swap_b32":
            x, y = self.read(o[0]), self.read(o[1])
            self.write(o[0], y)
            return self.write(o[1], x)
        if op == "v_nop":
            return None
        raise Unsupported("instruction not known to the analysis")

    def _apply(self, f: Callable, values: list[Value]) -> Value:
        tiles = _tiles(values)
        if any(v.bits is None for v in values):
            return Value(None, tiles=tiles)
        return Value(f(*(v.bits for v in values)), _any(values), tiles)

    def _lanes(self, mask: Value) -> Value:
        """A 64-bit mask per wave to one bit per lane."""
        if mask.bits is None:
            return mask
        return Value((mask.bits >> LANE_ID) & U(1), mask.opaque, mask.tiles)

    def _bitop3(self, ins: Instruction) -> None:
        values = [self.read(q) for q in ins.operands[1:4]]
        table = int(ins.mods.get("bitop3", 0))

        def f(*x: np.ndarray) -> np.ndarray:
            out = np.zeros((1, 1), U)
            for k in range(8):
                if table >> k & 1:
                    out = out | ((x[0] if k & 4 else ~x[0]) & (x[1] if k & 2 else ~x[1]) & (x[2] if k & 1 else ~x[2]))
            return out

        self.write(ins.operands[0], self._apply(f, values))

    def _compare(self, ins: Instruction, sets_exec: str, name: str, kind: str, size: str) -> None:
        o, n = ins.operands, max(1, int(size) // 32)
        x, y = (self.read(q, n) for q in o[1:3])
        if kind == "f" or size == "16" or name not in COMPARE or x.bits is None or y.bits is None:
            result = Value(None, tiles=x.tiles | y.tiles)
        else:
            a, b = (signed(x.bits, 32 * n), signed(y.bits, 32 * n)) if kind == "i" else (x.bits, y.bits)
            result = self._mask(COMPARE[name](a, b), _any((x, y)), x.tiles | y.tiles)
        self.write(o[0], result, 2)
        if sets_exec:
            self.write(NAMED["exec"], result, 2)

    def _readlane(self, ins: Instruction) -> None:
        o, value = ins.operands, self.read(ins.operands[1])
        if value.bits is None:
            return self.write(o[0], value)
        if ins.op == "v_readlane_b32":
            lane = np.broadcast_to(self._uniform(self.read(o[2]), "the lane number") & LOW6, (len(self.ids), 1)).astype(int)
        else:
            lane = self.exec.argmax(axis=1)[:, None]  # hardware takes lane 0 when exec is 0, and so does argmax

        def pick(x: np.ndarray) -> np.ndarray:
            return np.take_along_axis(np.broadcast_to(x, self.exec.shape), lane, axis=1)

        opaque = None if value.opaque is None else pick(value.opaque)
        return self.write(o[0], Value(pick(value.bits), opaque, value.tiles))

    # ------------------------------------------------ LDS and memory

    def _access(self, ins: Instruction, kind: str, starts: list[np.ndarray], width: int, tile: str, zeroed: np.ndarray | None) -> dict:
        out, shape = {}, self.exec.shape
        starts = [np.broadcast_to(s, shape) for s in starts]
        for w, wave in enumerate(self.ids):
            lanes = self.exec[w]
            at = np.concatenate([s[w][lanes] for s in starts]).astype(np.int64)
            if at.size and int(at.max()) + width > self.lds_bytes:
                raise Unsupported(f"LDS byte {int(at.max()) + width - 1} is outside the {self.lds_bytes} bytes of LDS of this launch")
            filled = 0 if zeroed is None else int((zeroed[w] & lanes).sum())
            out[int(wave)] = Access(int(wave), ins, kind, at, width, int(lanes.sum()), tile, filled)
        return out

    def _ds(self, ins: Instruction) -> None:
        op, o = ins.op, ins.operands
        if op == "ds_bpermute_b32":
            self._record(ins)
            return self._bpermute(ins)
        if op in ("ds_permute_b32", "ds_swizzle_b32"):
            self._record(ins)
            return self.write(o[0], Value(None, tiles=self.read(o[1]).tiles))
        m = re.fullmatch(r"ds_(read|write)(2?)(st64)?_(?:b|u|i)(\d+)(?:_tr_b\d+|_d16|_d16_hi)?", op)
        if not m:
            raise Unsupported("instruction not known to the analysis")
        width, reads = int(m[4]) // 8, m[1] == "read"
        address = self._active(self.read(o[1] if reads else o[0]), "the LDS address")
        if m[2]:
            unit = width * (64 if m[3] else 1)
            starts = [(address + U(int(ins.mods.get(k, 0)) * unit)) & M32 for k in ("offset0", "offset1")]
        else:
            starts = [(address + U(int(ins.mods.get("offset", 0)))) & M32]
        tiles = _tiles(self.read((q[0], q[1] + j, 1)) for q in o[1:] if q[0] in "va" for j in range(q[2])) if not reads else ()
        self._record(ins, self._access(ins, m[1], starts, width, ", ".join(sorted(tiles)), None))
        if reads:
            self.write(o[0], NOTHING, o[0][2])
        return None

    def _bpermute(self, ins: Instruction) -> None:
        o = ins.operands
        lane = np.broadcast_to((self._active(self.read(o[1]), "the lane number") >> U(2)) & LOW6, self.exec.shape).astype(int)
        data = self.read(o[2])
        if data.bits is None:
            return self.write(o[0], data)

        def pick(x: np.ndarray) -> np.ndarray:
            return np.take_along_axis(np.broadcast_to(x, self.exec.shape), lane, axis=1)

        active = pick(self.exec)  # an inactive source lane gives 0
        opaque = None if data.opaque is None else pick(data.opaque) & active
        return self.write(o[0], Value(np.where(active, pick(data.bits), U(0)), opaque, data.tiles))

    def _vmem(self, ins: Instruction) -> None:
        op, o = ins.op, ins.operands
        if op in ("buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol"):
            return None
        m = re.fullmatch(r"(buffer|global|scratch)_(load|store)_(lds_)?(dword(?:x(\d))?|[us]?(?:short|byte)(?:_d16)?(?:_hi)?)", op)
        if not m:
            raise Unsupported("instruction not known to the analysis")
        space, load, dma = m[1], m[2] == "load", bool(m[3]) or "lds" in ins.mods
        width = 4 * int(m[5] or 1) if m[4].startswith("dword") else 1 if "byte" in m[4] else 2
        if space == "scratch":
            return self._spill(ins, load, width // 4)
        if not load:
            return self._record(ins)
        address, outside = self._buffer_address(ins, dma, width) if space == "buffer" else (self._global_address(ins, dma), None)
        tile = "?" if address is None else self._argument(address)
        if dma:
            start = self._uniform(self.s[M0], "m0, the LDS address of the copy,") + U(int(ins.mods.get("offset", 0)))
            starts = [start + LANE_ID * U(width)]
            return self._record(ins, self._access(ins, "dma", starts, width, tile, outside))
        self._record(ins)
        for j in range(o[0][2]):
            word = NOTHING if address is None or width < 4 else self.memory.dword(np.broadcast_to(address + U(4 * j), self.exec.shape))
            if outside is not None:
                word = self._select(Value(outside.astype(U)), word, _constant(0))
            self.write((o[0][0], o[0][1] + j, 1), Value(word.bits, word.opaque, frozenset([tile])))
        return None

    def _argument(self, address: np.ndarray) -> str:
        """The argument that the first active lane's address lies in."""
        active = np.broadcast_to(address, self.exec.shape)[self.exec]
        return self.memory.name(int(active[0])) if active.size else "?"

    def _global_address(self, ins: Instruction, dma: bool) -> np.ndarray | None:
        """Address per lane of global_load (vaddr, saddr or off), None where it is not known."""
        vaddr, saddr = ins.operands[0 if dma else 1], ins.operands[1 if dma else 2]
        offset = U(int(ins.mods.get("offset", 0)) & 0xFFFFFFFFFFFFFFFF)
        if saddr[0] == "x":
            value = self.read(vaddr, 2)
            return value.bits + offset if value.known or self._known_here(value) else None
        base, lane = self.read(saddr, 2), self.read(vaddr)
        return base.bits + lane.bits + offset if base.known and self._known_here(lane) else None

    def _known_here(self, value: Value) -> bool:
        return value.bits is not None and (value.opaque is None or not (value.opaque & self.exec).any())

    def _buffer_address(self, ins: Instruction, dma: bool, width: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Address per lane of buffer_load and which lanes lie outside num_records (raw buffer: stride 0)."""
        vaddr, rsrc, soff = ins.operands[0 if dma else 1 :][:3]
        if "idxen" in ins.mods:
            raise Unsupported("buffer access by index (idxen)")
        lane = self.read(vaddr) if "offen" in ins.mods else _constant(0)
        base, records, soffset = self.read(("s", rsrc[1], 2), 2), self.read(("s", rsrc[1] + 2, 1)), self.read(soff)
        imm = U(int(ins.mods.get("offset", 0)))
        if not (base.known and soffset.known and records.known and self._known_here(lane)):
            return None, None
        outside = lane.bits + imm + soffset.bits + U(width) > records.bits
        address = (base.bits & U(0xFFFFFFFFFFFF)) + lane.bits + imm + soffset.bits
        return address, np.broadcast_to(outside, self.exec.shape)

    def _spill(self, ins: Instruction, load: bool, words: int) -> None:
        """Register spills: `scratch_store off, v, off offset:n` and back; any other scratch address is refused."""
        o = ins.operands
        data, slot = (o[0], o[1:]) if load else (o[1], (o[0], *o[2:]))
        if any(q[0] != "x" for q in slot):
            raise Unsupported("scratch access by register")
        at = int(ins.mods.get("offset", 0))
        self._record(ins)
        for j in range(words):
            register = (data[0], data[1] + j, 1)
            if load:
                self.write(register, self.scratch.get(at + 4 * j, NOTHING))
            else:
                old = self.scratch.get(at + 4 * j, NOTHING)
                new = self.read(register)
                self.scratch[at + 4 * j] = new if self.all_lanes else self._mix(self.exec, new, old)


def execute(program: Program, memory: Memory, warps: int, workgroup: tuple = (0, 0, 0), lds_bytes: int = 160 * 1024) -> Trace:
    """Run one workgroup of `warps` waves; program ids are `workgroup`. Raises Unsupported naming the instruction it cannot follow."""
    trace = Trace(program, [[]] * warps, [[]] * warps)
    pending = [Waves(program, memory, np.arange(warps), workgroup, lds_bytes)]
    while pending:
        group = pending.pop()
        parts = group.run()
        pending.extend(parts)
        if not parts:
            for wave in group.ids.tolist():
                trace.steps[wave] = [(ins, None if a is None else a[wave]) for ins, a in group.steps]
                trace.path[wave] = group.path
    return trace
