"""Recording the calls of a running process as captures.

An engine imports its kernels by name into the module that calls them (`from ...kda import chunk_kda_with_fused_gate`), so
replacing the function where it is DEFINED changes nothing: the caller holds its own reference. record() replaces the name
in the module that CALLS it, in this process. The workers of a server are other processes: there record_from_env() does
the same from a plugin entry point.
"""

import importlib
import importlib.metadata
import inspect
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3lab.capture.format import TENSORS, Capture, check_metadata, starting_slots
from k3lab.capture.taps import is_tap, tap
from k3lab.errors import BadInput

ARGUMENTS = {name: name for kind in ("kda", "attn_res") for name in TENSORS[kind]} | {
    "g_bias": "dt_bias",
    "state": "initial_state",
    "ssm_state": "initial_state",
    "recurrent_state": "initial_state",
    "ssm_state_indices": "state_indices",
    "initial_state_indices": "state_indices",
    "cache_indices": "state_indices",
    "conv_state_indices": "state_indices",
    "conv_states": "conv_state",
    "query_start_loc": "cu_seqlens",
    "spec_sequence_masks": "spec_mask",
    "out": "o",
    "core_attn_out": "o",
}
RAW_IF = {"g": ("raw_g", ("use_gate_in_kernel", "compute_gate")), "beta": ("raw_beta", ("use_beta_sigmoid_in_kernel", "sigmoid_beta"))}
POOLS = {"initial_state": "final_state", "conv_state": "conv_state_after"}
RESULTS = ("o", "final_state")


