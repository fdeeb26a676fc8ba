"""Concrete execution of one workgroup of an AMDGCN kernel (gfx9, wave64), as far as its LDS accesses need it.

Integers are computed, loaded data and floats are opaque. An opaque value that reaches an LDS address, exec, m0 or a branch
is an error that names the instruction: nothing is guessed. Nothing that a wave computes may depend on LDS contents, so
neither waits nor barriers change the trace: lds.py decides order afterwards.

Source: AMD Instinct MI300 and CDNA4 instruction set architecture manuals.
"""

import re
from collections.abc import Callable

import numpy as np

from k3lab.errors import Unsupported
from k3lab.races.alu import COMPARE, LOW5, LOW6, M32, M64, OPAQUE, READS_RESULT, SALU, VALU, VALU_CARRY, VALU_MAD64, U, signed
from k3lab.races.asm import NAMED, Instruction, Program
from k3lab.races.memory_ops import ds, smem, vmem
from k3lab.races.state import LANE_ID, NOTHING, Memory, Trace, Value, Waves, any_opaque, constant, tiles_of

MAX_STEPS = 400_000
NO_EFFECT = ("s_nop", "s_setprio", "s_sleep", "s_sched_barrier", "s_icache_inv", "s_dcache_wb", "s_setreg_imm32_b32", "s_round_mode")


def _run(waves: Waves) -> list[Waves]:
    """Run to the end, or to a branch that divides the waves: then the two parts are returned."""
    instructions = waves.program.instructions
    while True:
        if waves.pc >= len(instructions):
            raise Unsupported("the program runs past its last instruction")
        ins = instructions[waves.pc]
        waves.path.append(waves.pc)
        if len(waves.path) > MAX_STEPS:
            raise Unsupported(f"{ins}: more than {MAX_STEPS} instructions executed; a loop that this input does not end?")
        if ins.op == "s_endpgm":
            return []
        waves.pc += 1
        try:
            taken = _step(waves, ins)
        except Unsupported as error:
            raise Unsupported(f"{ins}: {error}") from None
        except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:  # operands as no compiler writes them
            raise Unsupported(f"{ins}: operands that this instruction does not have ({type(error).__name__}: {error})") from None
        if taken is None or not taken.any():
            continue
        label = ins.operands[0][1] if ins.operands else None
        if label not in waves.program.labels:
            raise Unsupported(f"{ins}: unknown label")
        if taken.all():
            waves.pc = waves.program.labels[label]
            continue
        parts = waves.part(~taken), waves.part(taken)
        parts[1].pc = waves.program.labels[label]
        return list(parts)


def _step(waves: Waves, ins: Instruction) -> np.ndarray | None:
    op = ins.op
    if op[0] == "v":
        return _vector(waves, ins)
    if op in ("s_waitcnt", "s_barrier"):
        return waves.record(ins)
    if op.startswith("ds_"):
        return ds(waves, ins)
    if op.startswith(("buffer_", "global_", "scratch_")):
        return vmem(waves, ins)
    if op.startswith("s_cbranch_") or op == "s_branch":
        return _branch(waves, op)
    if op in NO_EFFECT:
        return None
    if op.startswith("s_"):
        return _scalar(waves, ins)
    raise Unsupported("instruction not known to the analysis")


def _branch(waves: Waves, op: str) -> np.ndarray:
    everyone = np.ones(len(waves.ids), bool)
    if op == "s_branch":
        return everyone
    what, want = re.fullmatch(r"s_cbranch_(exec|vcc|scc)(z|nz|0|1)", op).groups()
    if what == "exec":
        zero = ~waves.exec.any(axis=1)
    else:
        value = waves.scc if what == "scc" else waves.read(NAMED["vcc"], 2)
        zero = (waves.uniform(value, "the branch") == 0)[:, 0]
    return everyone & (zero if want in ("z", "0") else ~zero)


