"""Which LDS accesses of a trace happen before which, and what that leaves unordered, uninitialised or unread.

Every access has an issue epoch (barriers its wave had passed when it was issued) and a completion epoch (the epoch in
which an s_waitcnt of its wave retired it). Access X of one wave happens before Y of another iff

    completion(X) < issue(Y),

and X before Y of the same wave iff X was retired before Y was issued; DS accesses of one wave are in order by themselves.
Two accesses to a common byte, one of them a write, that are ordered neither way are a race.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from k3lab.races.asm import Instruction
from k3lab.races.state import Access, Trace

NEVER = 1 << 30


class Accesses:
    """The trace's LDS accesses as bit sets over units of `unit` bytes, and each wave's steps with the access number or -1."""

    def __init__(self, trace: Trace):
        self.trace, self.all, self.step = trace, [], []
        self.steps: list[list[tuple[str, Instruction, int]]] = []
        for steps in trace.steps:
            mine = []
            for n, (ins, access) in enumerate(steps):
                number = -1
                if access is not None:
                    number = len(self.all)
                    self.all.append(access)
                    self.step.append(n)
                mine.append((_queue(ins.op), ins, number))
            self.steps.append(mine)
        sizes = {a.width for a in self.all}
        starts = [np.gcd.reduce(a.starts) for a in self.all if a.starts.size]
        self.unit = int(np.gcd.reduce([*sizes, *starts])) if sizes else 1
        self.places = [self._places(a) for a in self.all]
        self.size = max((int(p[-1]) + 1 for p in self.places if p.size), default=1)
        self.bits = [self._bits(p) for p in self.places]

    def _places(self, a: Access) -> np.ndarray:
        return np.unique((a.starts[:, None] // self.unit + np.arange(a.width // self.unit)).ravel())

    def _bits(self, places: np.ndarray) -> int:
        flags = np.zeros(self.size, np.uint8)
        flags[places] = 1
        return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")

    def span(self, bits: int) -> tuple[int, int]:
        """First and last byte of a non-empty bit set."""
        return ((bits & -bits).bit_length() - 1) * self.unit, bits.bit_length() * self.unit - 1


def _queue(op: str) -> str:
    if op in ("s_waitcnt", "s_barrier"):
        return op
    return "lgkmcnt" if op.startswith("ds_") else "smem" if op.startswith("s_") else "vmcnt"


@dataclass
class Order:
    """Epochs and steps of every access under one placement of waits and barriers. waits: instruction index to counters."""

    issue: list
    done: list
    done_step: list
    barriers: list
    patch: dict
    without: frozenset


def order(acc: Accesses, patch: dict | None = None, without: frozenset = frozenset()) -> Order:
    """Issue and completion of every access.

    patch    {instruction index: {counter: value}}: what an s_waitcnt waits for instead of its own counters ({} removes it);
             at any other instruction, a wait that is put before it
    without  instruction indices of barriers that are taken out
    """
    patch = patch or {}
    n = len(acc.all)
    issue, done, done_step, barriers = [0] * n, [NEVER] * n, [NEVER] * n, []
    for steps in acc.steps:
        epoch, queues = 0, {"vmcnt": [], "lgkmcnt": []}
        for at, (queue, ins, number) in enumerate(steps):
            counters = patch.get(ins.index)
            if counters is None and queue == "s_waitcnt":
                counters = ins.mods
            if counters:
                for counter, allowed in counters.items():
                    waiting = queues.get(counter)
                    if waiting is not None and len(waiting) > allowed:
                        for x in waiting[: len(waiting) - allowed]:
                            if x >= 0:
                                done[x], done_step[x] = epoch, at
                        del waiting[: len(waiting) - allowed]
            if queue == "s_barrier":
                epoch += ins.index not in without
            elif queue in queues:
                queues[queue].append(number)
                if number >= 0:
                    issue[number] = epoch
        barriers.append(epoch)
    return Order(issue, done, done_step, barriers, patch, without)


def races(acc: Accesses, o: Order) -> list[tuple[int, int]]:
    """Pairs of access numbers that conflict and are ordered neither way, the earlier in program order first."""
    last = max(o.barriers, default=0)
    waves = len(acc.steps)
    live: list[list[list[int]]] = [[[] for _ in range(waves)] for _ in range(last + 1)]
    for x, a in enumerate(acc.all):
        for e in range(o.issue[x], min(o.done[x], last) + 1):
            live[e][a.wave].append(x)
    found = set()
    for here in live:
        writes, touched = [0] * waves, [0] * waves
        for w, numbers in enumerate(here):
            for x in numbers:
                touched[w] |= acc.bits[x]
                if acc.all[x].kind != "read":
                    writes[w] |= acc.bits[x]
        for v, w in combinations(range(waves), 2):
            if not (writes[v] & touched[w] or touched[v] & writes[w]):
                continue
            for x in here[v]:
                for y in here[w]:
                    if acc.bits[x] & acc.bits[y] and not _harmless(acc, x, y):
                        found.add(
                            (x, y) if (o.issue[x], acc.all[x].instruction.line) <= (o.issue[y], acc.all[y].instruction.line) else (y, x)
                        )
    return sorted(found | _same_wave(acc, o))


def _harmless(acc: Accesses, x: int, y: int) -> bool:
    """Two reads, or one ds_write by which two waves store one tile, of which Triton keeps copies in several waves.

    Every lane must store where the same lane of the other wave does, and nothing must be known to differ.
    """
    a, b = acc.all[x], acc.all[y]
    if a.kind != b.kind or a.kind == "dma":
        return False
    if a.kind == "read":
        return True
    same = a.instruction is b.instruction and np.array_equal(a.starts, b.starts)
    return same and (a.data is None or b.data is None or np.array_equal(a.data, b.data))


def _same_wave(acc: Accesses, o: Order) -> set[tuple[int, int]]:
    """LDS-DMA against DS accesses of one wave: in order only through a wait."""
    found = set()
    for steps in acc.steps:
        flying: list[int] = []
        for at, (_, _, y) in enumerate(steps):
            if y < 0:
                continue
            flying = [x for x in flying if o.done_step[x] > at]
            kind = acc.all[y].kind
            for x in flying:
                other = acc.all[x].kind
                if (kind == "dma") != (other == "dma") and acc.bits[x] & acc.bits[y]:
                    found.add((x, y))
            flying.append(y)
    return found


def uninitialised(acc: Accesses, o: Order) -> dict[int, int]:
    """{read: bits} that no write which could come before it covers; a racing write counts as one that could."""
    last = max(o.barriers, default=0)
    waves = len(acc.steps)
    written = [[0] * (last + 1) for _ in range(waves)]
    for x, a in enumerate(acc.all):
        if a.kind != "read":
            written[a.wave][o.issue[x]] |= acc.bits[x]
    for row in written:
        for e in range(last):
            row[e + 1] |= row[e]
    others = [[0] * (last + 1) for _ in range(waves)]
    for w in range(waves):
        for e in range(last + 1):
            for v in range(waves):
                if v != w:
                    others[w][e] |= written[v][e]
    out = {}
    for w, steps in enumerate(acc.steps):
        own = 0
        for _, _, x in steps:
            if x < 0:
                continue
            if acc.all[x].kind != "read":
                own |= acc.bits[x]
            elif missing := acc.bits[x] & ~(own | others[w][min(o.done[x], last)]):
                out[x] = missing
    return out


def readers(acc: Accesses, o: Order) -> list[set[int]]:
    """For every access, the reads that take bytes from it, by replay in barrier order (meaningful where nothing races)."""
    last = np.full(acc.size, -1, np.int64)
    out: list[set[int]] = [set() for _ in acc.all]
    for x in sorted(range(len(acc.all)), key=lambda x: (o.issue[x], acc.all[x].wave, acc.step[x])):
        if acc.all[x].kind != "read":
            last[acc.places[x]] = x
        else:
            for w in np.unique(last[acc.places[x]]).tolist():
                if w >= 0:
                    out[w].add(x)
    return out
