"""Which autotune winners are known to race: records of k3lab.races.autotune against the rules in rules.toml.

A record names neither target nor Triton version nor specialisation. What a caller does not supply leaves a finding
conditional; a specialisation (pointer_range, async copy) always stays a condition in words.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

import pandas as pd
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from k3lab.errors import BadInput
from k3lab.races.autotune import Reading, Record, read_paths

RULES = Path(__file__).with_name("rules.toml")
COLUMNS = (
    "file", "line", "where", "role", "kernel", "config", "key", "rule", "conditional", "holds_if", "evidence", "citation", "fix", "note",
)  # fmt: skip
_COMPARE = {"<": lambda x, y: x < y, "<=": lambda x, y: x <= y, ">": lambda x, y: x > y, ">=": lambda x, y: x >= y,
            "multiple of": lambda x, y: x % y == 0}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """One known fault; the fields are explained at the head of rules.toml."""

    id: str
    kernel: str
    citation: str
    fix: str
    evidence: str
    target: tuple[str, ...] = ()
    triton: str = ""
    specialisation: str = ""
    unknown: str = ""
    when: dict = field(default_factory=dict)

    def conditions(self, record: Record, kernel: str, target: str, triton: str) -> list[str] | None:
        """What has to hold for the rule to apply and is not known; None if it does not apply."""
        if not re.fullmatch(self.kernel, kernel):
            return None
        open_: list[str] = []
        for name, wanted in self.when.items():
            if record.config.get(name) is None:
                open_.append(f"{name} is {_in_words(wanted)}")
            elif not _meets(record.config[name], wanted):
                return None
        if self.target and target and target not in self.target:
            return None
        if self.target and not target:
            open_.append(f"the target is {' or '.join(self.target)}")
        if self.triton and triton and not SpecifierSet(self.triton).contains(Version(triton).base_version):
            return None
        if self.triton and not triton:
            open_.append(f"Triton is {self.triton}")
        return open_ + ([f"not known: {self.unknown}"] if self.unknown else [])


def load_rules(path: str | Path = RULES) -> list[Rule]:
    """Rules of a TOML file. Raises BadInput naming the file and the rule that is wrong."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as TOML rules: {error}") from None
    entries = data.pop("rule", None)
    if data or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise BadInput(f"{path}: expected [[rule]] tables and nothing else; found {', '.join(data) or 'no [[rule]]'}")
    return [_rule(path, n, e) for n, e in enumerate(entries, 1)]


def _rule(path: str | Path, number: int, entry: dict) -> Rule:
    where = f"{path}, rule {entry.get('id', number)}"
    known = {f.name for f in fields(Rule)}
    lacks = [n for n in ("id", "kernel", "citation", "fix", "evidence") if not isinstance(entry.get(n), str) or not entry[n]]
    if lacks or set(entry) - known:
        extra = ", ".join(sorted(set(entry) - known))
        raise BadInput(f"{where}: " + (f"needs the texts {', '.join(lacks)}" if lacks else f"does not know {extra}"))
    target, when = entry.get("target", []), entry.get("when", {})
    if not isinstance(target, list) or not isinstance(when, dict) or not all(isinstance(t, str) for t in target):
        raise BadInput(f"{where}: target is a list of texts, when a table")
    for name, wanted in when.items():
        if isinstance(wanted, str) and not _comparison(wanted):
            raise BadInput(f"{where}: {name} = {wanted!r}; write a value, a list, '> 1', '>= 64', '< 4', '<= 32' or 'multiple of 4'")
    try:
        re.compile(entry["kernel"])
        SpecifierSet(entry.get("triton", ""))
    except (re.error, InvalidSpecifier) as error:
        raise BadInput(f"{where}: {error}") from None
    return Rule(**{**entry, "target": tuple(known_target(t, where) for t in target), "when": when})


def _comparison(text: str) -> tuple | None:
    m = re.fullmatch(r"(<=|>=|<|>|multiple of)\s*(\d+)", text.strip())
    return (_COMPARE[m[1]], int(m[2])) if m else None


def _meets(value: object, wanted: object) -> bool:
    if isinstance(wanted, str):
        compare, number = _comparison(wanted)
        return isinstance(value, int | float) and compare(value, number)
    return value in wanted if isinstance(wanted, list) else value == wanted