def _scalar(waves: Waves, ins: Instruction) -> None:
    op, o = ins.op, ins.operands
    if m := re.fullmatch(r"s_(buffer_)?load_dword(?:x(\d+))?", op):
        return smem(waves, ins, bool(m[1]), int(m[2] or 1))
    if m := re.fullmatch(r"s_cmp(k?)_(\w+)_([iu])(32|64)", op):
        n, is_signed = int(m[4]) // 32, m[3] == "i"
        x, y = waves.read(o[0], n), waves.read(o[1], n)
        if m[1] and is_signed:
            y = Value(signed(y.bits, 16).view(U))
        return _set_scc(waves, m[2], x, y, is_signed, int(m[4]))
    if m := re.fullmatch(r"s_bitcmp([01])_b(32|64)", op):
        n = int(m[2]) // 32
        x, y = waves.read(o[0], n), waves.read(o[1])
        if x.bits is None or y.bits is None:
            waves.scc = Value(None, tiles=x.tiles | y.tiles)
        else:
            waves.scc = Value(((x.bits >> (y.bits & (LOW5 if n == 1 else LOW6))) & U(1) == U(int(m[1]))).astype(U), any_opaque((x, y)))
        return None
    if m := re.fullmatch(r"s_cselect_b(32|64)", op):
        n = int(m[1]) // 32
        x, y = waves.read(o[1], n), waves.read(o[2], n)
        return waves.write(o[0], waves.select(waves.scc, y, x), n)
    if m := re.fullmatch(r"s_(and|or|andn2|orn2|xor)_saveexec_b64", op):
        old, x = waves.read(NAMED["exec"], 2), waves.read(o[1], 2)
        new = _logic(waves, SALU[f"s_{m[1]}_b64"][2], x, old, m[1])
        waves.write(o[0], old, 2)
        waves.write(NAMED["exec"], new, 2)
        waves.scc = Value((new.bits != 0).astype(U))
        return None
    if op not in SALU:
        raise Unsupported("instruction not known to the analysis")
    widths, n, f, scc = SALU[op]
    sources = [o[0], o[1]] if op in READS_RESULT else list(o[1:])
    values = [waves.read(q, int(w)) for q, w in zip(sources, widths, strict=False)]
    if "c" in widths:
        values.append(waves.scc)
    name = op[2:].partition("_")[0]
    if len(values) == 2 and name in ("and", "andn2", "or"):
        result, own = _logic(waves, f, *values, name), None
    elif any(v.bits is None for v in values):
        result = own = Value(None, tiles=tiles_of(values))
    else:
        out = f(*(v.bits for v in values))
        bits, flag = out if isinstance(out, tuple) else (out, None)
        mark, tiles = any_opaque(values), tiles_of(values)
        result, own = Value(bits & (M32 if n == 1 else M64), mark, tiles), None if flag is None else Value(flag.astype(U), mark, tiles)
    waves.write(o[0], result, n)
    if scc == "own":
        waves.scc = own
    elif scc == "nz":
        waves.scc = result if result.bits is None else Value((result.bits != 0).astype(U), result.opaque, result.tiles)
    return None


def _logic(waves: Waves, f: Callable, x: Value, y: Value, name: str) -> Value:
    """A bitwise operation; `and` with a known 0 is 0 whatever the other side holds."""
    if x.known and y.known:
        return Value(f(x.bits, y.bits), None, x.tiles | y.tiles)
    if name == "and" and any(v.known and not v.bits.any() for v in (x, y)):
        return constant(0)
    if name == "andn2" and x.known and not x.bits.any():
        return constant(0)
    return Value(None, tiles=x.tiles | y.tiles)


def _set_scc(waves: Waves, compare: str, x: Value, y: Value, is_signed: bool, bits: int) -> None:
    if x.bits is None or y.bits is None:
        waves.scc = Value(None, tiles=x.tiles | y.tiles)
        return
    a, b = (signed(x.bits, bits), signed(y.bits, bits)) if is_signed else (x.bits, y.bits)
    waves.scc = Value(COMPARE[compare](a, b).astype(U), any_opaque((x, y)), x.tiles | y.tiles)


def _vector(waves: Waves, ins: Instruction) -> None:
    op, o = ins.op, ins.operands
    if "clamp" in ins.mods and not OPAQUE.match(op):
        raise Unsupported("integer result with clamp")
    if op in VALU:
        widths, n, f = VALU[op]
        values = [waves.read(q, int(w)) for q, w in zip(o[1:], widths, strict=True)]
        return waves.write(o[0], _apply(waves, f, values), n)
    if OPAQUE.match(op):
        tiles = tiles_of(waves.read((q[0], q[1] + j, 1)) for q in o[1:] if q[0] in "vas" for j in range(q[2]))
        if op.startswith(("v_permlane16_swap", "v_permlane32_swap")):
            waves.write(o[1], Value(None, tiles=tiles))
        if op.startswith("v_div_scale") or "_co_" in op:
            waves.write(o[1], Value(None, tiles=tiles), 2)
        if op.startswith("v_cmpx_"):
            waves.write(NAMED["exec"], Value(None, tiles=tiles), 2)
        return waves.write(o[0], Value(None, tiles=tiles), o[0][2])
    if op in VALU_CARRY:
        values = [waves.read(o[2]), waves.read(o[3])]
        if len(o) == 5:
            values.append(waves.lanes_of(waves.read(o[4], 2)))
        if any(v.bits is None for v in values):
            waves.write(o[0], Value(None, tiles=tiles_of(values)))
            return waves.write(o[1], Value(None, tiles=tiles_of(values)), 2)
        bits, carry = VALU_CARRY[op](*(v.bits for v in values))
        mark, tiles = any_opaque(values), tiles_of(values)
        waves.write(o[0], Value(bits, mark, tiles))
        return waves.write(o[1], waves.mask(carry != 0, mark, tiles), 2)
    if op in VALU_MAD64:
        values = [waves.read(q, w) for q, w in zip(o[2:], (1, 1, 2), strict=True)]
        waves.write(o[0], _apply(waves, VALU_MAD64[op], values), 2)
        return waves.write(o[1], NOTHING, 2)
    if op == "v_bitop3_b32":
        return _bitop3(waves, ins)
    if m := re.fullmatch(r"v_cmp(x?)_(\w+?)_([iufb])(16|32|64)", op):
        return _compare(waves, ins, *m.groups())
    if op == "v_cmp_class_f32":
        return waves.write(o[0], NOTHING, 2)
    if op == "v_cndmask_b32":
        mask = waves.lanes_of(waves.read(o[3], 2))
        return waves.write(o[0], waves.select(mask, waves.read(o[1]), waves.read(o[2])))
    if op in ("v_readfirstlane_b32", "v_readlane_b32"):
        return _readlane(waves, ins)
    if op == "v_writelane_b32":
        lane = waves.uniform(waves.read(o[2]), "the lane number") & LOW6
        waves.v[o[0][1]] = waves.mix(lane == LANE_ID, waves.read(o[1]), waves.v[o[0][1]])
        return None
    if op == "v_swap_b32":
        x, y = waves.read(o[0]), waves.read(o[1])
        waves.write(o[0], y)
        return waves.write(o[1], x)
    if op == "v_nop":
        return None
    raise Unsupported("instruction not known to the analysis")


