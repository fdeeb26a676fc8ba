"""Repeated runs on a real GPU: every config N times on identical inputs, each config in a process of its own.

A row of the journal is one (kernel, config, input, fill): N launches into outputs that were filled with NaN or with zeros
first, compared bit by bit with each other and with float64. What happened to a config (a crash, an illegal access, a hang,
out of memory) is a row like any other. A row is appended under a lock, in one write, and flushed to disk, so a sweep that is
killed at any moment goes on where it was, with no finished row lost or doubled. races.verdicts reads the rows.

Nothing here is of one vendor: torch.cuda is CUDA on NVIDIA and HIP on AMD.
"""

import fcntl
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import joblib
from tqdm import tqdm

from k3lab.errors import BadInput

TARGETS = "k3lab.races.sweep_targets"
PLANTED = "k3lab.races.planted"
PLANTED_GRIDS, PLANTED_WARPS = (8, 1024, 16384), (1, 4, 8)
FILLS = ("nan", "zero")
SKIPPED = "skipped: budget"
WORKER = "k3lab.races.sweep_worker"
GRACE = 10.0  # seconds that an item may go on past the deadline
IDENTITY = ("kernel", "launch", "problem", "config", "spec", "fill", "runs", "load", "where")
NEEDS = ("key", "kernel", "config", "input", "fill", "runs", "status")


@dataclass(frozen=True)
class Case:
    """One kernel at one config on one input: what to run, not how often. launch and problem: see races.sweep_targets."""

    kernel: str
    config: Mapping
    input: Mapping  # JSON; "name" is what the rows call it
    launch: str = f"{TARGETS}:launch"
    problem: str = f"{TARGETS}:problem"


def stage_cases(
    kernel: str, inputs: Iterable[Mapping], padding: Sequence[str] = ("undefined",), configs: Sequence[Mapping] | None = None
) -> list[Case]:
    """Every config of a kernel on every input; only the chunk stages have a padding."""
    from k3lab.kda.stages import STAGES
    from k3lab.races.sweep_targets import configs_of

    configs = configs_of(kernel) if configs is None else configs
    pads = [{"padding": p} for p in padding] if kernel in STAGES else [{}]
    return [Case(kernel, {**c, **p}, i) for c in configs for p in pads for i in inputs]


def planted_cases(workgroups: Sequence[int] = PLANTED_GRIDS, num_warps: Sequence[int] = PLANTED_WARPS) -> list[Case]:
    """The faulty copy and its correct twin over a grid ladder across 1,024 workgroups."""
    inputs = [{"name": f"{n} workgroups", "workgroups": n} for n in workgroups]
    return [
        Case(kernel, {"num_warps": w}, i, f"{PLANTED}:launch", f"{PLANTED}:problem")
        for kernel in ("planted_faulty", "planted_correct") for w in num_warps for i in inputs
    ]  # fmt: skip


def here() -> dict[str, str]:
    """What rows are only valid for: the device and the versions that compile and run the kernels."""
    import torch

    from k3lab import __version__
    from k3lab.kda.runtime import interpret_without_gpu
    from k3lab.provenance import device_name

    interpret_without_gpu()  # before triton is imported, which reads the switch
    try:
        import triton

        compiler = triton.__version__
    except ModuleNotFoundError:
        compiler = "none"
    return {"device": device_name(), "torch": torch.__version__, "triton": compiler, "k3lab": __version__}


