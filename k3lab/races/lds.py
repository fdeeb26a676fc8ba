"""Happens-before analysis of the LDS accesses of one workgroup, from AMDGCN, with no GPU.

Every access has an issue epoch (barriers its wave had passed when it was issued) and a completion epoch (the epoch in
which an s_waitcnt of its wave retired it). Access X of one wave happens before Y of another iff

    completion(X) < issue(Y),

and X before Y of the same wave iff X was retired before Y was issued; DS accesses of one wave are in order by themselves.
Two accesses to a common byte, one of them a write, that are ordered neither way are a race. The trace does not depend on
data, so the verdict holds for every interleaving of the waves; it holds for the inputs given and no others.
"""

from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from k3lab.errors import K3labError
from k3lab.races.asm import Instruction
from k3lab.races.gfx import Access, Trace, execute
from k3lab.races.kernel import Input, Kernel, make_memory, standard_input, ttgir_copies

ASSUMPTIONS = (
    "vmcnt counts vector memory operations of a wave and retires them in the order of issue, stores included (gfx9)",
    "lgkmcnt retires DS operations in the order of issue; scalar loads in flight are taken to have finished first",
    "an LDS-DMA copy writes LDS at m0 + offset + lane * width, active lanes alone, and is complete once vmcnt retires it",
    "a lane of buffer_load ... lds that is out of bounds writes zeros to LDS",
    "the LDS-DMA copies of one wave land in the order of issue",
    "one workgroup; LDS starts uninitialised; no wave reads an integer or an address back from LDS",
)
NEVER = 1 << 30
KINDS = ("race", "uninitialised", "barrier count", "unread copy", "missing copy")


@dataclass(frozen=True)
class Wait:
    """The wait that should have covered a race: enough is the largest counter value that would, at that place."""

    instruction: Instruction | None
    before: Instruction | None
    counter: str
    allows: int | None
    enough: int
    reason: str  # "too weak", "none" or "no barrier"


@dataclass(frozen=True)
class Finding:
    """One hazard, or one note (unread copy, missing copy), over all waves that show it."""

    kind: str
    first: Instruction | None
    second: Instruction | None
    tile: str
    bytes: int
    span: tuple
    waves: tuple
    pairs: int
    relation: str
    wait: Wait | None
    message: str

    @property
    def is_hazard(self) -> bool:
        return self.kind in ("race", "uninitialised", "barrier count")

    def row(self) -> dict:
        """Plain values for JSON and tables."""

        def at(i: Instruction | None) -> dict | None:
            return None if i is None else {"line": i.line, "source": i.source, "text": i.text}

        wait = None
        if self.wait:
            w = self.wait
            wait = {"counter": w.counter, "allows": w.allows, "enough": w.enough, "reason": w.reason, "at": at(w.instruction or w.before)}
        return {
            "kind": self.kind, "first": at(self.first), "second": at(self.second), "tile": self.tile, "bytes": self.bytes,
            "span": list(self.span), "waves": [list(w) if isinstance(w, tuple) else w for w in self.waves], "pairs": self.pairs,
            "relation": self.relation, "wait": wait, "message": self.message,
        }  # fmt: skip


@dataclass
class Report:
    """What the analysis says of one kernel at one input: verdict ordered | race | uninitialised | error."""

    input: str
    verdict: str
    findings: list = field(default_factory=list)
    error: str = ""
    assumptions: tuple = ASSUMPTIONS

    def count(self, kind: str) -> int:
        """Findings of a kind; for "race" that is pairs of instructions, other-wave and same-wave apart."""
        return sum(f.kind == kind for f in self.findings)

    def __str__(self) -> str:
        lines = [f"{self.input}: {self.verdict}" + (f" ({self.error})" if self.error else "")]
        lines += [f"  {f.message}" for f in self.findings]
        return "\n".join([*lines, "assumed: " + "; ".join(self.assumptions)])


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
                    if acc.bits[x] & acc.bits[y] and not (acc.all[x].kind == acc.all[y].kind == "read"):
                        found.add(
                            (x, y) if (o.issue[x], acc.all[x].instruction.line) <= (o.issue[y], acc.all[y].instruction.line) else (y, x)
                        )
    return sorted(found | _same_wave(acc, o))


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


# ---------------------------------------------------------------- findings


