"""The matrix of verdicts: Triton version x target x pointer_range x async copy x padding x config x input, as one journal.

A row is one (build, input). Rows are appended to a JSONL file as they come, so a run that was killed goes on where it was;
the tasks are pure functions run through joblib (local processes, or whatever joblib.parallel_config names).
"""

import itertools
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import joblib
import pandas as pd
from tqdm import tqdm

from k3lab.errors import BadInput, K3labError
from k3lab.races.compiled import RECOMPUTE_W_U, Build, Compiled, compile_builds
from k3lab.races.kernel import Input, copy_path, standard_input
from k3lab.races.lds import KINDS, Report, analyse, run, sufficient_waits
from k3lab.races.toolchain import INSTALLED

INPUTS = ("full", "length1", "middle", "tail")
CONFIGS = tuple((w, s) for w in (2, 4, 8) for s in (2, 3, 4))
ASYNC = {True: "on", False: "off", None: "default"}
VERDICTS = ("ordered", "uninitialised", "race", "error")  # the position is the level of the heat-map
KEYS = ("kernel", "triton", "target", "pointer_range", "async", "padding", "warps", "stages", "input")
TYPES = {"pointer_range": bool, "warps": int, "stages": int}  # of KEYS; the others are texts


def matrix_builds(
    toolchains: Sequence[str],
    targets: Sequence[str] = ("hip:gfx950", "hip:gfx942"),
    pointer_range: Sequence[bool] = (True, False),
    async_copy: Sequence[bool | None] = (True, False),
    padding: Sequence[str] = ("undefined", "zero"),
    configs: Sequence[tuple[int, int]] = CONFIGS,
    kernel: str = RECOMPUTE_W_U,
) -> list[Build]:
    """Every build of the matrix, configs innermost. padding is the kernel's PADDING constexpr; an empty one leaves it out."""
    return [
        Build(kernel, w, s, target, {"PADDING": pad} if pad else {}, pointer_range=pr, async_copy=copies, toolchain=chain)
        for chain, target, copies, pr, pad in itertools.product(toolchains, targets, async_copy, pointer_range, padding)
        for w, s in configs
    ]


def rows_of(compiled: Compiled, inputs: Sequence[Input | str] = INPUTS, detail: bool = False) -> list[dict]:
    """One row per input: what was built, the verdict, counts by kind, the waits that suffice, the first hazard in words.

    detail=True adds every finding as a dict.
    """
    b = compiled.build
    base = {
        "kernel": b.kernel.rpartition(":")[2], "triton": compiled.triton, "target": b.target, "pointer_range": b.pointer_range,
        "async": ASYNC[b.async_copy], "padding": dict(b.signature).get("PADDING", ""), "warps": b.num_warps, "stages": b.num_stages,
    }  # fmt: skip
    kernel = None
    try:
        kernel = compiled.kernel()
        reports = analyse(kernel, list(inputs))
        base["padding"] = json.loads(compiled.text("json"))["constexpr"].get("PADDING", "")
    except K3labError as error:
        reports = [Report(i if isinstance(i, str) else i.name, "error", error=compiled.error or str(error)) for i in inputs]
    rows = []
    for given, r in zip(inputs, reports, strict=True):
        row = {**base, "input": r.input, "verdict": r.verdict, "path": copy_path(kernel.program) if kernel else ""}
        row |= {k.replace(" ", "_"): r.count(k) for k in KINDS if r.count(k)}
        if r.verdict == "race":
            fixes = sufficient_waits(run(kernel, standard_input(kernel, given) if isinstance(given, str) else given), r.findings)
            row["waits"] = [f.row() for f in fixes]
        hazards = [f.message for f in r.findings if f.is_hazard]
        if hazards:
            row["first_hazard"] = hazards[0]
        if r.error:
            row["error"] = r.error
        if detail:
            row["findings"] = [f.row() for f in r.findings]
        rows.append(row)
    return rows