def _apply(waves: Waves, f: Callable, values: list[Value]) -> Value:
    tiles = tiles_of(values)
    if any(v.bits is None for v in values):
        return Value(None, tiles=tiles)
    return Value(f(*(v.bits for v in values)), any_opaque(values), tiles)


def _bitop3(waves: Waves, ins: Instruction) -> None:
    values = [waves.read(q) for q in ins.operands[1:4]]
    table = int(ins.mods.get("bitop3", 0))

    def f(*x: np.ndarray) -> np.ndarray:
        out = np.zeros((1, 1), U)
        for k in range(8):
            if table >> k & 1:
                out = out | ((x[0] if k & 4 else ~x[0]) & (x[1] if k & 2 else ~x[1]) & (x[2] if k & 1 else ~x[2]))
        return out

    waves.write(ins.operands[0], _apply(waves, f, values))


def _compare(waves: Waves, ins: Instruction, sets_exec: str, name: str, kind: str, size: str) -> None:
    o, n = ins.operands, max(1, int(size) // 32)
    x, y = (waves.read(q, n) for q in o[1:3])
    if kind == "f" or size == "16" or name not in COMPARE or x.bits is None or y.bits is None:
        result = Value(None, tiles=x.tiles | y.tiles)
    else:
        a, b = (signed(x.bits, 32 * n), signed(y.bits, 32 * n)) if kind == "i" else (x.bits, y.bits)
        result = waves.mask(COMPARE[name](a, b), any_opaque((x, y)), x.tiles | y.tiles)
    waves.write(o[0], result, 2)
    if sets_exec:
        waves.write(NAMED["exec"], result, 2)


def _readlane(waves: Waves, ins: Instruction) -> None:
    o, value = ins.operands, waves.read(ins.operands[1])
    if value.bits is None:
        return waves.write(o[0], value)
    if ins.op == "v_readlane_b32":
        lane = np.broadcast_to(waves.uniform(waves.read(o[2]), "the lane number") & LOW6, (len(waves.ids), 1)).astype(int)
    else:
        lane = waves.exec.argmax(axis=1)[:, None]  # hardware takes lane 0 when exec is 0, and so does argmax

    def pick(x: np.ndarray) -> np.ndarray:
        return np.take_along_axis(np.broadcast_to(x, waves.exec.shape), lane, axis=1)

    opaque = None if value.opaque is None else pick(value.opaque)
    return waves.write(o[0], Value(pick(value.bits), opaque, value.tiles))


def execute(program: Program, memory: Memory, warps: int, workgroup: tuple = (0, 0, 0), lds_bytes: int = 160 * 1024) -> Trace:
    """Run one workgroup of `warps` waves; program ids are `workgroup`. Raises Unsupported naming the instruction it cannot follow."""
    trace = Trace(program, [[]] * warps, [[]] * warps)
    pending = [Waves(program, memory, np.arange(warps), workgroup, lds_bytes)]
    while pending:
        group = pending.pop()
        parts = _run(group)
        pending.extend(parts)
        if not parts:
            for wave in group.ids.tolist():
                trace.steps[wave] = [(ins, None if a is None else a[wave]) for ins, a in group.steps]
                trace.path[wave] = group.path
    return trace