def covering_wait(acc: Accesses, o: Order, x: int, y: int) -> Wait:
    """The wait that should have retired access x before y of the pair was issued."""
    first, second = acc.all[x], acc.all[y]
    counter = "vmcnt" if first.kind == "dma" else "lgkmcnt"
    steps = acc.steps[first.wave]
    stop = acc.step[y] if first.wave == second.wave else len(steps)
    passed = 0
    for at, (queue, ins, _) in enumerate(steps[:stop]):
        passed += queue == "s_barrier" and ins.index not in o.without
        # a wait is of use to other waves only before the barrier that lets them on; within one wave that is its usual place too
        if passed == o.issue[y] and o.issue[x] < o.issue[y]:
            stop = at
            break
    else:
        if first.wave != second.wave:
            return Wait(None, second.instruction, counter, None, 0, "no barrier")
    behind, wait, enough = 0, None, 0
    for queue, ins, _ in steps[acc.step[x] + 1 : stop]:
        counters = o.patch.get(ins.index, ins.mods if queue == "s_waitcnt" else {})
        if counter in counters:
            wait, enough, allows = ins, behind, counters[counter]
        behind += queue == counter
    before = steps[stop][1] if stop < len(steps) else second.instruction
    if wait is None:
        return Wait(None, before, counter, None, behind, "none")
    return Wait(wait, before, counter, allows, enough, "too weak")


def _names(waves: set) -> str:
    ids = sorted(waves)
    return f"wave {ids[0]}" if len(ids) == 1 else f"waves {', '.join(map(str, ids))}"


_DOES = {"dma": "copies memory into", "write": "writes", "read": "reads"}


def _race_findings(acc: Accesses, o: Order, pairs: list[tuple[int, int]]) -> list[Finding]:
    groups: dict = {}
    for x, y in pairs:
        a, b = acc.all[x], acc.all[y]
        key = (a.instruction.index, b.instruction.index, "same wave" if a.wave == b.wave else "other wave")
        groups.setdefault(key, []).append((x, y))
    out = []
    for (_, _, relation), members in groups.items():
        bits = 0
        for x, y in members:
            bits |= acc.bits[x] & acc.bits[y]
        x, y = members[0]
        first, second = acc.all[x], acc.all[y]
        waits = [covering_wait(acc, o, *m) for m in members]
        wait = min(waits, key=lambda w: w.enough)
        lo, hi = acc.span(bits)
        tiles = {t for m in members for n in m for t in acc.all[n].tile.split(", ") if t and acc.all[n].kind != "read"} - {"?"}
        tile = ", ".join(sorted(tiles)) or "?"
        size = bits.bit_count() * acc.unit
        message = (
            f"race ({relation}): {first.instruction} {_DOES[first.kind]} LDS bytes {lo}..{hi} (tile {tile}, {size} bytes shared; "
            f"{_names({acc.all[m[0]].wave for m in members})}) and may not be complete when {second.instruction} {_DOES[second.kind]} them "
            f"({_names({acc.all[m[1]].wave for m in members})}). {_wait_words(wait)}"
        )
        waves = tuple(sorted({(acc.all[m[0]].wave, acc.all[m[1]].wave) for m in members}))
        out.append(
            Finding("race", first.instruction, second.instruction, tile, size, (lo, hi), waves, len(members), relation, wait, message)
        )  # fmt: skip
    return out


def _wait_words(w: Wait) -> str:
    if w.reason == "no barrier":
        return "No s_barrier stands between them."
    if w.reason == "none":
        place = f"before line {w.before.line} ({w.before.op})"
        return f"No s_waitcnt {w.counter} stands between them; {w.counter}({w.enough}) {place} would cover it."
    return (
        f"The wait at line {w.instruction.line} is {w.counter}({w.allows}), but only {w.enough} operation{'s' * (w.enough != 1)} "
        f"follow{'s' * (w.enough == 1)} this one: it needs {w.counter}({w.enough}) or less."
    )


