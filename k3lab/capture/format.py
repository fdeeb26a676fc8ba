"""The capture format: one .safetensors file of named tensors and typed metadata, nothing that can execute.

A capture holds what a layer handed to its kernels (kind "kda"), what an Attention Residuals tap read ("attn_res"), hidden
states fed to a drafter ("hidden_states"), or the tensors of any other recorded call ("call"). TENSORS lists the names and
shapes, METADATA the keys and types. Metadata values are strings in the file; a value that is not a plain string is stored
as JSON. A tensor under another name is kept and reported by the capture doctor (names that begin with "arg." are arguments
that the recorder could not place, and expected); a newer format version is refused.
"""

import json
import os
import reprlib
import stat
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3lab.errors import BadInput
from k3lab.kda.call import STATE_LAYOUTS, KdaCall

if TYPE_CHECKING:
    import pandas as pd

FORMAT_VERSION = 1
HEADER_LIMIT = 100_000_000  # bytes; safetensors refuses a longer header
GATE_BASES = ("natural", "log2")
STREAMS = ("prefix", "mixture", "embedding", "output")
VLLM_MODES = {"prefix_only": "prefix", "attn_res_stream": "mixture"}  # words of its "aux hidden capture" log line

TENSORS = {
    "kda": {
        "q": "[T, H, K]", "k": "[T, H, K]", "v": "[T, H, V]", "raw_g": "[T, H, K]", "raw_beta": "[T, H]",
        "A_log": "[H]", "dt_bias": "[H, K]",
        "cu_seqlens": "[N + 1]", "initial_state": "[N, H, V, K] or [N, H, K, V]", "has_initial_state": "[N]",
        "output_gate": "[T, H, V]", "norm_weight": "[V]", "g": "[T, H, K], activated log-decay", "beta": "[T, H], after the sigmoid",
        "state_indices": "[N], or [N, S] with a slot per speculative token", "spec_mask": "[N]", "num_accepted_tokens": "[N]",
        "conv_state": "[N, channels, width - 1]", "conv_state_after": "[N, channels, width - 1]", "token_ids": "[T]",
        "o": "[T, H, V]", "final_state": "[N, H, V, K] or [N, H, K, V]", "token_states": "[T, H, V, K] or [T, H, K, V]",
    },
    "attn_res": {
        "bank": "[blocks, T, hidden], committed blocks; block 0 is the embedding",
        "prefix": "[T, hidden]; [taps, T, hidden] with metadata layers, so too pending and o",
        "pending": "[T, hidden], MLP output not yet added to the prefix",
        "score_norm": "[hidden] of the consumer; [taps, hidden] with metadata layers", "score_proj": "[hidden] or [taps, hidden]",
        "embedding": "[T, hidden], where there is no bank", "token_ids": "[T]", "o": "[T, hidden], the mixture",
    },
    "hidden_states": {"hidden_states": "[T, taps, hidden]", "token_ids": "[T]", "loss_mask": "[T]"},
    "call": {},
}  # fmt: skip
REQUIRED = {
    "kda": ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias", "cu_seqlens"),
    "attn_res": ("prefix", "score_norm", "score_proj"),
    "hidden_states": ("hidden_states", "token_ids"),
    "call": (),
}
# layer, layers: 0-based, the tap or taps sit after them; layer_ids: as the engine counts; pp_layers: [first, end) of this pipeline stage
METADATA = {
    "format_version": int, "kind": str, "model": str, "layer": int, "step": int, "state_layout": str, "gate_base": str,
    "lower_bound": float | None, "eps": float, "dtype": str, "engine": str, "engine_version": str, "num_decodes": int,
    "tp_rank": int, "tp_size": int, "git_commit": str, "route": str, "stream": str | list, "layer_ids": list,
    "has_norm": bool, "absent": list, "layers": list, "num_layers": int, "attn_res_block": int, "pp_layers": list,
}  # fmt: skip
SAY_LAYOUT = (
    "say whether states are [N, H, V, K] (vLLM: 'vk') or [N, H, K, V] (fla's default: 'kv'): record(..., state_layout='vk'), or set it in "
    "the capture's metadata and save"
)
STORE_RAW = {
    name: f"if it is {name} before activation, store it as raw_{name}: record(..., arguments={{'{name}': 'raw_{name}'}})"
    for name in ("g", "beta")
}
PER_SEQUENCE = {"initial_state", "has_initial_state", "state_indices", "spec_mask", "num_accepted_tokens"}
_CHOICES = {"kind": tuple(TENSORS), "state_layout": STATE_LAYOUTS, "gate_base": GATE_BASES}