def _in_words(wanted: object) -> str:
    return f"one of {wanted}" if isinstance(wanted, list) else str(wanted)


def known_target(text: str, where: str = "--target") -> str:
    """hip:gfx950 or cuda:90, also given as gfx950:sramecc+:xnack- or sm_90. Raises BadInput."""
    if m := re.fullmatch(r"(?:hip:)?(gfx[0-9a-f]+)(?::.*)?", text):
        return f"hip:{m[1]}"
    if m := re.fullmatch(r"(?:cuda:|sm_?)(\d+)a?", text):
        return f"cuda:{m[1]}"
    raise BadInput(f"{where}: target {text!r} is not of the form hip:gfx950 or cuda:90")


def known_version(text: str, where: str = "--triton") -> str:
    """A version that packaging can read. Raises BadInput."""
    try:
        return str(Version(text))
    except InvalidVersion:
        raise BadInput(f"{where}: {text!r} is not a version number like 3.6.0") from None


def match(records: Iterable[Record], rules: list[Rule], target: str = "", triton: str = "") -> pd.DataFrame:
    """One row per (record, rule that it meets), with COLUMNS. What a record says itself goes before target and triton."""
    rows, seen = [], {}
    for r in records:
        version = r.triton or triton
        if r.triton and not _readable(r.triton):
            version = triton
        here = (r.kernels, tuple(sorted((k, str(v)) for k, v in r.config.items())), r.target or target, version)
        if here not in seen:
            seen[here] = list(_hits(r, rules, r.target or target, version))
        for rule, kernel, open_ in seen[here]:
            conditional, holds_if = bool(open_), "; ".join([*open_, *([rule.specialisation] if rule.specialisation else [])])
            rows.append((r.file, r.line, r.where, r.role, kernel, config_text(r.config), r.key, rule.id, conditional, holds_if,
                         rule.evidence, rule.citation, rule.fix, r.note))  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _hits(r: Record, rules: list[Rule], target: str, triton: str) -> Iterable[tuple[Rule, str, list[str]]]:
    for rule in rules:
        for kernel in r.kernels:
            open_ = rule.conditions(r, kernel, target, triton)
            if open_ is not None:
                mixed = [f"the record is that of {kernel}, not of {' or '.join(k for k in r.kernels if k != kernel)}"]
                yield rule, kernel, (mixed if len(r.kernels) > 1 else []) + open_


def _readable(version: str) -> bool:
    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def config_text(config: dict) -> str:
    """The config without what is unset: BK: 64, num_warps: 4, num_stages: 4."""
    unset = {"num_ctas": 1, "num_buffers_warp_spec": 0, "num_consumer_groups": 0, "reg_dec_producer": 0, "reg_inc_consumer": 0}
    return ", ".join(f"{k}: {v}" for k, v in config.items() if v is not None and unset.get(k) != v)


def all_rules(path: str | Path | None = None) -> list[Rule]:
    """The shipped rules and those of a user's file, which replace shipped ones of the same id."""
    rules = {r.id: r for r in load_rules()}
    if path is not None:
        rules |= {r.id: r for r in load_rules(path)}
    return list(rules.values())


def lint_reading(reading: Reading, target: str | None, triton: str | None, rules: str | Path | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """lint() of what was read already."""
    target = known_target(target) if target else ""
    triton = known_version(triton) if triton else ""
    found = match(reading.records, all_rules(rules), target, triton)
    return found, pd.DataFrame(reading.not_understood, columns=["file", "line", "reason"])


def lint(
    paths: Iterable[str | Path], target: str | None = None, triton: str | None = None, rules: str | Path | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Findings and what could not be understood, for logs, caches and folders of them.

    findings        one row per record and rule (COLUMNS). role "winner" is what runs; "candidate" only took part in the timing
                    and may win another time. conditional: holds_if names what the record and the caller left open
    not_understood  file, line, reason; a line that has nothing to do with autotuning is not in it
    Raises BadInput for a missing path, a folder without records, an unknown target, version or rules file.
    """
    return lint_reading(read_paths(paths), target, triton, rules)