def _uninitialised_findings(acc: Accesses, o: Order, sources: dict[int, Access]) -> list[Finding]:
    groups: dict = {}
    for x, bits in uninitialised(acc, o).items():
        groups.setdefault(acc.all[x].instruction, []).append((x, bits))
    out = []
    for ins, members in groups.items():
        bits = 0
        for _, b in members:
            bits |= b
        lo, hi = acc.span(bits)
        size = bits.bit_count() * acc.unit
        source = sources.get(ins.index)
        waves = {acc.all[x].wave for x, _ in members}
        tile = source.tile if source else "?"
        fills = (
            f"On a full chunk they come from {source.instruction}, whose masked lanes write nothing here."
            if source
            else "No access in this kernel writes them at any input analysed."
        )
        message = (
            f"uninitialised: {ins} reads {size} bytes within LDS {lo}..{hi} (tile {tile}; {_names(waves)}) that nothing in this "
            f"workgroup has written: they hold what an earlier workgroup left. {fills}"
        )
        first = source.instruction if source else None
        out.append(Finding("uninitialised", first, ins, tile, size, (lo, hi), tuple(sorted(waves)), len(members), "", None, message))
    return out


def _unread_findings(acc: Accesses, o: Order) -> list[Finding]:
    """Copies of which no byte is read by any wave, execution by execution of the instruction."""
    who = readers(acc, o)
    groups: dict = {}
    seen: dict = {}
    for x, a in enumerate(acc.all):
        if a.kind != "dma":
            continue
        turn = seen[a.wave, a.instruction.index] = seen.get((a.wave, a.instruction.index), -1) + 1
        groups.setdefault((a.instruction, turn), []).append(x)
    out = []
    for (ins, turn), members in groups.items():
        bits = 0
        for x in members:
            bits |= acc.bits[x]
        if not bits or any(who[x] for x in members):
            continue
        lo, hi = acc.span(bits)
        size = bits.bit_count() * acc.unit
        waves = {acc.all[x].wave for x in members}
        zero = sum(acc.all[x].zero_filled for x in members) == sum(acc.all[x].lanes for x in members)
        message = (
            f"unread copy: {ins} (execution {turn + 1}; {_names(waves)}) copies tile {acc.all[members[0]].tile} into LDS bytes {lo}..{hi} and nothing reads "
            f"them{'; every lane is out of bounds, so it writes zeros' if zero else ''}."
        )
        out.append(
            Finding(
                "unread copy", ins, None, acc.all[members[0]].tile, size, (lo, hi), tuple(sorted(waves)), len(members), "", None, message
            )
        )
    return out


def missing_copies(kernel: Kernel) -> list[Finding]:
    """TTGIR copies, by source line, that have no LDS-DMA instruction in the assembly (bytes per workgroup compared)."""
    expected: dict = {}
    for source, size in ttgir_copies(kernel.ttgir):
        expected.setdefault(source, []).append(size)
    found: dict = {}
    for ins in kernel.program.instructions:
        if ins.op.startswith("global_load_lds") or (ins.op.startswith("buffer_load") and "lds" in ins.mods):
            width = 4 * int(ins.op.rpartition("dwordx")[2]) if "dwordx" in ins.op else 4
            found.setdefault(ins.source, []).append((ins, width * 64 * kernel.warps))
    out = []
    for source, sizes in expected.items():
        dmas = found.get(source, [])
        short = sum(sizes) - sum(s for _, s in dmas)
        if short <= 0:
            continue
        copies = short / sizes[0]
        first = dmas[0][0] if dmas else None
        message = (
            f"missing copy: TTGIR has {len(sizes)} copies into LDS at {source} ({sum(sizes)} bytes), the assembly has LDS-DMA for "
            f"{sum(sizes) - short} bytes: {copies:g} of them was deleted after Triton had counted it in its waits."
        )
        out.append(Finding("missing copy", first, None, "?", short, (0, 0), (), round(copies), "", None, message))
    return out


def findings(acc: Accesses, o: Order, sources: dict[int, Access] | None = None) -> list[Finding]:
    """Every finding of one trace under one placement of waits and barriers."""
    if len(set(o.barriers)) > 1:
        lines = [i for q, i, _ in acc.steps[0] if q == "s_barrier"]
        message = f"barrier count: the waves pass {o.barriers} barriers (wave 0 first); a wave that waits for the others may never go on"
        where = lines[0] if lines else None
        return [Finding("barrier count", where, None, "", 0, (0, 0), tuple(range(len(o.barriers))), 1, "", None, message)]
    return [*_race_findings(acc, o, races(acc, o)), *_uninitialised_findings(acc, o, sources or {}), *_unread_findings(acc, o)]


