"""What the tiny Kimi-K3 reads: Python's standard library (code, prose) and generated arithmetic word problems.

Three domains, each with a held-out part that training never sees: files (code and the prose taken from them) by a hash of their path,
arithmetic problems by a hash of the question's text. The numbers of a held-out problem may recur under other names and things.
"""

import ast
import hashlib
import platform
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from k3lab.errors import BadInput
from k3lab.tiny.model import BOS

DOMAINS = ("code", "prose", "arithmetic")
HELD_OUT_EVERY = 20  # one file, topic or problem in 20 is held out
STOP = b"\n\n"
MAX_SHOTS = 2  # prompts of at most about 430 bytes, near the training window

_NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eli", "Fay", "Gus", "Hal", "Ines", "Jon", "Kai", "Lin", "Mia", "Noa", "Omar", "Pia"]
_THINGS = ["apples", "pens", "books", "coins", "cards", "stamps", "marbles", "shells", "cups", "stones", "tickets", "plums"]


def _held_out(key: str) -> bool:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HELD_OUT_EVERY == 0


@dataclass(frozen=True)
class Problem:
    """An arithmetic word problem; `text` is how training spells it, `prompt` ends where the model has to answer."""

    question: str
    working: str
    answer: int

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def text(self) -> str:
        return f"{self.prompt} {self.working} The answer is {self.answer}.\n\n"

    @property
    def held_out(self) -> bool:
        return _held_out(self.question)


def _draw(r: random.Random) -> Problem:
    a, b = r.sample(_NAMES, 2)
    it = r.choice(_THINGS)
    x, y, z = r.randint(2, 99), r.randint(2, 60), r.randint(2, 12)
    kind = r.randrange(7)
    if kind == 0:
        return Problem(f"{a} has {x} {it}. {b} gives {a} {y} more {it}. How many {it} does {a} have now?", f"{x} + {y} = {x + y}.", x + y)
    if kind == 1:
        return Problem(f"{a} has {x + y} {it} and loses {y} of them. How many {it} are left?", f"{x + y} - {y} = {x}.", x)
    if kind == 2:
        return Problem(f"{a} buys {z} boxes with {y} {it} in each. How many {it} does {a} buy?", f"{z} * {y} = {z * y}.", z * y)
    if kind == 3:
        total = 2 * x + y
        question = f"{a} has {x} {it} and {b} has {y} {it} more than {a}. How many {it} do they have together?"
        return Problem(question, f"{b} has {x} + {y} = {x + y}. {x} + {x + y} = {total}.", total)
    if kind == 4:
        question = f"{a} shares {z * y} {it} equally among {z} friends. How many {it} does each friend get?"
        return Problem(question, f"{z * y} / {z} = {y}.", y)
    if kind == 5:
        left = x + y - min(z, x)
        question = f"{a} has {x} {it}, buys {y} more and then gives {min(z, x)} to {b}. How many {it} does {a} keep?"
        return Problem(question, f"{x} + {y} = {x + y}. {x + y} - {min(z, x)} = {left}.", left)
    return Problem(f"One ticket costs {y} dollars. How many dollars do {z} tickets cost {a}?", f"{z} * {y} = {z * y}.", z * y)


def problems(seed: int, held_out: bool) -> Iterator[Problem]:
    """An endless stream of problems, all held out or none of them."""
    r = random.Random(f"{seed}-{held_out}")
    while True:
        p = _draw(r)
        if p.held_out == held_out:
            yield p


@dataclass(frozen=True)
class Prompt:
    """A prompt of bytes behind a BOS, [T] int64, and the problem it asks."""

    tokens: Tensor
    problem: Problem


def arithmetic_prompts(n: int, seed: int, max_shots: int = MAX_SHOTS) -> list[Prompt]:
    """n different held-out problems, each behind 0 to max_shots solved training problems, so that prompt lengths are ragged."""
    asked, shots, r = problems(seed, True), problems(seed + 1, False), random.Random(f"shots-{seed}")
    seen: dict[str, Prompt] = {}
    while len(seen) < n:
        p = next(asked)
        if p.question not in seen:
            text = "".join(next(shots).text for _ in range(r.randint(0, max_shots))) + p.prompt
            seen[p.question] = Prompt(encode(text), p)
    return list(seen.values())


def encode(text: str | bytes) -> Tensor:
    """BOS and the bytes of text, [T] int64."""
    raw = text.encode() if isinstance(text, str) else text
    return torch.tensor([BOS, *raw])


def decode(ids: Tensor | list[int]) -> str:
    """The text of ids; BOS and MASK are dropped, bytes that are not UTF-8 are shown as replacement characters."""
    return bytes(i for i in (ids.tolist() if isinstance(ids, Tensor) else ids) if i < BOS).decode("utf-8", "replace")


def is_correct(output: Tensor | list[int] | str, problem: Problem) -> bool:
    """Exact match: the first "The answer is N." of the output, cut at the first empty line, names the problem's answer."""
    text = output if isinstance(output, str) else decode(output)
    found = re.search(r"The answer is (-?\d+)\.", text.split(STOP.decode())[0])
    return found is not None and int(found.group(1)) == problem.answer