def _task(builds: list[Build], inputs: Sequence[str]) -> list[dict]:
    return [row for c in compile_builds(builds) for row in rows_of(c, inputs)]


def run_matrix(
    builds: Iterable[Build], journal: str | Path, inputs: Sequence[str] = INPUTS, jobs: int = 2, progress: bool = True
) -> pd.DataFrame:
    """Fill the journal with every (build, input) that it lacks and return all its rows."""
    journal = Path(journal)
    have = {_key(r) for r in read_journal(journal)} if journal.exists() else set()
    if journal.exists():
        _cut_torn_line(journal)
    groups: dict = {}
    for b in builds:
        if any(_build_key(b, i) not in have for i in inputs):
            groups.setdefault(replace(b, num_warps=0, num_stages=0, signature=tuple(sorted(b.signature.items()))), []).append(b)
    journal.parent.mkdir(parents=True, exist_ok=True)
    tasks = (joblib.delayed(_task)(g, inputs) for g in groups.values())
    done = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(tasks)
    with open(journal, "a") as file:
        for rows in tqdm(done, total=len(groups), desc="race matrix", disable=not progress, ascii=True):
            for row in rows:
                if _key(row) not in have:
                    file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return pd.DataFrame(read_journal(journal))


def _build_key(b: Build, given: str) -> tuple:
    triton = version("triton") if b.toolchain == INSTALLED else b.toolchain
    padding = dict(b.signature).get("PADDING", "")
    name = b.kernel.rpartition(":")[2]
    return (name, triton, b.target, b.pointer_range, ASYNC[b.async_copy], padding, b.num_warps, b.num_stages, given)


def _key(row: dict) -> tuple:
    return tuple(row[k] for k in KEYS)


def read_journal(path: str | Path) -> list[dict]:
    """Rows of a journal, without a last line that a killed run left half-written; any other bad line is BadInput, by number."""
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as a journal: {error}") from None
    whole, _, torn = text.rpartition("\n")
    return list(_rows(path, whole if torn.startswith("{") else text))


def _cut_torn_line(journal: Path) -> None:
    """Make a journal that could be read end where its last whole line ends, so that rows can be appended."""
    data = journal.read_bytes()
    os.truncate(journal, data.rfind(b"\n") + 1)


def _rows(path: Path, text: str) -> Iterator[dict]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}, line {number}: not JSON: {error}") from None
        lacks = {*KEYS, "verdict"} - set(row) if isinstance(row, dict) else {"a JSON object"}
        if lacks:
            raise BadInput(f"{path}, line {number}: not a row of a race matrix; it lacks {', '.join(sorted(lacks))}")
        wrong = [k for k in KEYS if type(row[k]) is not TYPES.get(k, str)] + ["verdict"] * (row["verdict"] not in VERDICTS)
        if wrong:
            raise BadInput(f"{path}, line {number}: not a row of a race matrix: {wrong[0]} is {reprlib.repr(row[wrong[0]])}")
        yield row


def verdict_table(
    rows: pd.DataFrame, by: Sequence[str] = ("triton", "target", "async", "pointer_range", "padding", "input")
) -> pd.DataFrame:
    """The heat-map's frame: a line per `by`, a column per config (w2s2 … w8s4), each cell the worst verdict among its rows."""
    if rows.empty:
        raise BadInput("no rows: the journal is empty or the selection matches nothing")
    level = rows["verdict"].map({v: n for n, v in enumerate(VERDICTS)})
    config = [f"w{w}s{s}" for w, s in zip(rows["warps"], rows["stages"], strict=True)]
    worst = rows.assign(level=level, config=config).pivot_table(index=list(by), columns="config", values="level", aggfunc="max", sort=False)
    order = sorted(worst.columns, key=lambda c: [int(x) for x in c[1:].split("s")])
    return worst[order].map(lambda n: VERDICTS[int(n)], na_action="ignore")