class Recorder:
    """The handle of one recorded callable; see record().

    written    files of this process, in order            bytes   tensor bytes written so far
    skipped    calls passed through: graph capture, shapes only, a tap whose consumer is on another rank
    error      why recording stopped, if it failed
    active     False once stopped, full or failed
    """

    def __init__(self, target: str, out: Path, max_calls: int, max_bytes: int, arguments: dict, every: int, skip: int, metadata: dict):
        self.target, self.out, self.max_calls, self.max_bytes = target, out, max_calls, max_bytes
        self.arguments, self.every, self.skip = ARGUMENTS | arguments, every, skip
        self.written: list[Path] = []
        self.bytes = self.skipped = 0
        self.error: str | None = None
        self.active = True
        self._owner, self._name, self.original = _resolve(target)
        self._metadata = _origin(target) | metadata
        self._calls, self._numbers = itertools.count(), itertools.count()
        self._lock = threading.RLock()  # threads of one engine share the bounds
        self._inherited = self._name not in getattr(self._owner, "__dict__", {})
        try:
            self._signature = inspect.signature(self.original)
        except (TypeError, ValueError):  # builtins and some extension functions have none
            self._signature = None
        self._wrapper = self._wrap()
        try:
            setattr(self._owner, self._name, self._wrapper)
        except (AttributeError, TypeError) as e:
            raise BadInput(f"{target}: cannot be replaced ({e}); record a Python function that calls it") from e

    def stop(self) -> None:
        """Put the original function back. Safe to call twice, and from another thread."""
        self.active = False
        with self._lock:
            if getattr(self._owner, "__dict__", {}).get(self._name) is not self._wrapper:
                return
            if self._inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self.original)

    def _wrap(self) -> Callable:
        original = self.original

        @wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            # under Dynamo even a counter would enter the traced graph and its guards
            if torch.compiler.is_dynamo_compiling() or not self.active:
                return original(*args, **kwargs)
            if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
                self.skipped += 1
                return original(*args, **kwargs)
            call = next(self._calls)
            if call < self.skip or (call - self.skip) % self.every:
                return original(*args, **kwargs)
            before = self._guarded(self._before, args, kwargs)
            result = original(*args, **kwargs)
            if before is not None and self.active:
                with self._lock:
                    if self.active:
                        self._guarded(self._after, call, *before, result)
            return result

        recorded.k3lab_recorder = self
        return recorded

    def _guarded(self, step: Callable, *args: Any) -> Any:
        """step(*args); whatever goes wrong in it ends the recording, is reported once, and leaves the server running."""
        try:
            return step(*args)
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"
            self._say(f"recording stopped: {self.error}")
            self.stop()
            return None

    def _say(self, what: str) -> None:
        print(f"k3lab: {self.target}: {what}", file=sys.stderr, flush=True)

    def _full(self, why: str) -> None:
        self._say(f"{why}; {len(self.written)} captures, {self.bytes} bytes in {self.out}; the original function is back")
        self.stop()

    def _bind(self, args: tuple, kwargs: dict) -> dict[str, Any] | None:
        """Arguments by name, defaults included; arg0, arg1, ... where the function does not say; None if they do not fit."""
        if self._signature is None:
            return {f"arg{i}": x for i, x in enumerate(args)} | kwargs
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:  # the call itself will say so
            return None
        bound.apply_defaults()
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                named |= {f"arg{len(named) + i}": x for i, x in enumerate(value)}
            else:
                named[name] = value
        return named

    def _place(self, name: str, named: dict[str, Any]) -> str | None:
        """The capture's name of an argument: by the mapping, raw or activated by the call's flags, else arg.<name>."""
        place = self.arguments.get(name, f"arg.{name}")
        if place in RAW_IF and any(named.get(flag) is True for flag in RAW_IF[place][1]):
            return RAW_IF[place][0]
        return place

    def _before(self, args: tuple, kwargs: dict) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]] | None:
        """Tensors copied before the call, metadata, and the live tensors that the call may write."""
        named = self._bind(args, kwargs)
        if named is None:
            return None
        live: dict[str, Tensor] = {}
        metadata: dict[str, Any] = {"absent": []}
        if is_tap(named):
            found = tap(named)
            if found is None:
                self.skipped += 1
                return None
            named, about = found
            metadata |= about
        for name, value in named.items():
            place = self._place(name, named)
            if place is None:
                continue
            if isinstance(value, Tensor):
                live[place] = value.detach()
            elif isinstance(value, (list, tuple)):
                live |= {f"arg.{name}.{i}": x.detach() for i, x in enumerate(value) if isinstance(x, Tensor)}
            elif value is None and place in TENSORS["kda"] and place not in RESULTS:
                metadata["absent"].append(place)
            elif value is None or isinstance(value, (bool, int, float, str)):
                metadata[f"arg.{name}"] = value
        metadata |= _conventions(named, self._metadata)
        if any(x.layout == torch.strided and x.untyped_storage().device.type == "meta" for x in live.values()):
            self.skipped += 1  # a shape-only pass: meta tensors, or the fake ones of torch.export and torch.compile
            return None
        _unpack(live)
        inputs = {n: x for n, x in live.items() if n not in RESULTS}
        slots = _used_slots(live)
        for pool in POOLS:
            if pool in inputs and slots is not None and pool in live:
                inputs[pool] = _gather(live[pool], slots[0])
        if slots is not None:
            inputs["state_indices"] = live["state_indices"][: len(slots[0])]
        if self.bytes + _size(inputs) > self.max_bytes:
            self._full(f"the next call needs {_size(inputs)} bytes, more than max_bytes={self.max_bytes} leaves")
            return None
        return {n: _copy(x) for n, x in inputs.items()}, metadata, live

    def _after(self, call: int, tensors: dict[str, Tensor], metadata: dict[str, Any], live: dict[str, Tensor], result: Any) -> None:
        """Add results and states after the call, then write the file."""
        kind = "kda" if {"q", "k", "v"} <= tensors.keys() else "attn_res" if {"score_norm", "score_proj"} <= tensors.keys() else "call"
        results = _results(result, live, kind)
        if kind == "attn_res" and metadata.get("stream") == "prefix":
            results.pop("o", None)  # what the tap handed out is no mixture
        slots, state = _used_slots(live), live.get("initial_state")
        if slots is not None:
            for pool, after in POOLS.items():
                if pool in live and (after not in results or results[after].data_ptr() == live[pool].data_ptr()):
                    results[after] = _gather(live[pool], slots[1])
            if slots[2] is not None and state is not None:
                results["token_states"] = _gather(state, slots[2])
        elif state is not None and "final_state" not in results and not torch.equal(_copy(state), tensors["initial_state"]):
            results["final_state"] = state
        tensors |= {n: _copy(x) for n, x in results.items()}
        size = _size(tensors)
        if self.bytes + size > self.max_bytes:
            return self._full(f"call {call} with its results needs {size} bytes, more than max_bytes={self.max_bytes} leaves")
        about = {**metadata, "kind": kind, "call": call, "pid": os.getpid(), "rank": _rank(), "host": socket.gethostname()}
        if kind == "kda":
            about |= {"dtype": str(tensors["q"].dtype).removeprefix("torch."), "num_decodes": _leading_decodes(tensors)}
        about |= self._metadata
        path = self._free_name(kind)
        Capture(tensors, about).save(path)
        self.written.append(path)
        self.bytes += size
        if len(self.written) >= self.max_calls:
            self._full(f"max_calls={self.max_calls} reached")

    def _free_name(self, kind: str) -> Path:
        """A name that no earlier run, recorder or process has taken."""
        while True:
            path = self.out / f"{kind}-rank{_rank()}-pid{os.getpid()}-{next(self._numbers):04d}.safetensors"
            if not path.exists():
                return path


