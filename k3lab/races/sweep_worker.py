"""The process that runs one config of a sweep: an order as one JSON line on stdin, a JSON line per item on stdout.

    order    {"launch", "problem", "kernel", "runs", "load", "deadline", "items": [{"number", "config", "spec", "fill"}]}
    answers  {"begin": number}, then {"number", "status", ...}; or {"refused": reason} if a target cannot be loaded

It may crash, hang or run out of memory: races.sweep starts another one for what is left. It ends itself when stdin closes,
so that no worker outlives a sweep that was killed.
"""

import hashlib
import json
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from k3lab.errors import BadInput, K3labError
from k3lab.races.sweep_targets import Problem, resolve
from k3lab.testing import error_budget

FILLS = {"nan": math.nan, "zero": 0.0}
BIG = 1e30
KEEP = 3  # results kept on the device, so that a run equal to one of them need not be copied and hashed
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ILLEGAL = re.compile(r"illegal memory access|misaligned address|illegal instruction|illegal address|memory access fault", re.IGNORECASE)
FATAL = re.compile(r"(CUDA|HIP) error|AcceleratorError", re.IGNORECASE)


def bits(x: Tensor) -> Tensor:
    """The same bytes as integers, flat: equality of bits, NaN included."""
    return x.contiguous().flatten().view(BITS[x.element_size()])


def tensors_of(inputs: Mapping) -> Iterator[tuple[str, object]]:
    """Tensors and plain values of a problem's inputs by name, dataclasses (a KdaCall) taken apart."""
    for name, x in inputs.items():
        if is_dataclass(x):
            yield from ((f"{name}.{f.name}", getattr(x, f.name)) for f in fields(x))
        else:
            yield name, x


def digest(named: Iterator[tuple[str, object]]) -> str:
    """sha256 over names and bytes, 16 hex digits."""
    h = hashlib.sha256()
    for name, x in named:
        h.update(name.encode())
        h.update(bits(x).cpu().numpy().data if isinstance(x, Tensor) else repr(x).encode())
    return h.hexdigest()[:16]


def fingerprint(inputs: Mapping) -> dict[str, int]:
    """A sum of the bits of every input, on the device: cheap enough to see that a kernel wrote where it should not."""
    return {n: int(bits(x).long().sum()) for n, x in tensors_of(inputs) if isinstance(x, Tensor) and x.numel()}


