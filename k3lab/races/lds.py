"""Hazards of the LDS accesses of one workgroup, from AMDGCN, with no GPU: findings in words, and the wait that suffices.

The order of accesses is defined in order.py. The trace does not depend on data, so a verdict holds for every interleaving
of the waves; it holds for the inputs given and no others.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace

from k3lab.errors import K3labError
from k3lab.races.asm import Instruction
from k3lab.races.gfx import execute
from k3lab.races.kernel import Input, Kernel, is_dma, make_memory, standard_input, ttgir_copies
from k3lab.races.order import Accesses, Order, order, races, readers, uninitialised
from k3lab.races.state import Access

ASSUMPTIONS = (
    "vmcnt counts vector memory operations of a wave and retires them in the order of issue, stores included (gfx9)",
    "lgkmcnt retires DS operations in the order of issue; scalar loads in flight are taken to have finished first",
    "an LDS-DMA copy writes LDS at m0 + offset + lane * width, active lanes alone, and is complete once vmcnt retires it",
    "a lane of buffer_load ... lds that is out of bounds writes zeros to LDS",
    "the LDS-DMA copies of one wave land in the order of issue",
    "two waves that store opaque data by one ds_write, each lane where the same lane of the other wave does, hold copies of one tile",
    "one workgroup; LDS starts uninitialised; no wave reads an integer or an address back from LDS",
)
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
    message: str
    first: Instruction | None = None
    second: Instruction | None = None
    tile: str = "?"
    bytes: int = 0
    span: tuple = (0, 0)
    waves: tuple = ()
    pairs: int = 1
    relation: str = ""
    wait: Wait | None = None

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
        ends = {"first": first.instruction, "second": second.instruction, "span": (lo, hi), "waves": waves}
        out.append(Finding("race", message, **ends, tile=tile, bytes=size, pairs=len(members), relation=relation, wait=wait))
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
            f"Where every row is present they come from {source.instruction}, whose masked lanes write nothing here."
            if source
            else "No access in this kernel writes them at any input analysed."
        )
        message = (
            f"uninitialised: {ins} reads {size} bytes within LDS {lo}..{hi} (tile {tile}; {_names(waves)}) that nothing in this "
            f"workgroup has written: they hold what an earlier workgroup left. {fills}"
        )
        first, waves = source.instruction if source else None, tuple(sorted(waves))
        out.append(Finding("uninitialised", message, first, ins, tile, size, (lo, hi), waves, len(members)))
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
        tile, place = acc.all[members[0]].tile, f"execution {turn + 1}; {_names(waves)}"
        message = (
            f"unread copy: {ins} ({place}) copies tile {tile} into LDS bytes {lo}..{hi} and nothing reads "
            f"them{'; every lane is out of bounds, so it writes zeros' if zero else ''}."
        )
        out.append(Finding("unread copy", message, ins, None, tile, size, (lo, hi), tuple(sorted(waves)), len(members)))
    return out


def missing_copies(kernel: Kernel) -> list[Finding]:
    """TTGIR copies, by source line, that have no LDS-DMA instruction in the assembly (bytes per workgroup compared)."""
    expected: dict = {}
    for source, size in ttgir_copies(kernel.ttgir):
        expected.setdefault(source, []).append(size)
    found: dict = {}
    for ins in kernel.program.instructions:
        if is_dma(ins):
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
            f"{sum(sizes) - short} bytes. {copies:g} of them is gone, and a wait that counts it lets that much more stay in flight."
        )
        out.append(Finding("missing copy", message, first, bytes=short, pairs=round(copies)))
    return out


def findings(acc: Accesses, o: Order, sources: dict[int, Access] | None = None) -> list[Finding]:
    """Every finding of one trace under one placement of waits and barriers."""
    if len(set(o.barriers)) > 1:
        lines = [i for q, i, _ in acc.steps[0] if q == "s_barrier"]
        message = f"barrier count: the waves pass {o.barriers} barriers (wave 0 first); a wave that waits for the others may never go on"
        return [Finding("barrier count", message, lines[0] if lines else None, tile="", waves=tuple(range(len(o.barriers))))]
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
        with suppress(K3labError):  # it only tells which tile should have filled an uninitialised read
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
