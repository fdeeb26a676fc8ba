"""LDS, global, buffer, scratch and scalar memory instructions: addresses concrete, data opaque unless an input gives it."""

import re

import numpy as np

from k3lab.errors import Unsupported
from k3lab.races.alu import LOW6, M32, U
from k3lab.races.asm import M0, Instruction
from k3lab.races.state import ARG_SHIFT, KERNARG, LANE_ID, NOTHING, Access, Value, Waves, constant, tiles_of


def smem(waves: Waves, ins: Instruction, buffer: bool, count: int) -> None:
    o = ins.operands
    base = waves.uniform(waves.read(o[1], 2), "the scalar load's address")
    if buffer:
        base = base & U(0xFFFFFFFFFFFF)
    address = base + waves.uniform(waves.read(o[2]), "the scalar load's offset") + U(int(ins.mods.get("offset", 0)))
    for j in range(count):
        at = address + U(4 * j)
        if (at >> U(ARG_SHIFT)).any():
            word = waves.memory.dword(at)
            word = Value(word.bits, word.opaque, frozenset([waves.memory.name(int(at.flat[0]))]))
        else:
            word = waves.kernarg(at - U(KERNARG))
        waves.write(("s", o[0][1] + j, 1), word)
    waves.record(ins)


def _access(
    waves: Waves,
    ins: Instruction,
    kind: str,
    starts: list[np.ndarray],
    width: int,
    tile: str,
    zeroed: np.ndarray | None = None,
    stored: list[Value] = (),
) -> dict:
    """One Access per wave; zeroed marks lanes of a copy that are out of bounds, stored is the data of a write."""
    out, shape = {}, waves.exec.shape
    known = bool(stored) and all(map(waves.known_here, stored))
    starts = [np.broadcast_to(s, shape) for s in starts]
    for w, wave in enumerate(waves.ids):
        lanes = waves.exec[w]
        at = np.concatenate([s[w][lanes] for s in starts]).astype(np.int64)
        if at.size and int(at.max()) + width > waves.lds_bytes:
            raise Unsupported(f"LDS byte {int(at.max()) + width - 1} is outside the {waves.lds_bytes} bytes of LDS of this launch")
        filled = 0 if zeroed is None else int((zeroed[w] & lanes).sum())
        data = np.stack([np.broadcast_to(v.bits, shape)[w][lanes] for v in stored]) if known else None
        out[int(wave)] = Access(int(wave), ins, kind, at, width, int(lanes.sum()), tile, filled, data)
    return out


def ds(waves: Waves, ins: Instruction) -> None:
    op, o = ins.op, ins.operands
    if op == "ds_bpermute_b32":
        waves.record(ins)
        return _bpermute(waves, ins)
    if op in ("ds_permute_b32", "ds_swizzle_b32"):
        waves.record(ins)
        return waves.write(o[0], Value(None, tiles=waves.read(o[1]).tiles))
    m = re.fullmatch(r"ds_(read|write)(2?)(st64)?_(?:b|u|i)(\d+)(?:_tr_b\d+|_d16|_d16_hi)?", op)
    if not m or "gds" in ins.mods:
        raise Unsupported("instruction not known to the analysis")
    width, reads = int(m[4]) // 8, m[1] == "read"
    address = waves.active(waves.read(o[1] if reads else o[0]), "the LDS address")
    if m[2]:
        unit = width * (64 if m[3] else 1)
        starts = [(address + U(int(ins.mods.get(k, 0)) * unit)) & M32 for k in ("offset0", "offset1")]
    else:
        starts = [(address + U(int(ins.mods.get("offset", 0)))) & M32]
    stored = [] if reads else [waves.read((q[0], q[1] + j, 1)) for q in o[1:] for j in range(q[2])]
    waves.record(ins, _access(waves, ins, m[1], starts, width, ", ".join(sorted(tiles_of(stored))), stored=stored))
    if reads:
        waves.write(o[0], NOTHING, o[0][2])
    return None


def _bpermute(waves: Waves, ins: Instruction) -> None:
    o = ins.operands
    lane = np.broadcast_to((waves.active(waves.read(o[1]), "the lane number") >> U(2)) & LOW6, waves.exec.shape).astype(int)
    data = waves.read(o[2])
    if data.bits is None:
        return waves.write(o[0], data)

    def pick(x: np.ndarray) -> np.ndarray:
        return np.take_along_axis(np.broadcast_to(x, waves.exec.shape), lane, axis=1)

    active = pick(waves.exec)  # an inactive source lane gives 0
    opaque = None if data.opaque is None else pick(data.opaque) & active
    return waves.write(o[0], Value(np.where(active, pick(data.bits), U(0)), opaque, data.tiles))


