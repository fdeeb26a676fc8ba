"""Positive controls: take every barrier and every wait of a sound kernel away, or weaken it, one at a time.

A mutant is reported if the LDS analysis finds a race that the kernel as built does not have. A silent one is explained by a
second, independent walk over the same trace that looks at registers alone.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pandas as pd

from k3lab.races.asm import Instruction
from k3lab.races.kernel import Input, Kernel, standard_input
from k3lab.races.lds import run
from k3lab.races.order import Accesses, order, races

COUNTERS = ("vmcnt", "lgkmcnt")
REPORTED = "reported"
SILENT = ("redundant barrier", "guards registers", "nothing in flight", "redundant wait")


@dataclass(frozen=True)
class Mutant:
    """One change: a barrier taken out (counter ""), or a counter of a wait dropped (value None) or raised by one."""

    instruction: Instruction
    counter: str = ""
    value: int | None = None

    @property
    def what(self) -> str:
        if not self.counter:
            return "barrier removed"
        return f"{self.counter} removed" if self.value is None else f"{self.counter} weakened"

    def patch(self) -> dict:
        """The waits of this mutant, as order() takes them."""
        if not self.counter:
            return {}
        counters = {k: v for k, v in self.instruction.mods.items() if k != self.counter}
        if self.value is not None:
            counters[self.counter] = self.value
        return {self.instruction.index: counters}

    def without(self) -> frozenset:
        """The barriers that this mutant lacks."""
        return frozenset() if self.counter else frozenset([self.instruction.index])


def mutants(traces: Iterable[Accesses]) -> Iterator[Mutant]:
    """Every mutant of the barriers and waits that at least one of the traces executes, in program order."""
    used = {ins.index: ins for acc in traces for steps in acc.steps for queue, ins, _ in steps if queue in ("s_barrier", "s_waitcnt")}
    for _, ins in sorted(used.items()):
        if ins.op == "s_barrier":
            yield Mutant(ins)
        for counter in COUNTERS:
            if counter in ins.mods and ins.op == "s_waitcnt":
                yield Mutant(ins, counter)
                yield Mutant(ins, counter, ins.mods[counter] + 1)


def registers_in_flight(acc: Accesses, patch: dict | None = None) -> list[tuple[Instruction, Instruction]]:
    """(load, user) pairs: an instruction touches a register whose load no wait has retired. A sound kernel has none.

    DS reads and vector loads retire in order; scalar loads only at lgkmcnt(0).
    """
    patch, found = patch or {}, {}
    program = acc.trace.program.instructions
    for path in {id(p): p for p in acc.trace.path}.values():
        queues: dict[str, deque] = {c: deque() for c in COUNTERS}
        scalar: list = []
        pending: dict = {}
        for index in path:
            ins = program[index]
            if ins.op == "s_waitcnt":
                _retire(patch.get(index, ins.mods), queues, scalar, pending)
                continue
            touched = [(kind, i + j) for kind, i, n in ins.operands if kind in "vas" for j in range(n)]
            for r in touched:
                if r in pending:
                    found[pending[r], ins] = True
            counter, loaded = _load(ins)
            for r in loaded:
                pending[r] = ins
            if counter == "smem":
                scalar.append(ins)
            elif counter:
                queues[counter].append(ins)
    return list(found)


def _retire(counters: dict, queues: dict, scalar: list, pending: dict) -> None:
    done = []
    for counter, queue in queues.items():
        allowed = counters.get(counter)
        if allowed is None:
            continue
        while len(queue) > allowed:
            done.append(queue.popleft())
        if counter == "lgkmcnt" and allowed == 0:
            done += scalar
            scalar.clear()
    for load in done:
        for r in [r for r in _load(load)[1] if pending.get(r) is load]:
            del pending[r]


def _load(ins: Instruction) -> tuple[str, list]:
    """The counter that an instruction goes through ("" for none) and the registers that it loads."""
    if ins.op.startswith(("ds_", "s_load", "s_buffer_load", "global_", "scratch_")) or (ins.op.startswith("buffer_") and ins.operands):
        counter = "lgkmcnt" if ins.op.startswith("ds_") else "smem" if ins.op.startswith("s_") and "scratch" not in ins.op else "vmcnt"
        loads = ("load" in ins.op or "ds_read" in ins.op or "permute" in ins.op or "swizzle" in ins.op) and "lds" not in ins.mods
        if not loads or ins.op.startswith("global_load_lds"):
            return counter, []
        kind, i, n = ins.operands[0]
        return counter, [(kind, i + j) for j in range(n)]
    return "", []


def _idle(acc: Accesses, mutant: Mutant) -> bool:
    """True if the wait finds no more in flight than it allows, in every wave, every time."""
    allowed = mutant.instruction.mods[mutant.counter]
    for steps in acc.steps:
        flying = 0
        for queue, ins, _ in steps:
            if ins.index == mutant.instruction.index and flying > allowed:
                return False
            if queue == "s_waitcnt" and mutant.counter in ins.mods:
                flying = min(flying, ins.mods[mutant.counter])
            flying += queue == mutant.counter or (queue == "smem" and mutant.counter == "lgkmcnt")
    return True


def mutation_sweep(kernel: Kernel, inputs: Iterable[Input | str] = ("full", "length1", "middle", "tail")) -> pd.DataFrame:
    """One row per mutant: line, source, text, change, outcome (reported or a class of SILENT), pairs found, inputs that show it.

    The kernel itself should be ordered; races that it already has are not counted for a mutant.
    """
    given = [standard_input(kernel, i) if isinstance(i, str) else i for i in inputs]
    traces = {i.name: run(kernel, i) for i in given}
    base = {name: set(races(acc, order(acc))) for name, acc in traces.items()}
    rows = []
    for mutant in mutants(traces.values()):
        shown, pairs = [], 0
        for name, acc in traces.items():
            o = order(acc, mutant.patch(), mutant.without())
            new = set(races(acc, o)) - base[name]
            if new or len(set(o.barriers)) > 1:
                shown.append(name)
                pairs = max(pairs, len(new))
        evidence = ""
        if shown:
            outcome = REPORTED
        elif not mutant.counter:
            outcome = "redundant barrier"
        else:
            users = [pair for acc in traces.values() for pair in registers_in_flight(acc, mutant.patch())]
            if users:
                outcome, evidence = "guards registers", f"{users[0][0]} is used by {users[0][1]}"
            else:
                outcome = "nothing in flight" if all(_idle(acc, mutant) for acc in traces.values()) else "redundant wait"
        ins = mutant.instruction
        rows.append(
            {"line": ins.line, "source": ins.source, "text": ins.text, "change": mutant.what, "outcome": outcome, "pairs": pairs,
             "inputs": ",".join(shown), "evidence": evidence}
        )  # fmt: skip
    return pd.DataFrame(rows)