def record(
    target: str,
    out: str | os.PathLike,
    *,
    max_calls: int = 8,
    max_bytes: int = 1 << 30,
    arguments: dict[str, str | None] | None = None,
    every: int = 1,
    skip: int = 0,
    engine: str | None = None,
    **metadata: Any,
) -> Recorder:
    """Record calls of `target` = "module:function" as captures in the folder `out`, until a bound is reached or stop().

    target      the module that CALLS the function (see the module docstring), "module:name" or "module:Class.method"
    max_calls, max_bytes  bounds of this process; once one is reached the original function is back in place
    every, skip the first `skip` calls pass, then one call in `every` is recorded: a model with L KDA layers calls L times
                per step, so every=L records one layer of each step and skip picks which
    arguments   argument name -> tensor name of the capture, on top of ARGUMENTS; None leaves an argument out
    metadata    what the call cannot say: state_layout, lower_bound, eps, model, layer, tp_rank, tp_size, ...

    Arguments are copied before the call. g and beta are stored as raw_g and raw_beta if the call says that the kernel
    activates them (use_gate_in_kernel, use_beta_sigmoid_in_kernel), else under their own names. Where state_indices select
    slots of a pool, initial_state (conv_state) holds the used slots before the call and final_state (conv_state_after)
    after it, [N, ...]; token_states [T, ...] has every speculative token's slot; a null slot (index <= 0) reads as zeros.
    An argument under an unknown name is kept as arg.<name>, a plain value as metadata.

    Eager mode: calls under torch.compile or in CUDA graph capture pass through untouched. The function's own exceptions
    propagate and such a call is not written. A failure to record (disk full) is reported once on stderr and ends the
    recording, not the server. Each file is named by rank and process id, and no file is overwritten. num_decodes is
    counted from the leading sequences of one token.
    Raises BadInput if the target cannot be found or wrapped, or `out` cannot be created.
    """
    numbers = (max_calls, max_bytes, every, skip)
    if not all(isinstance(n, int) for n in numbers) or min(numbers[:3]) < 1 or skip < 0:
        raise BadInput(
            f"max_calls={max_calls!r}, max_bytes={max_bytes!r}, every={every!r} must be whole numbers of at least 1 and skip={skip!r} of "
            "at least 0"
        )
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"{out}: cannot be used as the folder for captures: {e}") from e
    if engine is not None:
        metadata = {"engine": engine, **metadata}
    check_metadata(f"record({target!r})", metadata)  # now, not at the first call in a server
    return Recorder(target, out, max_calls, max_bytes, arguments or {}, every, skip, metadata)