class Load:
    """Work beside the kernel: matrix products and copies on a second stream, put there before each run and not waited for."""

    def __init__(self, device: str) -> None:
        self.a = torch.randn(2048 if device == "cuda" else 64, 2048 if device == "cuda" else 64, device=device)
        self.big = torch.empty((64 << 20) if device == "cuda" else 1024, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream() if device == "cuda" else None

    def start(self) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self.a = (self.a @ self.a).clamp(-1, 1)
            self.big.copy_(self.big.flip(0))


def judge_result(got: Mapping[str, Tensor], problem: Problem) -> dict[str, dict]:
    """Each output against float64: the budget rule, and how many elements are outside it or not finite."""
    report = {}
    for name, x in got.items():
        truth, low = problem.truth[name], problem.low[name]
        b = error_budget(name, x, truth, low, problem.dtype)
        far = (x.double() - truth.double()).abs()
        outside = int((~(far <= b.budget)).sum())  # NaN counts as outside
        report[name] = {"error": b.error, "budget": b.budget, "rms_error": b.rms_error, "rms_budget": b.rms_budget,
                        "reference_error": b.reference_error, "ok": b.ok, "outside": outside, "elements": x.numel()}  # fmt: skip
    return report


def badness(got: Mapping[str, Tensor], problem: Problem) -> float:
    """How far a result is from the truth, to choose the worst of several: non-finite first, then the largest error."""
    worst = 0.0
    for name, x in got.items():
        far = (x.double() - problem.truth[name].double()).abs()
        worst = max(worst, float(torch.nan_to_num(far, nan=math.inf).max()) if far.numel() else 0.0)
    return worst


def measure(problem: Problem, launch, config: Mapping, fill: str, runs: int, load: Load | None, seen: dict[str, dict]) -> dict:
    """`runs` launches into outputs that hold `fill`; what came out, counted. `seen` remembers judged results by hash."""
    outputs = problem.outputs
    before = fingerprint(problem.inputs)
    kept: list[tuple[str, dict[str, Tensor]]] = []
    counts: Counter = Counter()
    first: dict[str, list[int]] = {}
    worst: tuple[float, str, dict[str, Tensor]] | None = None
    differing = big = nonfinite = 0
    for _ in range(runs):
        for x in outputs.values():
            x.fill_(FILLS[fill])
        if load:
            load.start()
        launch(config, problem.inputs, outputs)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        now = {n: bits(x) for n, x in outputs.items()}
        known = next((h for h, k in kept if all(torch.equal(k[n], now[n]) for n in now)), None)
        if known is not None:
            counts[known] += 1
            continue
        name = digest(iter(outputs.items()))
        counts[name] += 1
        big = max(big, sum(int((x.abs() > BIG).sum()) for x in outputs.values()))
        nonfinite = max(nonfinite, sum(int((~torch.isfinite(x)).sum()) for x in outputs.values()))
        if kept:
            base, elements = kept[0][1], 0
            for n, x in now.items():
                where = x != base[n]
                if elements_here := int(where.sum()):
                    elements += elements_here
                    at = int(where.int().argmax())
                    first[n] = min(first.get(n, at), at)
            differing = max(differing, elements)
        score = badness(outputs, problem)
        if worst is None or score > worst[0]:
            worst = (score, name, {n: x.clone() for n, x in outputs.items()})
        if len(kept) < KEEP:
            kept.append((name, {n: x.clone() for n, x in now.items()}))
    after = fingerprint(problem.inputs)
    if changed := [n for n in before if before[n] != after[n]]:
        return {"status": "error", "error": f"the launch changed its inputs: {', '.join(changed)}"}
    if worst[1] not in seen:
        seen[worst[1]] = judge_result(worst[2], problem)
    report = seen[worst[1]]
    return {
        "status": "ok", "distinct": len(counts), "deviating": runs - counts.most_common(1)[0][1],
        "hashes": [h for h, _ in counts.most_common(5)],
        "first_diff": {n: [int(i) for i in torch.unravel_index(torch.tensor(at), outputs[n].shape)] for n, at in first.items()},
        "differing": differing, "big": big, "nonfinite": nonfinite, "outside": sum(r["outside"] for r in report.values()),
        "elements": sum(r["elements"] for r in report.values()), "ok": all(r["ok"] for r in report.values()), "outputs": report,
    }  # fmt: skip


def prepare(order: Mapping, make, spec: Mapping, device: str) -> tuple[Problem, str]:
    """The problem of one input and the hash of what is fed to the kernel."""
    problem = make(order["kernel"], spec, device)
    if bad := [n for n, x in problem.truth.items() if not bool(torch.isfinite(x).all())]:
        raise BadInput(f"input {spec['name']}: the float64 result of {', '.join(bad)} is not finite; sweep finite inputs")
    return problem, digest(tensors_of(problem.inputs))


def failure(error: Exception) -> tuple[dict, bool]:
    """The row of an exception, and whether the device is beyond use after it."""
    text = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").strip()[:500]
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return {"status": "out of memory", "error": text}, False
    if isinstance(error, K3labError):
        return {"status": "error", "error": str(error)}, False
    if ILLEGAL.search(text):
        return {"status": "illegal access", "error": text}, True
    return {"status": "error", "error": text}, bool(FATAL.search(text))


def plain(x: object) -> object:
    """JSON has no NaN: a float that is not finite is None there."""
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x


def end_with_the_sweep() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> None:
    # a kernel's module may print: answers go to the real stdout, everything else to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=end_with_the_sweep, daemon=True).start()

    def say(**answer: object) -> None:
        answers.write(json.dumps(plain(answer)) + "\n")
        answers.flush()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        launch, make = resolve(order["launch"]), resolve(order["problem"])
    except BadInput as error:
        say(refused=str(error))
        return
    load = None
    current, problem, inputs, seen = None, None, "", {}
    for item in order["items"]:
        if order["deadline"] and time.time() > order["deadline"]:
            say(number=item["number"], status="skipped: budget")
            continue
        say(begin=item["number"])
        start = time.perf_counter()
        fatal = False
        try:
            if order["load"] and load is None:
                load = Load(device)
            if current != item["spec"]:
                current, problem = None, None  # let go of the old one before the new one is made
                problem, inputs = prepare(order, make, item["spec"], device)
                current, seen = item["spec"], {}
            row = {"inputs": inputs, **measure(problem, launch, item["config"], item["fill"], order["runs"], load, seen)}
        except Exception as error:  # whatever a launch raises is this row's result
            row, fatal = failure(error)
        if row["status"] != "ok":
            current, problem = None, None
        say(number=item["number"], seconds=round(time.perf_counter() - start, 3), **row)
        if fatal:
            return


if __name__ == "__main__":
    main()
