"""Autotuning records that users have: what TRITON_PRINT_AUTOTUNING prints, Triton's *.autotune.json, FLA's config cache.

Printed forms, each line possibly behind a prefix (rank, process, time), ranks interleaved:
  3.0-3.3  Triton autotuning for function NAME finished after 3.21s; best config selected: num_warps: 4, …;
  3.3-     Autotuning kernel NAME with config num_warps: 2, …        (a candidate; on failure `Autotuning failed with …` follows)
  3.4-3.9  four lines: Triton autotuning for function NAME, / with key as (…), / finished after 3.21s, / best config selected: …;
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from k3lab.errors import BadInput

LOG_NAME = re.compile(r"(\.(log|txt|out|err)([.-]?\d+)?|^[^.]+)$", re.I)
NOT_LOGS = (".so", ".hsaco", ".cubin")
GPU_TARGETS = (
    (r"MI35\d", "hip:gfx950"), (r"MI3[02]\d", "hip:gfx942"), (r"(^|_)G?B300|(^|_)B300", "cuda:103"), (r"(^|_)G?B200", "cuda:100"),
    (r"(^|_)G?H(20|100|200|800)(_|$)", "cuda:90"),
)  # fmt: skip

_ANY = re.compile(r"utotuning (?:for|kernel|failed)|with key as|finished after|best config selected")
_ONE_LINE = re.compile(r"Triton autotuning for function (\S+) finished after [\d.]+s; best config selected: (.*?);?$")
_HEAD = re.compile(r"Triton autotuning for function ([^\s,]+),?$")
_KEY = re.compile(r"with key as (.*?),?$")
_TIME = re.compile(r"finished after [\d.]+s,?$")
_BEST = re.compile(r"best config selected: (.*?);?$")
_CANDIDATE = re.compile(r"Autotuning kernel (\S+) with config (.*)$")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# what differs between the lines of one process: dates, times, counters after a decimal point
_CLOCK = re.compile(r"\d{4}-\d\d-\d\d|\d\d-\d\d (?=\d\d:)|\d{1,2}:\d\d(:\d\d)?([.,]\d+)?|\d{9,}([.,]\d+)?")


@dataclass(frozen=True)
class Record:
    """One config of one kernel. role is "winner" or "candidate"; where is what form it was read from.

    kernels has several names if ranks were interleaved so that the config may belong to any of them.
    """

    file: str
    line: int
    kernels: tuple[str, ...]
    config: dict
    role: str = "winner"
    where: str = "log"
    key: str = ""
    target: str = ""
    triton: str = ""
    note: str = ""


@dataclass
class Reading:
    """Everything read from some paths. not_understood: (file, line, reason)."""

    records: list[Record] = field(default_factory=list)
    not_understood: list[tuple[str, int, str]] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)  # files, foreign lines, failed candidates

    def refuse(self, file: str, line: int, reason: str) -> None:
        self.not_understood.append((file, line, reason))


def read_paths(paths: Iterable[str | Path]) -> Reading:
    """Read files and walk folders. Raises BadInput for a path that is missing and for a folder without any such file."""
    reading = Reading()
    for path in map(Path, paths):
        if path.is_dir():
            files = [p for p in sorted(path.rglob("*")) if p.is_file() and (p.suffix == ".json" or _is_log(p))]
            before = len(reading.records) + len(reading.not_understood)
            for p in files:
                _read_file(p, reading, named=False)
            if len(reading.records) + len(reading.not_understood) == before:
                raise BadInput(
                    f"{path}: no autotuning record in {len(files)} log and JSON files; Triton writes *.autotune.json with "
                    f"TRITON_CACHE_AUTOTUNING=1, and prints winners with TRITON_PRINT_AUTOTUNING=1"
                )
        elif path.is_file():
            _read_file(path, reading, named=True)
        else:
            raise BadInput(f"{path}: {'is a pipe or a device, expected a file or a folder' if path.exists() else 'no such file or folder'}")
    return reading


def _is_log(path: Path) -> bool:
    return bool(LOG_NAME.search(path.name)) and path.suffix not in NOT_LOGS


def _read_file(path: Path, reading: Reading, named: bool) -> None:
    """named: the user gave this very file, so that finding nothing in it is worth a row."""
    try:
        with open(path, "rb") as f:
            head = f.read(4096)
    except OSError as error:
        reading.refuse(str(path), 0, f"cannot be read: {error.strerror}")
        return
    if b"\0" in head:
        if named:
            reading.refuse(str(path), 0, "binary, not a log")
        return
    reading.counts["files"] += 1
    if path.suffix == ".json":
        _read_json(path, reading, named)
    else:
        before = len(reading.records), len(reading.not_understood)
        with open(path, encoding="utf-8", errors="replace") as f:
            lines = read_log(str(path), f, reading)
        if named and (len(reading.records), len(reading.not_understood)) == before:
            what = f"no autotuning record in {lines} lines; was TRITON_PRINT_AUTOTUNING=1 set?" if lines else "the file is empty"
            reading.refuse(str(path), 0, what)


# ---------------------------------------------------------------- printed output


@dataclass(slots=True)
class _Pending:
    """A four-line record in the making."""

    kernel: str
    line: int
    key: str = ""
    timed: bool = False


def read_log(file: str, lines: Iterable[str], reading: Reading) -> int:
    """Add the records of a log; return the number of lines. Lines that are none of the forms are counted as foreign."""
    pending: dict[str, list[_Pending]] = {}
    number = foreign = 0
    for number, raw in enumerate(lines, 1):
        if not _ANY.search(raw):
            foreign += 1
            continue
        line = _COLOR.sub("", raw).rstrip()  # a \s* before $ would try every run of spaces again and again
        if m := _ONE_LINE.search(line):
            _add(reading, file, number, (m[1],), m[2])
        elif m := _CANDIDATE.search(line):
            _add(reading, file, number, (m[1],), m[2], role="candidate")
        elif m := _HEAD.search(line):
            pending.setdefault(_prefix(line, m), []).append(_Pending(m[1], number))
        elif m := _BEST.search(line):
            _close(reading, file, number, pending, _prefix(line, m), m[1])
        elif m := _KEY.search(line):
            if (p := _waiting(pending, _prefix(line, m), lambda p: not p.key)) is not None:
                p.key = m[1]
            else:
                foreign += 1
        elif m := _TIME.search(line):
            if (p := _waiting(pending, _prefix(line, m), lambda p: not p.timed)) is not None:
                p.timed = True
            else:
                foreign += 1  # other programs print "finished after 3s" as well
        elif "Autotuning failed with" in line:
            reading.counts["failed candidates"] += 1
        elif "Triton autotuning for function" in line or "Autotuning kernel" in line:
            reading.refuse(file, number, f"begins like an autotuning record and goes on otherwise: {_short(line)}")
        else:
            foreign += 1
    for p in (p for ps in pending.values() for p in ps):
        reading.refuse(file, p.line, f"the record of {p.kernel} has no line 'best config selected'")
    reading.counts["foreign lines"] += foreign
    return number


def _prefix(line: str, m: re.Match) -> str:
    return _CLOCK.sub("", line[: m.start()]).strip()


def _queue(pending: dict, prefix: str) -> list | None:
    """The open records of a process; a line without a known prefix goes to the one process that has any."""
    if pending.get(prefix):
        return pending[prefix]
    others = [q for q in pending.values() if q]
    return others[0] if len(others) == 1 and not prefix else None


def _waiting(pending: dict, prefix: str, lacks) -> _Pending | None:
    return next((p for p in _queue(pending, prefix) or () if lacks(p)), None)


def _close(reading: Reading, file: str, number: int, pending: dict, prefix: str, config: str) -> None:
    queue = _queue(pending, prefix)
    if not queue:
        reading.refuse(file, number, "'best config selected' without 'Triton autotuning for function' before it")
        return
    names = tuple(dict.fromkeys(p.kernel for p in queue))
    done = queue.pop(0)
    if len(names) == 1:
        # several ranks may tune one kernel at once: then the key is not certain, the kernel is
        _add(reading, file, number, (done.kernel,), config, key=done.key if not queue else "")
        return
    reading.refuse(file, number, f"the config belongs to one of {', '.join(names)}: ranks are interleaved without a prefix to tell them")
    _add(reading, file, number, names, config)


def _add(reading: Reading, file: str, number: int, kernels: tuple, text: str, **more) -> None:
    config = parse_config(text)
    if config is None:
        reading.refuse(file, number, f"not a config with num_warps and num_stages: {_short(text)}")
    else:
        reading.records.append(Record(file, number, kernels, config, **more))


@lru_cache(4096)
def parse_config(text: str) -> dict | None:
    """str(triton.Config) as a dict; None if it is not one."""
    config: dict = {}
    for part in re.split(r", (?=[A-Za-z_]\w*: )", text.strip()):
        m = re.fullmatch(r"([A-Za-z_]\w*): (.+)", part)
        if not m:
            return None
        config[m[1]] = _value(m[2])
    return config if all(type(config.get(n)) is int for n in ("num_warps", "num_stages")) else None


def _value(text: str) -> object:
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if re.fullmatch(r"-?\d{1,40}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+\.\d*(e[-+]?\d+)?", text) else text


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else text[:97] + "..."


# ---------------------------------------------------------------- caches


def _read_json(path: Path, reading: Reading, named: bool) -> None:
    tuned = path.name.endswith(".autotune.json")
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        data = json.loads(text)  # Python reads Infinity, which is not strict JSON and which Triton writes for failed configs
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 0)
        reading.refuse(str(path), line, f"not JSON: {error}")
        return
    table = isinstance(data, dict)
    if tuned or (table and "configs_timings" in data):
        _read_triton_cache(path, data, reading)
    elif table and ({"autotune_entries", "default_config"} & set(data) or {"kwargs", "num_warps", "num_stages"} <= set(data)):
        _read_fla_cache(path, text, data, reading)
    elif named:
        reading.refuse(str(path), 1, "JSON, but neither Triton's autotune cache (configs_timings) nor FLA's (autotune_entries)")


def _read_triton_cache(path: Path, data: object, reading: Reading) -> None:
    kernel = path.name.removesuffix(".json").removesuffix(".autotune")
    file = str(path)
    pairs = data.get("configs_timings") if isinstance(data, dict) else None
    if not isinstance(pairs, list) or not pairs:
        reading.refuse(file, 1, "has no list configs_timings with a config in it")
        return
    timed = []
    for n, pair in enumerate(pairs):
        config = _flat(pair[0]) if isinstance(pair, list) and len(pair) == 2 else None
        timings = _timings(pair[1]) if config else None
        if timings is None:
            reading.refuse(file, 1, f"configs_timings[{n}] is not a pair of a config and its timings: {_short(json.dumps(pair))}")
        else:
            timed.append((timings, config))
    key = json.dumps(data.get("key"))
    finite = [t for t, _ in timed if math.isfinite(t[0])]
    if timed and not finite:
        reading.refuse(file, 1, "every config failed (Infinity): there is no winner")
    won = False
    for timings, config in timed:
        wins = bool(finite) and not won and timings == min(finite)
        won |= wins
        role = "winner" if wins else "candidate"
        if math.isfinite(timings[0]):
            reading.records.append(Record(file, 1, (kernel,), config, role, "Triton cache", key))
        else:
            reading.counts["failed candidates"] += 1


def _timings(x: object) -> list[float] | None:
    x = x if isinstance(x, list) else [x]
    good = x and all(isinstance(t, int | float) and not isinstance(t, bool) and not math.isnan(t) for t in x)
    return [float(t) for t in x] if good else None


def _flat(config: object) -> dict | None:
    """{"kwargs": {...}, "num_warps": 4, ...} as one level."""
    if not isinstance(config, dict) or not isinstance(config.get("kwargs", {}), dict):
        return None
    flat = {**config.get("kwargs", {}), **{k: v for k, v in config.items() if k != "kwargs"}}
    return flat if all(type(flat.get(n)) is int for n in ("num_warps", "num_stages")) else None


def _read_fla_cache(path: Path, text: str, data: dict, reading: Reading) -> None:
    file = str(path)
    kernel = data.get("kernel_name") or path.stem
    version = data.get("triton_version") or ""
    more = {"where": "FLA cache", "target": target_of_gpu(path.parent.name), "triton": version if isinstance(version, str) else ""}
    for name, key, config, note in _fla_entries(data):
        found = _flat(config)
        line = text[: max(0, text.find(f'"{name}"'))].count("\n") + 1
        if found is None:
            reading.refuse(file, line, f"{name} of {kernel} is not a config with num_warps and num_stages")
        else:
            reading.records.append(Record(file, line, (str(kernel),), found, key=key, note=note, **more))


def _fla_entries(data: dict) -> Iterator[tuple[str, str, object, str]]:
    fuzzy = "FLA_CACHE_MODE fuzzy and full use it for shapes that it was not tuned for"
    entries = data.get("autotune_entries")
    if entries is not None and not isinstance(entries, dict):
        yield "autotune_entries", "", None, ""
        return
    for name, entry in (entries or {}).items():
        entry = entry if isinstance(entry, dict) else {}
        yield name, json.dumps(entry.get("autotune_key")), entry.get("config"), fuzzy
    if data.get("default_config") is not None:
        yield "default_config", "", data["default_config"], "FLA_CACHE_MODE full, default and always use it for every shape"
    if not {"autotune_entries", "default_config"} & set(data):
        yield "num_warps", "", data, "FLA_CACHE_MODE full uses it for every shape"


def target_of_gpu(folder: str) -> str:
    """Target of the GPU that an FLA cache folder is named after (AMD_Instinct_MI355X); "" if it names none that is known."""
    return next((target for pattern, target in GPU_TARGETS if re.search(pattern, folder)), "")