def verdict(found: list[Finding]) -> str:
    """race (a barrier mismatch included) before uninitialised before ordered; notes do not count."""
    kinds = {f.kind for f in found}
    return "race" if kinds & {"race", "barrier count"} else "uninitialised" if "uninitialised" in kinds else "ordered"


def run(kernel: Kernel, given: Input) -> Accesses:
    """Execute the kernel at one input. Raises Unsupported naming an instruction that cannot be followed."""
    return Accesses(execute(kernel.program, make_memory(kernel, given), kernel.warps, given.workgroup, kernel.lds_bytes))


def _sources(acc: Accesses) -> dict[int, Access]:
    """For every reading instruction, a write that it takes bytes from."""
    out: dict = {}
    for w, reads in enumerate(readers(acc, order(acc))):
        for x in reads:
            out.setdefault(acc.all[x].instruction.index, acc.all[w])
    return out


def analyse(kernel: Kernel, inputs: list[Input | str]) -> list[Report]:
    """One report per input (a standard name or an Input). An input that cannot be followed gives verdict "error", not an exception."""
    reports, traces, sources = [], [], {}
    for item in inputs:
        name = item if isinstance(item, str) else item.name
        try:
            acc = run(kernel, standard_input(kernel, item) if isinstance(item, str) else item)
        except K3labError as error:
            reports.append(Report(name, "error", error=str(error)))
            continue
        traces.append((len(reports), acc))
        reports.append(Report(name, ""))
    for _, acc in traces:
        sources = _sources(acc) | sources
    if "full" not in inputs and any(isinstance(i, str) for i in inputs) and traces:
        sources = _sources(run(kernel, standard_input(kernel, "full"))) | sources
    missing = missing_copies(kernel) if kernel.ttgir else []
    for n, acc in traces:
        found = findings(acc, order(acc), sources) + missing
        reports[n] = replace(reports[n], verdict=verdict(found), findings=found)
    return reports


# ---------------------------------------------------------------- the wait that suffices


@dataclass(frozen=True)
class Fix:
    """A wait to change: racing pairs left by value, and the largest value that leaves none of its own (None if none does).

    allows is None where no wait stands: then instruction is the barrier or access to put one before.
    """

    instruction: Instruction
    counter: str
    allows: int | None
    pairs: dict
    enough: int | None

    def row(self) -> dict:
        return {
            "line": self.instruction.line, "source": self.instruction.source, "text": self.instruction.text, "counter": self.counter,
            "allows": self.allows, "enough": self.enough, "pairs": {str(k): v for k, v in self.pairs.items()},
        }  # fmt: skip


def sufficient_waits(acc: Accesses, found: list[Finding]) -> list[Fix]:
    """For every wait that a race blames: tighten it alone, re-analyse, and report what is left at each value.

    A wait that is missing is tried as one put before the barrier (or, within one wave, before the second access).
    Fix.pairs counts every racing pair of instructions that is left, so several faulty waits show in each other's numbers;
    Fix.enough looks only at the races that blame this wait. left_after(acc, fixes) says what all of them leave together.
    """
    blamed: dict = {}
    for f in found:
        if f.kind == "race" and f.wait and f.wait.reason != "no barrier":
            ins = f.wait.instruction or f.wait.before
            blamed.setdefault((ins, f.wait.counter, f.wait.allows), []).append(f)
    out = []
    for (ins, counter, allows), members in blamed.items():
        mine = {(f.first, f.second, f.relation) for f in members}
        pairs, enough = {}, None
        top = allows if allows is not None else max(f.wait.enough for f in members) + 1
        for value in range(top, -1, -1):
            own = ins.mods if ins.op == "s_waitcnt" else {}
            o = order(acc, {ins.index: {**own, counter: value}})
            left = _race_findings(acc, o, races(acc, o))
            pairs[value] = len(left)
            if not any((f.first, f.second, f.relation) in mine for f in left):
                enough = value
                break
        out.append(Fix(ins, counter, allows, pairs, enough))
    return out


def left_after(acc: Accesses, fixes: list[Fix]) -> int:
    """Racing pairs of instructions that are left when every fix is made at once."""
    patch: dict = {}
    for f in fixes:
        if f.enough is not None:
            own = patch.get(f.instruction.index, f.instruction.mods if f.instruction.op == "s_waitcnt" else {})
            patch[f.instruction.index] = {**own, f.counter: f.enough}
    o = order(acc, patch)
    return len(_race_findings(acc, o, races(acc, o)))
