"""AMDGCN text of one gfx9 kernel, parsed: instructions with their assembly and source lines, arguments, descriptor."""

import re
from dataclasses import dataclass

import numpy as np

from k3lab.errors import BadInput, Unsupported

VCC, M0, EXEC = 106, 124, 126
LONGEST = 1000  # characters of an instruction
NAMED = {
    "vcc": ("s", VCC, 2), "vcc_lo": ("s", VCC, 1), "vcc_hi": ("s", VCC + 1, 1), "exec": ("s", EXEC, 2), "exec_lo": ("s", EXEC, 1),
    "exec_hi": ("s", EXEC + 1, 1), "m0": ("s", M0, 1),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of the assembly: operands are (kind, index, count), kind s, v, a, i (an integer, in index) or x (other text)."""

    index: int
    op: str
    operands: tuple
    mods: dict
    line: int
    source: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line} ({self.source}) {self.text}"


@dataclass(frozen=True)
class Program:
    """A parsed kernel. args are (offset, size, kind) in order; descriptor holds the .amdhsa_ values."""

    name: str
    arch: str
    instructions: list
    labels: dict
    args: tuple
    descriptor: dict


def _operand(text: str) -> tuple:
    t = text.strip("|")
    if t in NAMED:
        return NAMED[t]
    m = re.fullmatch(r"-?\|?(v|s|a|ttmp)(?:(\d+)|\[(\d+):(\d+)\])\|?", t)
    if m:
        lo = int(m[2] or m[3])
        count = int(m[4]) - lo + 1 if m[4] else 1
        return ("s", lo + 108, count) if m[1] == "ttmp" else (m[1], lo, count)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", t):
        return ("i", int(t, 0), 1)
    if re.fullmatch(r"-?\d+\.\d*(e[-+]?\d+)?", t):
        return ("i", int(np.float32(t).view(np.uint32)), 1)
    return ("x", t, 0)


def _instruction(index: int, line: int, source: str, text: str) -> Instruction:
    if len(text) > LONGEST:
        raise ValueError(f"an instruction of {len(text)} characters")
    op, _, rest = text.partition(" ")
    op = re.sub(r"_e(32|64)$", "", op)
    if op == "s_waitcnt":
        mods = {k: int(v) for k, v in re.findall(r"(\w+)\((\d+)\)", rest)}
        if not mods:
            raise Unsupported(f"line {line}: {text}: a wait without named counters; assemble with symbolic counters")
        return Instruction(index, op, (), mods, line, source, text)
    operands, mods = [], {}
    for part in re.split(r",\s*(?![^\[(]*[\])])", rest) if rest else []:
        if not part.strip():
            raise ValueError("an operand is missing")
        first, *others = part.split()
        operands.append(_operand(first))
        for word in others:
            key, _, value = word.partition(":")
            mods[key] = int(value, 0) if re.fullmatch(r"0x[0-9a-f]+|\d+", value) else (value or True)
    return Instruction(index, op, tuple(operands), mods, line, source, text)


def parse(text: str, where: str = "assembly") -> Program:
    """AMDGCN text to Program. Raises BadInput if it is not the assembly of one gfx9 kernel, naming `where`."""
    target = re.search(r'\.amdgcn_target\s+"[^"]*-(gfx\w+)', text)  # Triton 3.9 writes amdgpu9.50-…, the others amdgcn-…
    names = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.M)
    if not target or not names:
        raise BadInput(f"{where}: not AMDGCN assembly (no .amdgcn_target or no .amdhsa_kernel); pass the .amdgcn file that Triton caches")
    if len(names) > 1:
        raise BadInput(f"{where}: holds {len(names)} kernels ({', '.join(names)}); pass one kernel per file")
    if not target[1].startswith("gfx9"):
        raise Unsupported(f"{where}: target {target[1]}; the analysis knows gfx9 (CDNA: gfx90a, gfx942, gfx950) alone")
    try:
        descriptor = {k: int(v) for k, v in re.findall(r"\.amdhsa_(\w+) (\d+)\s*$", text, re.M)}
        args = tuple(
            (int(o), int(s), k) for o, s, k in re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", text)
        )  # fmt: skip
    except ValueError as error:  # more digits than Python reads
        raise BadInput(f"{where}: kernel {names[0]}: a number of the descriptor or of .args is none: {error}") from None
    instructions, labels, files, source, inside = [], {}, {}, "?", False
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.partition(";")[0].rstrip()
        if not line:
            continue
        if m := re.match(r'\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"', line):
            files[m[1]] = m[2].rsplit("/", 1)[-1]
        elif m := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            if m[2] != "0":  # line 0 is the compiler's own code; the line before tells the reader more
                # of an inlined helper, the line of the kernel that called it: ; ops.py:11:13 @[ kernel.py:239:14 ]
                caller = re.search(r"@\[ (?:[^\s\]]*/)?([^\s/\]]+):(\d+):\d+[ \]]*$", raw)
                source = f"{caller[1]}:{caller[2]}" if caller else f"{files.get(m[1], '?')}:{m[2]}"
        elif m := re.match(r"([.\w$]+):", line):
            inside = inside or m[1] == names[0]
            if m[1].startswith(".Lfunc_end"):
                inside = False
            labels[m[1]] = len(instructions)
        elif inside and re.match(r"\s*[a-z]", line):  # inline assembly may start in column 0
            words = " ".join(line.split())
            try:
                instructions.append(_instruction(len(instructions), number, source, words))
            except ValueError as error:
                raise Unsupported(f"{where}: line {number}: {words[:200]}: {error}") from None
    if not instructions:
        raise BadInput(f"{where}: kernel {names[0]} has no instructions")
    return Program(names[0], target[1], instructions, labels, args, descriptor)