@dataclass
class Capture:
    """Tensors by name, metadata by key, and the file they came from.

    Shapes and names: TENSORS; keys and types: METADATA. A KDA capture may carry vLLM's leading batch axis of 1
    ([1, T, H, K]) and a flat dt_bias [H * K]: kda_call() normalises, the file keeps what the engine passed.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @property
    def name(self) -> str:
        """The file name for messages."""
        return str(self.path) if self.path is not None else "capture"

    @property
    def kind(self) -> str:
        """ "kda", "attn_res", "hidden_states" or "call"; "call" where the metadata does not say."""
        return self.metadata.get("kind", "call")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Capture":
        """Read a capture, or a vLLM hidden-state file (see load_hidden_states), into CPU memory.

        Checks the container, the format version and the metadata types; what the tensors hold is for check() and kda_call().
        Raises BadInput naming the file and the reason. Nothing of the file is executed.
        """
        path = Path(path)
        tensors, raw = _read(path)
        if "format_version" not in raw:
            if "hidden_states" in tensors:
                return _hidden_states(path, tensors, raw, None)
            raise BadInput(
                f"{path}: metadata has no format_version, so this is not a k3lab capture; if its tensors are named as in "
                "k3lab.capture.format.TENSORS, save them with Capture(tensors, {'kind': 'kda', ...}).save(path)"
            )
        metadata = {key: _decode(value) for key, value in raw.items()}
        version = metadata["format_version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise BadInput(f"{path}: format_version {version} is newer than {FORMAT_VERSION}, which this k3lab reads; update k3lab")
        check_metadata(str(path), metadata)
        return cls(tensors, metadata, path)

    def save(self, path: str | os.PathLike) -> Path:
        """Write the capture: to a temporary name in the same folder, then renamed, so that no half-written file is ever seen.

        Sets format_version; everything else is written as it stands. Raises BadInput for metadata of a wrong type, a
        dtype that safetensors does not know, or a folder that does not exist. An OSError (disk full) passes through.
        """
        path = Path(path)
        metadata = {"kind": "call", **self.metadata, "format_version": FORMAT_VERSION}
        check_metadata(str(path), metadata)
        if not path.parent.is_dir():
            raise BadInput(f"{path}: folder {path.parent} does not exist")
        plain, storages = {}, set()
        for name, x in self.tensors.items():
            if not isinstance(x, Tensor):
                raise BadInput(f"{path}: {name}: {type(x).__name__} is not a tensor")
            x = x.detach().cpu().contiguous()
            # safetensors refuses two tensors over one storage
            if x.untyped_storage().data_ptr() in storages or x.untyped_storage().nbytes() != x.nbytes:
                x = x.clone()
            storages.add(x.untyped_storage().data_ptr())
            plain[name] = x
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            save_file(plain, temporary, metadata={key: _encode(value) for key, value in metadata.items()})
            os.replace(temporary, path)
        except (SafetensorError, KeyError, ValueError) as e:
            raise BadInput(f"{path}: cannot be written as safetensors: {e}") from e
        finally:
            temporary.unlink(missing_ok=True)
        self.path, self.metadata = path, metadata
        return path

    @classmethod
    def from_call(cls, call: KdaCall, o: Tensor | None = None, final_state: Tensor | None = None, **metadata: Any) -> "Capture":
        """A "kda" capture of a call and, where given, of its results o [T, H, V] and final_state (in the call's state_layout).

        layer, step, state_layout, lower_bound, eps, num_decodes and dtype come from the call; keyword arguments add to or
        replace them. A keyword that is a tensor is stored as a tensor (state_indices, conv_state, token_ids, ...).
        """
        tensors = {n: x for n in TENSORS["kda"] if isinstance(x := getattr(call, n, None), Tensor)}
        results = {"o": o, "final_state": final_state, **{n: x for n, x in metadata.items() if isinstance(x, Tensor)}}
        tensors |= {n: x for n, x in results.items() if x is not None}
        about = {
            "kind": "kda", "layer": call.layer, "step": call.step, "state_layout": call.state_layout, "gate_base": "natural",
            "lower_bound": call.lower_bound, "eps": call.eps, "dtype": _dtype(call.q), "num_decodes": call.num_decodes,
            "has_norm": call.norm_weight is not None, "format_version": FORMAT_VERSION,
        }  # fmt: skip
        about |= {key: value for key, value in metadata.items() if not isinstance(value, Tensor)}
        check_metadata("capture", about)
        return cls(tensors, about)

    def kda_call(self, device: str | torch.device | None = None) -> KdaCall:
        """The capture as a checked KdaCall: packed tokens, no batch axis, dt_bias [H, K], fp32 weights and states.

        Drops a batch axis of 1; flattens [B, T, ...] into B sequences where there is no cu_seqlens; reads dt_bias [H * K]
        and A_log [1, 1, H, 1]. Activated inputs are turned back exactly up to fp32 rounding:
        raw_beta = logit(beta); raw_g = log(expm1(-g)) with A_log = dt_bias = 0 and no lower bound, g in natural log.
        A missing dt_bias is zero only if the metadata key "absent" says that the engine passed none. Sequences without tokens,
        with which an engine pads a batch for a graph, are left out, here and in results().
        Raises BadInput naming the file, the tensor and the reason.
        """
        x, meta = dict(self.tensors), self.metadata
        if self.kind != "kda":
            raise self._bad("kind", f"is {self.kind!r}; a KDA call needs a capture of kind 'kda'")
        lower_bound = self._activated(x)
        if "lower_bound" not in meta and "g" not in self.tensors:
            raise self._bad("metadata lower_bound", "is missing; give the gate's lower bound (natural log), or None for a softplus gate")
        for name in REQUIRED["kda"]:
            if name not in x and name != "cu_seqlens" and not (name == "dt_bias" and name in meta.get("absent", [])):
                raise self._bad(name, f"is missing, expected {TENSORS['kda'][name]}; the file holds {', '.join(sorted(self.tensors))}")
        if "initial_state" in x and "state_layout" not in meta:
            raise self._bad("metadata state_layout", f"is missing; {SAY_LAYOUT}")
        self._drop_batch_axis(x)
        heads, width = x["q"].shape[1:]
        x["A_log"] = x["A_log"].flatten()
        x.setdefault("dt_bias", torch.zeros(heads, width))
        if x["dt_bias"].dim() == 1 and x["dt_bias"].numel() == heads * width:
            x["dt_bias"] = x["dt_bias"].reshape(heads, width)
        for name in ("A_log", "dt_bias", "initial_state"):
            if name in x and x[name].is_floating_point() and x[name].dtype != torch.float64:
                x[name] = x[name].float()
        for name in ("has_initial_state", "spec_mask"):
            if name in x:
                x[name] = x[name].bool()
        keep = self._with_tokens()
        if keep is not None:
            for name in PER_SEQUENCE & set(x):
                if x[name].dim() and len(x[name]) == len(keep):
                    x[name] = x[name][keep]
            x["cu_seqlens"] = x["cu_seqlens"].unique_consecutive()
        try:
            if "state_indices" in x:
                count = x["cu_seqlens"].numel() - 1
                x["state_indices"] = starting_slots(x["state_indices"], count, x.get("num_accepted_tokens"))
            call = KdaCall(
                **{n: x[n] for n in TENSORS["kda"] if n in KdaCall.__dataclass_fields__ and n in x}, lower_bound=lower_bound,
                state_layout=meta.get("state_layout", "vk"), num_decodes=meta.get("num_decodes", 0), eps=meta.get("eps", 1e-5),
                layer=meta.get("layer", -1), step=meta.get("step", -1),
            )  # fmt: skip
            return call.check().to(device)
        except BadInput as e:
            raise BadInput(f"{self.name}: {e}") from e

    def results(self) -> dict[str, Tensor]:
        """What the engine returned, as far as recorded: o [T, H, V], final_state [N, H, V, K], token_states [T, H, V, K]."""
        out = {n: self.tensors[n] for n in ("o", "final_state", "token_states") if n in self.tensors}
        if "o" in out and out["o"].dim() == 4:
            out["o"] = out["o"].flatten(0, 1)
        keep = self._with_tokens()
        if keep is not None and "final_state" in out and len(out["final_state"]) == len(keep):
            out["final_state"] = out["final_state"][keep]
        if self.metadata.get("state_layout") == "kv":
            out |= {n: x.transpose(-1, -2).contiguous() for n, x in out.items() if n != "o" and x.dim() > 1}
        return out

    def _with_tokens(self) -> Tensor | None:
        """Which sequences have tokens, [N] bool; None where all have, or cu_seqlens is not there to say."""
        cu = self.tensors.get("cu_seqlens")
        if cu is None or cu.dim() != 1 or cu.numel() < 2 or not is_integer(cu):
            return None
        length = cu.long().diff()
        return length > 0 if bool((length == 0).any()) and bool((length > 0).any()) else None

    def check(self) -> "pd.DataFrame":
        """The capture doctor: k3lab.capture.check.check(self), a DataFrame of findings."""
        from k3lab.capture.check import check  # check imports this module

        return check(self)

    def _bad(self, what: str, why: str) -> BadInput:
        return BadInput(f"{self.name}: {what}: {why}")

    def _activated(self, x: dict[str, Tensor]) -> float | None:
        """Replace activated g and beta by raw_g and raw_beta in x; return the lower bound that then applies."""
        if "raw_beta" not in x and "beta" in x:
            if why := not_activated("beta", x["beta"].float()):
                raise self._bad("beta", f"{why}; {STORE_RAW['beta']}")
            x["raw_beta"] = torch.logit(x["beta"].float())
        if "raw_g" in x or "g" not in x:
            return self.metadata.get("lower_bound")
        if x["g"].dim() not in (3, 4):
            raise self._bad("g", f"shape {tuple(x['g'].shape)}, expected {TENSORS['kda']['g']}")
        g = x["g"].float() * (0.6931471805599453 if self.metadata.get("gate_base") == "log2" else 1.0)
        if why := not_activated("g", g):
            raise self._bad("g", f"{why}; {STORE_RAW['g']}")
        x["raw_g"] = torch.log(torch.expm1(-g))
        x["A_log"], x["dt_bias"] = torch.zeros(g.shape[-2]), torch.zeros(g.shape[-2:])
        return None

    def _drop_batch_axis(self, x: dict[str, Tensor]) -> None:
        """Make the token tensors of x [T, ...]; derive cu_seqlens where a batch axis or one-token slots stand for it."""
        rank = {"q": 3, "k": 3, "v": 3, "raw_g": 3, "raw_beta": 2, "output_gate": 3}
        if not all(x[n].is_floating_point() for n in ("q", "k", "v")):
            raise self._bad("q, k, v", f"dtypes {x['q'].dtype}, {x['k'].dtype}, {x['v'].dtype}, expected floating types")
        batch, tokens = x["q"].shape[:2] if x["q"].dim() == 4 else (1, x["q"].shape[0] if x["q"].dim() else 0)
        if batch > 1 and "cu_seqlens" in x:
            raise self._bad("q", f"shape {tuple(x['q'].shape)} has a batch axis of {batch} beside cu_seqlens; pack the tokens into one row")
        for name, dims in rank.items():
            if name in x and x[name].dim() == dims + 1 and x[name].shape[0] == batch:
                x[name] = x[name].flatten(0, 1)
            if name in x and x[name].dim() != dims:
                raise self._bad(name, f"shape {tuple(x[name].shape)}, expected {TENSORS['kda'][name]} or the same behind a batch axis")
        if "cu_seqlens" not in x:
            slots = x.get("state_indices")
            if slots is not None and batch == 1 and slots.dim() == 1 and slots.numel() == tokens:
                x["cu_seqlens"] = torch.arange(tokens + 1, dtype=torch.int32)
            elif self.tensors["q"].dim() == 4:
                x["cu_seqlens"] = torch.arange(0, batch * tokens + 1, max(tokens, 1), dtype=torch.int32)
            else:
                raise self._bad("cu_seqlens", "is missing, expected [N + 1] offsets of the packed sequences")


def not_activated(name: str, x: Tensor) -> str:
    """Why x cannot be an activated g (a log-decay, at most 0) or beta (a sigmoid, 0 to 1), or "" if it can; NaN is no reason."""
    if name == "g" and bool((x > 0).any()):
        return f"has a log-decay of {float(x[x > 0].max()):.3g}; a log-decay is at most 0"
    outside = (x < 0) | (x > 1)
    if name == "beta" and bool(outside.any()):
        return f"has {float(x[outside][0]):.3g}; beta after the sigmoid lies in [0, 1]"
    return ""


def starting_slots(state_indices: Tensor, count: int, num_accepted_tokens: Tensor | None = None) -> Tensor:
    """The slot [N] that each of `count` sequences starts from.

    state_indices is [N] or, with a slot per speculative token, [N, S]: then the state after the last accepted token,
    column num_accepted_tokens - 1 (the first where there is no count). Rows after `count` are graph padding.
    Raises BadInput for other shapes.
    """
    if state_indices.dim() not in (1, 2) or not is_integer(state_indices) or len(state_indices) < count:
        what = f"shape {tuple(state_indices.shape)} dtype {state_indices.dtype}"
        raise BadInput(f"state_indices: {what}, expected [N] or [N, S] integers for N = {count} sequences")
    indices = state_indices[:count]
    if indices.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch does not compare them
        indices = indices.long()
    if indices.dim() == 1:
        return indices
    column = torch.zeros(len(indices), dtype=torch.long, device=indices.device)
    if num_accepted_tokens is not None:
        if num_accepted_tokens.dim() != 1 or not is_integer(num_accepted_tokens) or len(num_accepted_tokens) < count:
            raise BadInput(f"num_accepted_tokens: shape {tuple(num_accepted_tokens.shape)}, expected [N] for N = {count} sequences")
        column = (num_accepted_tokens[:count].to(indices.device).long() - 1).clamp(0, indices.shape[1] - 1)
    return indices.gather(1, column[:, None])[:, 0]


def load_hidden_states(path: str | os.PathLike, sidecar: str | os.PathLike | None = None) -> Capture:
    """A vLLM ExampleHiddenStatesConnector file as a "hidden_states" capture.

    The file holds hidden_states [T, taps, hidden] and token_ids [T] and says nothing of where they come from. A JSON side
    file (default: the same name with .json, if there is one) adds it: layer_ids (one per tap), stream ("prefix",
    "mixture", "embedding", "output", or one of them per tap; vLLM's log words prefix_only and attn_res_stream are
    understood as "mode"), engine, engine_version, model, tp_rank, ...
    The axis order is judged by the length of token_ids: [taps, T, hidden] is transposed, and the metadata key
    axis_order says so; [T, hidden] is one tap. Raises BadInput naming file, tensor and reason.
    """
    path = Path(path)
    tensors, raw = _read(path)
    if "format_version" in raw:
        return Capture.load(path)
    return _hidden_states(path, tensors, raw, sidecar)


def _hidden_states(path: Path, tensors: dict[str, Tensor], raw: dict[str, str], sidecar: str | os.PathLike | None) -> Capture:
    metadata = {key: _decode(value) for key, value in raw.items()} | _sidecar(path, sidecar)
    if "mode" in metadata:
        mode = metadata.pop("mode")
        metadata.setdefault("stream", VLLM_MODES.get(mode, mode) if isinstance(mode, str) else mode)
    for name in REQUIRED["hidden_states"]:
        if name not in tensors:
            raise BadInput(
                f"{path}: {name}: is missing, expected {TENSORS['hidden_states'][name]}; the file holds {', '.join(sorted(tensors))}"
            )
    states, ids = tensors["hidden_states"], tensors["token_ids"]
    if not is_integer(ids) or ids.dim() != 1:
        raise BadInput(f"{path}: token_ids: shape {tuple(ids.shape)} dtype {ids.dtype}, expected [T] integers")
    count = ids.numel()
    if not states.is_floating_point():
        raise BadInput(f"{path}: hidden_states: dtype {states.dtype}, expected a floating type")
    shape = tuple(states.shape)
    if states.dim() == 2 and shape[0] == count:
        states = states[:, None]
    elif states.dim() == 3 and shape[0] != count and shape[1] == count:
        states = states.transpose(0, 1).contiguous()
        metadata["axis_order"] = f"transposed: the file holds {list(shape)} and token_ids has {count} ids, so its second axis is the tokens"
    elif states.dim() != 3 or shape[0] != count:
        raise BadInput(f"{path}: hidden_states: shape {shape}, expected [{count}, taps, hidden] for the {count} ids in token_ids")
    metadata |= {"kind": "hidden_states", "dtype": _dtype(states), "format_version": FORMAT_VERSION}
    check_metadata(str(path), metadata)
    layers = metadata.get("layer_ids")
    if layers is not None and len(layers) != states.shape[1]:
        raise BadInput(f"{path}: layer_ids {layers} name {len(layers)} taps, hidden_states has {states.shape[1]}")
    return Capture(tensors | {"hidden_states": states}, metadata, path)


def _sidecar(path: Path, sidecar: str | os.PathLike | None) -> dict[str, Any]:
    side = Path(sidecar) if sidecar is not None else path.with_suffix(".json")
    if sidecar is None and not side.is_file():
        return {}
    try:
        found = json.loads(side.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise BadInput(f"{side}: cannot be read as the JSON side file of {path}: {e}") from e
    if not isinstance(found, dict):
        raise BadInput(
            f"{side}: holds a JSON {type(found).__name__}, expected an object such as {{'layer_ids': [2, 23], 'stream': 'prefix'}}"
        )
    return found


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and raw metadata of a safetensors file, or BadInput that says what the file is instead."""
    try:
        status = path.stat()
        size = status.st_size
        if stat.S_ISDIR(status.st_mode):
            raise BadInput(f"{path}: is a folder, expected a .safetensors file")
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{path}: is a pipe or a device, expected a .safetensors file")
        if size == 0:
            raise BadInput(f"{path}: the file is empty")
        _unique_keys(path, size)
        with safe_open(path, framework="pt", device="cpu") as f:
            # a clone owns its memory: a mapped tensor would die with the process if the file were truncated later
            return {name: f.get_tensor(name).clone() for name in f.keys()}, f.metadata() or {}  # noqa: SIM118 (safe_open is no dict)
    except FileNotFoundError as e:
        raise BadInput(f"{path}: no such file") from e
    except OSError as e:
        raise BadInput(f"{path}: cannot be read: {e}") from e
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, MemoryError) as e:
        if not str(path).isprintable() and "UTF-8" in str(e):
            raise BadInput(f"{path}: the name is not UTF-8, and safetensors opens no such file; rename it") from e
        if isinstance(e, MemoryError) or "memory" in str(e).lower():
            raise BadInput(f"{path}: {size} bytes do not fit into memory; record fewer tokens or layers in one capture ({e})") from e
        raise BadInput(f"{path}: {_what_it_is(path, size)} ({e})") from e