def _prose_of(source: bytes) -> list[str]:
    """The docstrings of a module that hold at least 120 characters, in the order of the source; none if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the standard library ships files that are broken on purpose, for its tests
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [d for d in docs if d and len(d) >= 120]


def standard_library(max_bytes: int | None = None, seed: int = 0) -> dict[str, dict[bool, list[bytes]]]:
    """{"code", "prose"} -> {held out: documents} of this interpreter's standard library, site-packages excluded.

    Prose is docstrings of those files, the language reference in pydoc_data/topics.py (not used as code) and LICENSE.txt where it is
    shipped. Left out: codec tables (encodings/), files below 500 bytes or above 300,000, files that are mostly not letters.
    max_bytes bounds the training code read, a twentieth of it the held-out code, over files shuffled by seed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(root.rglob("*.py")) if not {"site-packages", "dist-packages"} & set(f.relative_to(root).parts)]
    random.Random(seed).shuffle(files)
    out: dict[str, dict[bool, list[bytes]]] = {d: {False: [], True: []} for d in ("code", "prose")}
    read = {False: 0, True: 0}
    limit = {False: max_bytes, True: max_bytes and max_bytes // HELD_OUT_EVERY}
    for f in files:
        rel = f.relative_to(root).as_posix()
        held = _held_out(rel)
        if rel.startswith("encodings/") or rel == "pydoc_data/topics.py" or (limit[held] is not None and read[held] > limit[held]):
            continue
        raw = f.read_bytes().replace(b"\r\n", b"\n")
        if not 500 < len(raw) < 300_000 or sum(map(raw.count, b"etaoinsrl_ ")) < 0.35 * len(raw):
            continue
        read[held] += len(raw)
        out["code"][held].append(raw)
        out["prose"][held] += [d.encode("utf-8", "replace") for d in _prose_of(raw)]
    for name, text in topics.items():
        out["prose"][_held_out(name)].append(text.encode())
    licence = root / "LICENSE.txt"
    if licence.is_file():
        out["prose"][False].append(licence.read_bytes())
    return out


def pack(documents: list[bytes]) -> Tensor:
    """Documents one after the other, each behind a BOS, [bytes + documents] int16."""
    parts = [
        torch.cat([torch.tensor([BOS], dtype=torch.int16), torch.frombuffer(bytearray(d), dtype=torch.uint8).short()]) for d in documents
    ]
    return torch.cat(parts)


def _arithmetic_documents(n: int, seed: int, held_out: bool) -> list[bytes]:
    """n problems in documents of 1 to 4, so that a problem right after BOS is nothing new."""
    stream, r = problems(seed, held_out), random.Random(f"documents-{seed}")
    docs = []
    while n > 0:
        take = min(n, r.randint(1, 4))
        docs.append("".join(next(stream).text for _ in range(take)).encode())
        n -= take
    return docs


@dataclass(frozen=True)
class Corpus:
    """Packed token streams by domain, [N] int16: train and held out."""

    train: dict[str, Tensor]
    held_out: dict[str, Tensor]

    def describe(self) -> dict[str, object]:
        """Sizes, the interpreter whose library was read, and a hash of all of it."""
        h = hashlib.sha256()
        for part in (self.train, self.held_out):
            for d in DOMAINS:
                h.update(part[d].numpy().tobytes())
        sizes = {f"{d}_{n}_tokens": len(p[d]) for d in DOMAINS for n, p in (("train", self.train), ("held_out", self.held_out))}
        return {"python": platform.python_version(), **sizes, "sha256": h.hexdigest()}


def build_corpus(num_problems: int, max_code_bytes: int | None = None, seed: int = 0) -> Corpus:
    """The three domains from this interpreter's standard library and a seed; held-out arithmetic gets a twentieth of num_problems."""
    library = standard_library(max_code_bytes, seed)
    parts = []
    for held in (False, True):
        empty = [d for d in ("code", "prose") if not library[d][held]]
        if empty:
            side = "held-out" if held else "training"
            raise BadInput(f"max_code_bytes={max_code_bytes}: no {side} {empty[0]}; read more, or use a Python with its library as files")
        packed = {d: pack(library[d][held]) for d in ("code", "prose")}
        count = max(100, num_problems // HELD_OUT_EVERY) if held else num_problems
        parts.append({**packed, "arithmetic": pack(_arithmetic_documents(count, seed + 10, held))})
    return Corpus(*parts)


def windows(stream: Tensor, n: int, length: int, gen: torch.Generator) -> Tensor:
    """n windows of `length` tokens of a packed stream, [n, length] int64, drawn by a CPU generator: the same on every device."""
    start = torch.randint(0, len(stream) - length, (n,), generator=gen).to(stream.device)
    return stream[start[:, None] + torch.arange(length, device=stream.device)].long()
