"""From verdict to fix: the configs to keep, as text to paste into a kernel, and a script that shows the fault with Triton alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from k3lab.errors import BadInput

REPRO = Path(__file__).with_name("repro.py")
BASIS = ("triton", "target", "async", "pointer_range", "padding")
NEEDED = ("kernel", *BASIS, "warps", "stages", "input", "verdict")
PADDING_OTHER = {"undefined": "None", "": "None", "zero": "0.0", "nan": 'float("nan")'}


@dataclass(frozen=True)
class PruneList:
    """What to keep of the configs (num_warps, num_stages) of one kernel on one target, and what that rests on.

    dropped    config to the reason, such as "race at full, tail"
    notes      what the list does not mend
    configs    text of a `configs=[…],` argument for triton.autotune
    early_config_prune   text of a function for prune_configs_by={"early_config_prune": …}
    """

    kernel: str
    target: str
    basis: tuple[str, ...]
    inputs: tuple[str, ...]
    kept: tuple[tuple[int, int], ...]
    dropped: dict
    notes: tuple[str, ...]
    configs: str
    early_config_prune: str


def prune_list(rows: pd.DataFrame | Iterable[Mapping]) -> PruneList:
    """Keep the configs whose every row is free of races; rows as races.matrix makes them, for one kernel and one target.

    Rows may span several Triton versions and specialisations: then a config must hold in all of them. A config with an error,
    or without a row that another config has, is dropped: nothing is known of it there. A verdict of "uninitialised" is no
    race and no config cures it, so it is noted. Raises BadInput if rows are lacking, mixed, or no config is left.
    """
    frame = pd.DataFrame(rows)
    lacks = [c for c in NEEDED if c not in frame.columns]
    if lacks or frame.empty:
        raise BadInput(f"prune list: the rows lack {', '.join(lacks)}" if lacks else "prune list: there are no rows")
    for column in ("kernel", "target"):
        if frame[column].nunique() != 1:
            found = ", ".join(map(str, frame[column].unique()))
            raise BadInput(f"prune list: the rows are of several {column}s ({found}); select one, a list holds for one {column}")
    places = frame[[*BASIS, "input"]].drop_duplicates()
    kept, dropped = [], {}
    for (warps, stages), part in frame.groupby(["warps", "stages"]):
        config = (int(warps), int(stages))
        reasons = [
            f"{v} at {', '.join(part[part['verdict'] == v]['input'].unique())}" for v in ("race", "error") if v in set(part["verdict"])
        ]
        if len(part[[*BASIS, "input"]].drop_duplicates()) < len(places):
            reasons.append(f"analysed at {len(part)} of {len(places)} combinations")
        if reasons:
            dropped[config] = "; ".join(reasons)
        else:
            kept.append(config)
    kernel, target = frame["kernel"].iloc[0], frame["target"].iloc[0]
    if not kept:
        raise BadInput(f"prune list: no config of {kernel} on {target} is left; the first goes for: {next(iter(dropped.values()))}")
    basis = tuple(_basis_words(b) for b in frame[list(BASIS)].drop_duplicates().to_dict("records"))
    inputs = tuple(frame["input"].unique())
    stale = [r for r in frame.to_dict("records") if r["verdict"] == "uninitialised" and (r["warps"], r["stages"]) in kept]
    notes = ()
    if stale:
        where = ", ".join(dict.fromkeys(r["input"] for r in stale))
        notes = (f"configs that are kept still read uninitialised LDS at {where}: give the masked loads other=0.0",)
    head = _comment(kernel, target, basis, inputs, kept, dropped, notes)
    versions = tuple(frame["triton"].unique())
    return PruneList(kernel, target, basis, inputs, tuple(kept), dropped, notes, _configs_text(head, kept),
                     _prune_text(head, kernel, target, kept, versions))  # fmt: skip


def _basis_words(b: Mapping) -> str:
    padding = f", padding {b['padding']}" if b["padding"] else ""
    return f"Triton {b['triton']}, async copy {b['async']}, pointer_range {'on' if b['pointer_range'] else 'off'}{padding}"


def _comment(kernel: str, target: str, basis: tuple, inputs: tuple, kept: list, dropped: dict, notes: tuple) -> list[str]:
    lines = [
        f"{kernel} on {target}: {len(kept)} of {len(kept) + len(dropped)} configs kept, by analysis of compiled code (no card was used).",
        *(f"Rests on: {b}" for b in basis),
        f"Inputs: {', '.join(inputs)}. Any other version, specialisation or shape: analyse again.",
    ]
    lines += [f"Dropped: num_warps={w}, num_stages={s}: {why}" for (w, s), why in dropped.items()]
    return lines + [f"Note: {n}" for n in notes]


def _configs_text(head: list[str], kept: list[tuple[int, int]]) -> str:
    configs = [f"    triton.Config({{}}, num_warps={w}, num_stages={s})," for w, s in kept]
    return "\n".join([*(f"# {x}" for x in head), "configs=[", *configs, "],", ""])


def _prune_text(head: list[str], kernel: str, target: str, kept: list, versions: tuple) -> str:
    doc, ordered = "\n    ".join(head), ", ".join(map(str, kept))
    return f'''import warnings

import triton


def keep_ordered_configs(configs, named_args, **kwargs):
    """prune_configs_by={{"early_config_prune": keep_ordered_configs}} for {kernel}, on {target} alone.

    {doc}
    """
    ordered = {{{ordered}}}
    analysed = {versions!r}
    if triton.__version__.split("+")[0] not in analysed:
        warnings.warn(f"{kernel}: configs were analysed for Triton {{analysed}}, this is {{triton.__version__}}", stacklevel=2)
    left = [c for c in configs if (c.num_warps, c.num_stages) in ordered]
    if not left:
        raise ValueError("{kernel}: none of the configs given was found ordered; see the docstring for those that were")
    return left
'''


def repro_script(row: Mapping) -> str:
    """A script of its own (Triton and nothing else) that compiles the u loop of recompute_w_u as `row` was compiled.

    It prints the copies in TTGIR and in the assembly and the wait before each group of LDS reads; exit status 1 is a race.
    row: a row of races.matrix, or any mapping with warps, stages, target, pointer_range, async and padding.
    Raises BadInput for another kernel, a target that is not AMD's or num_warps outside 2, 4, 8.
    """
    kernel, backend = str(row.get("kernel", "")), str(row["target"]).partition(":")
    if "recompute_w_u" not in kernel:
        raise BadInput(f"repro: the script holds the u loop of recompute_w_u; it shows nothing of {kernel or 'a kernel without a name'}")
    if backend[0] != "hip" or row["warps"] not in (2, 4, 8) or row["padding"] not in PADDING_OTHER:
        given = f"target {row['target']}, warps {row['warps']}, padding {row['padding']}"
        raise BadInput(f"repro: written for hip targets, 2, 4 or 8 warps and padding undefined, zero or nan; got {given}")
    copies, other = {"on": '"1"', "off": '"0"', "default": "None"}[row["async"]], PADDING_OTHER[row["padding"]]
    values = f'{int(row["warps"])}, {int(row["stages"])}, "{backend[2]}", {bool(row["pointer_range"])}, {copies}, {other}'
    names = "WARPS, STAGES, ARCH, POINTER_RANGE, ASYNC_COPY, OTHER = "
    text = REPRO.read_text(encoding="utf-8")
    before, _, after = text.partition(names)
    return before + names + values + "\n" + after.partition("\n")[2]