def run_sweep(
    cases: Iterable[Case], runs: int = 50, journal: str | Path | None = None, fills: Sequence[str] = FILLS, jobs: int = 1,
    timeout: float = 120.0, load: bool = False, deadline: float | None = None, progress: bool = True,
    where: Mapping[str, str] | None = None, worker: str = WORKER,
) -> list[dict]:  # fmt: skip
    """Run what the journal lacks and return the rows of all cases, in order.

    runs      launches per row; a result never seen to differ in N of them differs at a rate below 1 - 0.05^(1/N) (95%)
    journal   JSONL file to resume from and append to; None keeps nothing
    jobs      configs at a time, through joblib (threads here, each waiting for its process; or what joblib.parallel_config names)
    timeout   seconds that one row may take, compilation included, before it is a "hang"
    load      matrix products and copies run beside every launch
    deadline  time.time() after which no row is begun: what is left becomes rows "skipped: budget", run on the next resume
    where     device and versions, part of a row's identity; here() by default
    worker    the module or file of the process that runs a config (see races.sweep_worker for what it reads and answers)

    Raises BadInput if a target cannot be loaded, an input is no JSON, or the journal is not one.
    """
    if runs < 1:
        raise BadInput(f"runs is {runs}; at least 1 is needed")
    if unknown := set(fills) - set(FILLS):
        raise BadInput(f"fill {', '.join(sorted(unknown))} is not one of {', '.join(FILLS)}")
    where = dict(here() if where is None else where)
    journal = None if journal is None else Path(journal)
    if journal is not None:
        journal.parent.mkdir(parents=True, exist_ok=True)
    have = {r["key"] for r in read_journal(journal) if r["status"] != SKIPPED} if journal is not None and journal.exists() else set()
    wanted: dict[str, dict] = {}
    for c in cases:
        for fill in fills:
            row = _identity(c, fill, runs, load, where)
            wanted.setdefault(row["key"], row)
    groups: dict[str, list[dict]] = {}
    for key, row in wanted.items():
        if key not in have:
            # one process for a config at every padding, so that an input is made once for all of them
            config = {k: v for k, v in row["config"].items() if k != "padding"}
            groups.setdefault(json.dumps([row["kernel"], row["launch"], row["problem"], config], sort_keys=True), []).append(row)
    names = list(dict.fromkeys(row["input"] for row in wanted.values()))
    path = None if journal is None else str(journal)
    options = {"runs": runs, "load": load, "timeout": timeout, "deadline": deadline, "worker": worker}
    for rows in groups.values():
        rows.sort(key=lambda r: names.index(r["input"]))
    tasks = [joblib.delayed(run_config)(rows, path, options) for rows in groups.values()]
    done = joblib.Parallel(n_jobs=jobs, prefer="threads", return_as="generator_unordered")(tasks)
    finished: dict[str, dict] = {}
    for rows in tqdm(done, total=len(tasks), desc="sweep", disable=not progress, ascii=True):
        for row in rows:
            finished[row["key"]] = row
            if journal is not None:
                append_row(journal, row)  # a worker on another machine may not share the folder
    if journal is not None:
        finished |= {r["key"]: r for r in read_journal(journal) if r["key"] in wanted}
    return [finished[key] for key in wanted]


def _identity(c: Case, fill: str, runs: int, load: bool, where: Mapping) -> dict:
    """The part of a row that is known before it runs, and its key."""
    try:
        spec, config = (json.loads(json.dumps(dict(x))) for x in (c.input, c.config))
    except TypeError as error:
        raise BadInput(f"{c.kernel}: config and input of a case must be JSON: {error}") from None
    if not isinstance(spec.get("name"), str):
        raise BadInput(f"{c.kernel}: input {spec} has no name")
    row = {"kernel": c.kernel, "launch": c.launch, "problem": c.problem, "config": config, "input": spec["name"], "spec": spec,
           "fill": fill, "runs": runs, "load": load, "where": dict(where)}  # fmt: skip
    text = json.dumps({k: _known(row)[k] for k in IDENTITY}, sort_keys=True)
    return {"key": hashlib.sha256(text.encode()).hexdigest()[:24], **row}


def _known(row: Mapping) -> dict:
    """The row as the journal keeps it: a capture is known by its content, wherever it lies."""
    spec = row["spec"]
    return {**row, "spec": {k: v for k, v in spec.items() if k != "path" or "sha256" not in spec}}


def run_config(rows: list[dict], journal: str | None, options: Mapping) -> list[dict]:
    """Run one config on its inputs in worker processes, one after the other; append each row as it comes. A pure task for joblib."""
    out: list[dict] = []

    def finish(row: dict, answer: Mapping) -> None:
        out.append({**_known(row), **answer})
        if journal is not None:
            append_row(Path(journal), out[-1])

    left = list(rows)
    while left:
        if options["deadline"] and time.time() > options["deadline"]:
            for row in left:
                finish(row, {"status": SKIPPED})
            break
        # every process finishes at least one row, so this ends
        left = _one_process(left, options, finish)
    return out