def _unique_keys(path: Path, size: int) -> None:
    """Raise BadInput if a key stands twice in the header: the format forbids it, and readers differ in which one they keep."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, n in Counter(key for key, _ in pairs).items() if n > 1]
        if twice:
            raise BadInput(f"{path}: the header holds {twice[0]!r} more than once; write the file again, each name once")
        return dict(pairs)

    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if length > min(size, HEADER_LIMIT):
            return  # safetensors refuses it
        header = f.read(length)
    with suppress(ValueError, RecursionError):  # not JSON: safetensors says why
        json.loads(header, object_pairs_hook=unique)


def _what_it_is(path: Path, size: int) -> str:
    """Why safetensors could not read the file, from its first bytes."""
    with path.open("rb") as f:
        head = f.read(16)
    if head.startswith(b"PK\x03\x04") or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"):
        return (
            "is a pickle or an archive (torch.save, npz), which is refused because loading one can execute code; convert it where you "
            "trust it: Capture(torch.load(path, weights_only=True), {'kind': 'kda', ...}).save('x.safetensors')"
        )
    header = int.from_bytes(head[:8], "little") if len(head) >= 8 else size
    if head[8:9] == b"{" and header <= HEADER_LIMIT:
        return f"is a truncated or damaged safetensors file of {size} bytes; was it copied while being written?"
    return f"is not a safetensors file ({size} bytes, beginning {head[:8].hex(' ')})"


def is_integer(x: Tensor) -> bool:
    return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _encode(value: Any) -> str:
    """A plain string as it is, anything else (and a string that would read as JSON) as JSON."""
    if isinstance(value, str) and _decode(value) == value and isinstance(_decode(value), str):
        return value
    return json.dumps(value)


def _decode(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def check_metadata(where: str, metadata: dict[str, Any]) -> None:
    """Raise BadInput for the first known key whose value has a wrong type or is not one of its choices."""
    for key, value in metadata.items():
        expected = METADATA.get(key)
        if expected is float or expected == (float | None):
            expected = expected | int
        if expected is not None and (not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool)):
            name = getattr(METADATA[key], "__name__", METADATA[key])
            raise BadInput(f"{where}: metadata {key}: {reprlib.repr(value)} is not of type {name}")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise BadInput(f"{where}: metadata {key}: {reprlib.repr(value)} is not one of {', '.join(_CHOICES[key])}")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as e:
            raise BadInput(f"{where}: metadata {key}: {reprlib.repr(value)} cannot be written as JSON") from e
    streams = metadata.get("stream", [])
    for stream in [streams] if isinstance(streams, str) else streams:
        if stream not in STREAMS:
            raise BadInput(f"{where}: metadata stream: {reprlib.repr(stream)} is not one of {', '.join(STREAMS)}")