def vmem(waves: Waves, ins: Instruction) -> None:
    op, o = ins.op, ins.operands
    if op in ("buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol"):
        return None
    m = re.fullmatch(r"(buffer|global|scratch)_(load|store)_(lds_)?(dword(?:x(\d))?|[us]?(?:short|byte)(?:_d16)?(?:_hi)?)", op)
    if not m:
        raise Unsupported("instruction not known to the analysis")
    space, load, dma = m[1], m[2] == "load", bool(m[3]) or "lds" in ins.mods
    width = 4 * int(m[5] or 1) if m[4].startswith("dword") else 1 if "byte" in m[4] else 2
    if dma and (not load or width < 4):  # LDS to memory, and copies of less than a dword
        raise Unsupported("instruction not known to the analysis")
    if space == "scratch":
        return _spill(waves, ins, load, width // 4)
    if not load:
        return waves.record(ins)
    address, outside = _buffer_address(waves, ins, dma, width) if space == "buffer" else (_global_address(waves, ins, dma), None)
    tile = "?" if address is None else _argument(waves, address)
    if dma:
        start = waves.uniform(waves.s[M0], "m0, the LDS address of the copy,") + U(int(ins.mods.get("offset", 0)))
        starts = [start + LANE_ID * U(width)]
        return waves.record(ins, _access(waves, ins, "dma", starts, width, tile, outside))
    waves.record(ins)
    for j in range(o[0][2]):
        word = NOTHING if address is None or width < 4 else waves.memory.dword(np.broadcast_to(address + U(4 * j), waves.exec.shape))
        if outside is not None:
            word = waves.select(Value(outside.astype(U)), word, constant(0))
        waves.write((o[0][0], o[0][1] + j, 1), Value(word.bits, word.opaque, frozenset([tile])))
    return None


def _argument(waves: Waves, address: np.ndarray) -> str:
    """The argument that the first active lane's address lies in."""
    active = np.broadcast_to(address, waves.exec.shape)[waves.exec]
    return waves.memory.name(int(active[0])) if active.size else "?"


def _global_address(waves: Waves, ins: Instruction, dma: bool) -> np.ndarray | None:
    """Address per lane of global_load (vaddr, saddr or off), None where it is not known."""
    vaddr, saddr = ins.operands[0 if dma else 1], ins.operands[1 if dma else 2]
    offset = U(int(ins.mods.get("offset", 0)) & 0xFFFFFFFFFFFFFFFF)
    if saddr[0] == "x":
        value = waves.read(vaddr, 2)
        return value.bits + offset if value.known or waves.known_here(value) else None
    base, lane = waves.read(saddr, 2), waves.read(vaddr)
    return base.bits + lane.bits + offset if base.known and waves.known_here(lane) else None


def _buffer_address(waves: Waves, ins: Instruction, dma: bool, width: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Address per lane of buffer_load and which lanes lie outside num_records (raw buffer: stride 0)."""
    vaddr, rsrc, soff = ins.operands[0 if dma else 1 :][:3]
    if "idxen" in ins.mods:
        raise Unsupported("buffer access by index (idxen)")
    lane = waves.read(vaddr) if "offen" in ins.mods else constant(0)
    base, records, soffset = waves.read(("s", rsrc[1], 2), 2), waves.read(("s", rsrc[1] + 2, 1)), waves.read(soff)
    imm = U(int(ins.mods.get("offset", 0)))
    if not (base.known and soffset.known and records.known and waves.known_here(lane)):
        return None, None
    outside = lane.bits + imm + soffset.bits + U(width) > records.bits
    address = (base.bits & U(0xFFFFFFFFFFFF)) + lane.bits + imm + soffset.bits
    return address, np.broadcast_to(outside, waves.exec.shape)


def _spill(waves: Waves, ins: Instruction, load: bool, words: int) -> None:
    """Register spills: `scratch_store off, v, off offset:n` and back; any other scratch address is refused."""
    o = ins.operands
    data, slot = (o[0], o[1:]) if load else (o[1], (o[0], *o[2:]))
    if any(q[0] != "x" for q in slot):
        raise Unsupported("scratch access by register")
    at = int(ins.mods.get("offset", 0))
    waves.record(ins)
    for j in range(words):
        register = (data[0], data[1] + j, 1)
        if load:
            waves.write(register, waves.scratch.get(at + 4 * j, NOTHING))
        else:
            old = waves.scratch.get(at + 4 * j, NOTHING)
            new = waves.read(register)
            waves.scratch[at + 4 * j] = new if waves.all_lanes else waves.mix(waves.exec, new, old)