def _one_process(rows: list[dict], options: Mapping, finish) -> list[dict]:
    """Start a worker on the rows; return those it did not get to. The row it died or hung in is finished with that status."""
    first = rows[0]
    order = {k: first[k] for k in ("launch", "problem", "kernel")} | {k: options[k] for k in ("runs", "load", "deadline")}
    order["items"] = [{"number": n, "config": r["config"], "spec": r["spec"], "fill": r["fill"]} for n, r in enumerate(rows)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])}
    if first["where"].get("device") not in (None, "cpu"):
        env.pop("TRITON_INTERPRET", None)
    worker = options["worker"]
    command = [sys.executable, *([worker] if worker.endswith(".py") else ["-m", worker])]
    done: set[int] = set()
    current, refused, ended = 0, None, None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        lines: queue.Queue = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()  # and left open: a worker ends when it closes
        except BrokenPipeError:
            lines.put(None)  # it died at once; the exit status below says how
        try:
            while True:
                wait = options["timeout"]
                if options["deadline"]:
                    wait = min(wait, max(0.0, options["deadline"] + GRACE - time.time()))
                try:
                    line = lines.get(timeout=wait)
                except queue.Empty:
                    over = options["deadline"] and time.time() >= options["deadline"] + GRACE
                    ended = (SKIPPED, "") if over else ("hang", f"no answer within {options['timeout']:g} s; the process was killed")
                    break
                if line is None:
                    process.wait(GRACE)  # its own exit status, not that of a kill
                    break
                answer = _answer(line)
                if "begin" in answer:
                    current = answer["begin"]
                elif "refused" in answer:
                    refused = answer["refused"]
                elif answer:
                    n = answer.pop("number")
                    done.add(n)
                    finish(rows[n], answer)
        except subprocess.TimeoutExpired:
            ended = ("crash", "the process closed its output and did not end; it was killed")
        finally:
            process.kill()
            process.stdin.close()
            status = process.wait()
            reader.join()
            process.stdout.close()
        errors.seek(0)
        said = re.sub(r"\s+", " ", errors.read()[-4000:]).strip()
    if refused:
        raise BadInput(refused)
    left = [n for n in range(len(rows)) if n not in done]
    if not left:
        return []
    culprit = current if current in left else left[0]
    if ended is None and done and current not in left:
        return [rows[n] for n in left]  # it left of its own accord after a row that spoiled the device
    if ended is None:
        died = f"signal {-status}" if status < 0 else f"exit status {status}"
        kind = "illegal access" if "memory access fault" in said.lower() else "crash"
        ended = (kind, f"the process ended with {died}: {said[-300:] or 'no message'}")
    finish(rows[culprit], {"status": ended[0], "error": ended[1]})
    return [rows[n] for n in left if n != culprit]


def _read(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _answer(line: str) -> dict:
    """One line of a worker; a line that its end cut short says nothing, and the exit status then does."""
    try:
        return json.loads(line)
    except ValueError:
        return {}


def append_row(journal: Path, row: Mapping) -> bool:
    """Append a row unless the journal has it finished; True if it was written. Safe against other processes and a torn last line."""
    with open(journal, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            file.truncate(len(whole))
        for line in whole.splitlines():
            old = json.loads(line)
            if old["key"] == row["key"] and (old["status"] != SKIPPED or row["status"] == SKIPPED):
                return False
        file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return True


def read_journal(path: str | Path) -> list[dict]:
    """Rows of a journal, the last line left out where a kill tore it, skipped rows where they were run later.

    Raises BadInput for a file that cannot be read or a line that is no row of a sweep, by number.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as a sweep journal: {error}") from None
    rows: dict[str, dict] = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}, line {number}: not JSON: {error}") from None
        lacks = [k for k in NEEDS if k not in row] if isinstance(row, dict) else ["everything"]
        if lacks:
            raise BadInput(f"{path}, line {number}: not a row of a sweep; it lacks {', '.join(lacks)}")
        if wrong := [k for k in NEEDS if not isinstance(row[k], {"config": dict, "runs": int}.get(k, str))]:
            raise BadInput(f"{path}, line {number}: not a row of a sweep: {wrong[0]} is {str(row[wrong[0]])[:80]!r}")
        if row["key"] in rows and rows[row["key"]]["status"] != SKIPPED:
            raise BadInput(f"{path}, line {number}: the row of line key {row['key']} is there twice")
        rows[row["key"]] = row
    return list(rows.values())
