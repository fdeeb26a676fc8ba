"""The process that compiles: reads an order as JSON on stdin, answers one JSON line per build. Started by races.compiled."""

import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from k3lab.errors import BadInput

SCALARS = ("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64")


def import_place(name: str, what: str = "kernel") -> tuple[ModuleType, str]:
    """The module of "module:attribute" or "file.py:attribute", and the attribute's name. BadInput if the import fails."""
    place, _, attribute = name.partition(":")
    try:
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise BadInput(f"{what} {name}: no file {place}")
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            sys.path.insert(0, str(Path(place).resolve().parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise BadInput(f"{what} {name}: module {error.name!r} is not installed here; install it, or name the {what}'s file") from None
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{what} {name}: importing {place} failed: {type(error).__name__}: {error}") from None
    return module, attribute


def load(name: str) -> tuple[object, list[dict]]:
    """The JITFunction that `name` means, and the heuristics found around it, outermost first."""
    import triton

    module, attribute = import_place(name)
    if not hasattr(module, attribute):
        kernels = [k for k, x in vars(module).items() if isinstance(_unwrap(x)[0], triton.JITFunction)]
        raise BadInput(f"kernel {name}: {name.partition(':')[0]} has no {attribute!r}; its kernels: {', '.join(kernels) or 'none'}")
    fn, heuristics = _unwrap(getattr(module, attribute))
    if not isinstance(fn, triton.JITFunction):
        raise BadInput(f"kernel {name}: {attribute} is a {type(fn).__name__}, not a Triton kernel")
    return fn, heuristics


def _unwrap(obj: object) -> tuple[object, list[dict]]:
    import triton

    heuristics = []
    while not isinstance(obj, triton.JITFunction) and hasattr(obj, "fn"):
        if isinstance(obj, triton.runtime.autotuner.Heuristics):
            heuristics.append(obj.values)
        obj = obj.fn
    return obj, heuristics


def resolve(fn: object, heuristics: list[dict], given: dict, field: dict, name: str) -> tuple[dict, dict, list]:
    """(types of all arguments, values of the constexpr ones, integers that are multiples of 16), specialised as a launch does it.

    Raises BadInput naming what is missing, unknown or of no type.
    """
    params = fn.params
    names = [p.name for p in params]
    if unknown := sorted(set(given) - set(names)):
        raise BadInput(f"kernel {name}: the signature names {', '.join(unknown)}, which are not arguments; they are {', '.join(names)}")
    types, values, aligned = {}, {}, []
    for p in params:
        if p.name in given:
            said = given[p.name]
        elif p.name in field:
            said = field[p.name]
        elif p.default is not inspect.Parameter.empty and p.is_constexpr:
            said = {"value": p.default}
        else:
            continue
        if isinstance(said, str) and re.fullmatch(r"[iu](8|16|32|64):16", said) and not p.is_constexpr:
            aligned.append(p.name)
            said = said.removesuffix(":16")
        value = said["value"] if isinstance(said, dict) else said
        is_type = isinstance(said, str) and (said.startswith("*") or said in SCALARS)
        if is_type and p.is_constexpr:
            raise BadInput(f"kernel {name}: {p.name} is a constexpr and needs a value, not the type {said!r}")
        if is_type:
            if said.lstrip("*") not in SCALARS:
                raise BadInput(f"kernel {name}: {p.name} has the type {said!r}; known: {', '.join(SCALARS)}, with * for pointers")
            types[p.name] = said
        elif p.is_constexpr or value is None or (type(value) is int and value == 1):
            types[p.name], values[p.name] = "constexpr", value
        elif isinstance(value, bool):
            types[p.name] = "i1"
        elif isinstance(value, int):
            types[p.name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            aligned += [p.name] * (value % 16 == 0)
        elif isinstance(value, float):
            types[p.name] = "fp32"
        else:
            raise BadInput(f"kernel {name}: {p.name} is not a constexpr and {value!r} is no type of an argument")
    seen = {n: values[n] if n in values else types[n] for n in types}
    for table in heuristics:
        for key, rule in table.items():
            if key in given or key not in names:
                continue
            try:
                values[key] = rule(seen)
            except Exception as error:
                why = f"its heuristic for {key} needs real arguments ({type(error).__name__}: {error})"
                raise BadInput(f"kernel {name}: {why}; give {key} in the signature") from None
            types[key] = "constexpr"
    if missing := [n for n in names if n not in types]:
        raise BadInput(
            f"kernel {name}: no type or value for {', '.join(missing)}; give a signature, e.g. "
            + json.dumps({n: 64 if next(p for p in params if p.name == n).is_constexpr else "*bf16" for n in missing[:3]})
        )
    return types, values, aligned


def build(job: dict, fn: object, types: dict, values: dict, aligned: list, order: dict) -> Path:
    """Compile one job, or find it in the cache; the folder of its artefacts."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch = job["target"].split(":")
    target = GPUTarget("hip", arch, 64) if backend == "hip" else GPUTarget("cuda", int(arch), 32)
    pointers = [n for n, t in types.items() if t.startswith("*")]
    attributes = [["tt.divisibility", 16]] * job["divisible"] + [["tt.pointer_range", 32]] * (job["pointer_range"] and backend == "hip")
    names = list(fn.arg_names)
    facts = {(names.index(n),): attributes for n in pointers} if attributes else {}
    facts |= {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    if job["async_copy"] is None:
        os.environ.pop("TRITON_HIP_USE_ASYNC_COPY", None)
    else:
        os.environ["TRITON_HIP_USE_ASYNC_COPY"] = str(int(job["async_copy"]))
    identity = [
        fn.cache_key, triton.__version__, job["target"], job["num_warps"], job["num_stages"], job["async_copy"], attributes,
        aligned, [[n, types[n], repr(values.get(n))] for n in names],
        sorted((k, v) for k, v in os.environ.items() if k.startswith("AMDGCN_")),
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:40]
    folder = Path(order["cache"]) / key
    if (folder / "kernel.json").is_file():
        return folder
    source = ASTSource(
        fn,
        {n: types[n] for n in names},
        {(names.index(n),): v for n, v in values.items()},
        facts,
    )
    built = triton.compile(source, target=target, options={"num_warps": job["num_warps"], "num_stages": job["num_stages"]})
    folder.parent.mkdir(parents=True, exist_ok=True)
    # another process may build the same key: the metadata, read as the sign of a whole folder, comes last
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    for kind in ("ttgir", "llir", order["assembly"][backend]):
        text = built.asm[kind]
        (temporary / f"kernel.{kind}").write_text(text if isinstance(text, str) else text.decode())
    m = built.metadata
    metadata = {
        "name": m.name, "num_warps": m.num_warps, "num_stages": m.num_stages, "shared": m.shared, "target": job["target"],
        "triton": triton.__version__, "pointer_range": job["pointer_range"], "async_copy": job["async_copy"],
        "constexpr": {n: v for n, v in values.items() if isinstance(v, int | float | str | bool | None)},
    }  # fmt: skip
    (temporary / "kernel.json").write_text(json.dumps(metadata, indent=1, sort_keys=True))
    try:
        os.rename(temporary, folder)
    except OSError:
        if not (folder / "kernel.json").is_file():
            raise
    return folder


def _diagnostic(start: int) -> str:
    """The first "error:" line that the compiler, which is no Python, has written to stderr (a file) from byte `start` on."""
    text = os.pread(2, max(0, os.fstat(2).st_size - start), start).decode(errors="replace")
    return next((" " + x for x in text.splitlines() if "error: " in x), "")


def main() -> None:
    # kernels' modules may print: answers go to the real stdout, everything else to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = json.load(sys.stdin)

    def say(**answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    import triton

    loaded: dict = {}
    for job in order["jobs"]:
        try:
            if job["kernel"] not in loaded:
                loaded[job["kernel"]] = load(job["kernel"])
            fn, heuristics = loaded[job["kernel"]]
            types, values, aligned = resolve(fn, heuristics, job["signature"], order["field"], job["kernel"])
        except BadInput as error:
            say(refused=str(error))
            return
        start = os.fstat(2).st_size
        try:
            folder, error = str(build(job, fn, types, values, aligned, order)), ""
        except Exception as reason:  # whatever the compiler raises is this build's result
            folder, error = "", re.sub(r"\s+", " ", f"{type(reason).__name__}: {reason}{_diagnostic(start)}").strip()[:600]
        say(number=job["number"], triton=triton.__version__, folder=folder, error=error)


if __name__ == "__main__":
    main()