def record_from_env() -> list[Recorder]:
    """record() as the environment says; does nothing without K3LAB_RECORD. For plugin entry points (vllm.general_plugins).

    K3LAB_RECORD        "module:function", or several separated by commas
    K3LAB_RECORD_DIR    the folder for captures
    K3LAB_RECORD_MAX_CALLS, _MAX_BYTES, _EVERY, _SKIP   as in record(), per function and process

    May be called again in the same process: a function that is being recorded is left alone.
    Raises BadInput for a target or value that cannot be used: a server asked to record starts recording or does not start.
    """
    targets = [t.strip() for t in os.environ.get("K3LAB_RECORD", "").split(",") if t.strip()]
    if not targets:
        return []
    out = os.environ.get("K3LAB_RECORD_DIR")
    if not out:
        raise BadInput("K3LAB_RECORD is set and K3LAB_RECORD_DIR is not; set it to a folder for the captures")
    options = {}
    for key in ("max_calls", "max_bytes", "every", "skip"):
        value = os.environ.get(f"K3LAB_RECORD_{key.upper()}")
        if value is not None:
            try:
                options[key] = int(value)
            except ValueError as e:
                raise BadInput(f"K3LAB_RECORD_{key.upper()}: {value!r} is not a whole number") from e
    handles = []
    for target in targets:
        owner, name = _locate(target)
        running = getattr(getattr(owner, name), "k3lab_recorder", None)
        handles.append(running or record(target, out, **options))
    return handles


def _locate(target: str) -> tuple[Any, str]:
    """The module or class that holds the name, and the name."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise BadInput(f"{target!r} is not of the form module:function")
    try:
        owner = importlib.import_module(module_name)
    except Exception as e:  # whatever the module does at import, such as asking for a GPU
        raise BadInput(f"{target}: cannot import {module_name}: {type(e).__name__}: {e}") from e
    *parents, name = path.split(".")
    for part in parents:
        owner = getattr(owner, part, None)
    if owner is None or not hasattr(owner, name):
        raise BadInput(f"{target}: {module_name} has no {path}; name the module that calls the function, under the name it calls")
    return owner, name


def _resolve(target: str) -> tuple[Any, str, Callable]:
    owner, name = _locate(target)
    # from a class the plain function, from an instance the bound method, from a module also what its __getattr__ makes
    original = inspect.getattr_static(owner, name) if inspect.isclass(owner) else getattr(owner, name)
    if hasattr(original, "k3lab_recorder"):
        raise BadInput(f"{target}: is being recorded already; stop() that recorder first")
    if not callable(original) or hasattr(original, "__getitem__"):  # a Triton kernel is launched as kernel[grid]
        raise BadInput(f"{target}: is a {type(original).__name__}; record the Python function that launches it or calls it with tensors")
    if isinstance(original, (staticmethod, classmethod)):
        raise BadInput(f"{target}: is a {type(original).__name__}; record the function that it calls")
    return owner, name, original


def _origin(target: str) -> dict[str, Any]:
    """Metadata that the process knows of itself: engine and version from the target's package, the recorded function."""
    engine = target.partition(":")[0].partition(".")[0]
    try:
        version = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(sys.modules.get(engine), "__version__", "unknown"))
    return {"engine": engine, "engine_version": version, "function": target, "gate_base": "natural"}


def _conventions(named: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """lower_bound, eps and state_layout as far as the arguments or the engine's own convention say."""
    about: dict[str, Any] = {}
    if "lower_bound" in named:
        # fla's chunk form ignores lower_bound without safe_gate
        about["lower_bound"] = None if named.get("safe_gate") is False else named["lower_bound"]
    for name in ("eps", "norm_eps"):
        if isinstance(named.get(name), float):
            about["eps"] = named[name]
    first = named.get("state_v_first", named.get("transpose_state_layout"))
    if isinstance(first, bool):
        about["state_layout"] = "vk" if first else "kv"
    elif known.get("engine") == "vllm":
        about["state_layout"] = "vk"
    return about


def _unpack(live: dict[str, Tensor]) -> None:
    """Split vLLM's packed decode input mixed_qkv [T, 2 * H * K + H * V] into q, k, v [T, H, ...], in place."""
    mixed, g = live.get("arg.mixed_qkv"), live.get("raw_g")
    if mixed is None or g is None or mixed.dim() != 2 or g.dim() < 3:
        return
    heads, width = g.shape[-2:]
    rest = mixed.shape[1] - 2 * heads * width
    if rest <= 0 or rest % heads:
        return
    q, k, v = mixed.split([heads * width, heads * width, rest], dim=1)
    live |= {"q": q.unflatten(1, (heads, width)), "k": k.unflatten(1, (heads, width)), "v": v.unflatten(1, (heads, rest // heads))}
    del live["arg.mixed_qkv"]


def _used_slots(live: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Slots [N] read, slots [N] holding each final state, slots [T] written per token (None without a slot per token).

    Worked out and checked on the CPU: an index out of range in a GPU kernel would take the process down.
    """
    pools = [live[pool] for pool in POOLS if pool in live]
    if "state_indices" not in live or not pools:
        return None
    indices = live["state_indices"].cpu().long()
    cu = live["cu_seqlens"].cpu().long() if "cu_seqlens" in live else None
    accepted = live["num_accepted_tokens"].cpu() if "num_accepted_tokens" in live else None
    count = len(cu) - 1 if cu is not None else len(indices)
    first = starting_slots(indices, count, accepted)
    last, each = first, None
    if indices.dim() == 2 and cu is not None:
        lengths = cu.diff()
        rows = torch.repeat_interleave(torch.arange(count), lengths)
        each = indices[rows, torch.arange(len(rows)) - cu[rows]]
        last = indices[:count].gather(1, (lengths - 1).clamp_min(0)[:, None])[:, 0]
    highest = max([int(x.max()) for x in (first, last, each) if x is not None and x.numel()], default=0)
    if any(highest >= len(pool) for pool in pools):
        raise BadInput(f"state_indices: slot {highest} is outside a pool of {min(len(pool) for pool in pools)}")
    return first, last, each


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    """Rows of the pool by slot; the null slot reads as zeros, whatever slot 0 holds."""
    slots = slots.to(pool.device)
    rows = pool.index_select(0, slots.clamp_min(0))
    rows[slots <= 0] = 0
    return rows


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)


def _results(result: Any, live: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Tensors that the call produced: returned ones as o, final_state (kind "call": result.<i>), else its output arguments."""
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    names = [RESULTS[i] if kind != "call" and i < len(RESULTS) else f"result.{i}" for i in range(len(values))]
    found = {name: x for name, x in zip(names, values, strict=True) if isinstance(x, Tensor)}
    return {n: live[n] for n in RESULTS if n in live} | found


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(x.nbytes for x in tensors.values())


def _leading_decodes(tensors: dict[str, Tensor]) -> int:
    cu = tensors.get("cu_seqlens")
    if cu is None:
        return len(tensors["state_indices"]) if "state_indices" in tensors else 0
    return int((cu.long().diff() == 1).long().cumprod(0).sum())


def _rank() -> int:
    """The rank in torch.distributed if initialised, else of the environment (RANK, LOCAL_RANK), else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    value = os.environ.get("RANK", os.environ.get("LOCAL_RANK", ""))
    return int(value) if value.isdecimal() else 0
