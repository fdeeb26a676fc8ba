"""The two streams at a tap: what an engine can hand to a drafter, of the same shape and dtype and not the same value.

    prefix    running prefix + pending MLP output, rounded to the storage dtype: what a layer forwards
    mixture   what the next consumer reads: sum softmax(score) x over bank[:n] and that prefix, by the CONSUMER's weights

Index base. `layer` is a layer id as vLLM counts its auxiliary layers: id i is the state before layer i (0-based), so id 0 is the
embedding, id i > 0 the tap after layer i - 1, and id num_layers the tap after the last layer. Metadata `layer` and `layers` of a
capture, and taps elsewhere in this package, are "after layer", 0-based: layer_id(tap) = tap + 1. The offset is added to the id.

The consumer of id i is layer i's attention side with n = ceil(i / block) valid blocks, for id num_layers the output side with all
of them; a layer whose index is a multiple of the block size has by then committed the block it ends. At the end of a pipeline
stage that is not the last one the consumer lives on another rank: refused. At id 0, and in a model without AttnRes, both streams
are equal. Which stream a drafter was trained on is a property of its checkpoint.
Sources: vLLM PRs 50487, 56434, 50815, vllm/models/kimi_k3/nvidia/model.py (_capture_aux_hidden_stream).
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from k3lab.attn_res import attn_res
from k3lab.capture import Capture
from k3lab.capture.format import TENSORS
from k3lab.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

    from k3lab.tiny.model import TinyK3

Captures = Capture | str | os.PathLike | Iterable[Capture | str | os.PathLike]
TAP = ("bank", "prefix", "pending", "score_norm", "score_proj")
QUANTILES = {"cosine_p05": 0.05, "cosine_p50": 0.5, "cosine_p95": 0.95}


@dataclass(frozen=True)
class Streams:
    """Both streams at one layer id.

    prefix, mixture   [T, hidden] in the storage dtype of the capture
    weights           [T, n + 1] fp32, what the mixture takes of each block and, last, of the prefix; [T, 1] where both are equal
    """

    layer: int
    prefix: Tensor
    mixture: Tensor
    weights: Tensor


def layer_id(tap: int) -> int:
    """The layer id (vLLM's auxiliary ids) of the tap after layer `tap`, 0-based; -1 is the embedding."""
    return tap + 1


def streams(capture: Captures, layer: int | None = None, offset: int = 0, impl: str = "torch") -> Streams:
    """Both streams at layer id `layer` + `offset`.

    capture   captures of kind "attn_res": one of them or several (one per tap), their paths, or a folder; a capture holds one tap
              (metadata layer) or several along a leading axis of prefix, pending, score_norm and score_proj (metadata layers)
    layer     the layer id; default the one tap that is there
    impl      as in attn_res

    Raises BadInput for an id that does not exist or was not recorded, for the end of a non-final pipeline stage, and for a capture
    that lacks what the mixture needs: nothing is guessed.
    """
    taps = _taps(capture)
    if layer is None:
        if len(taps) != 1:
            raise BadInput(f"layer: the captures hold {len(taps)} taps; name a layer id, one of {', '.join(map(str, _ids(taps)))}")
        layer = layer_id(next(iter(taps)))
    return _streams(taps, layer + offset, impl)


def compare(capture: Captures, layers: Iterable[int] | None = None, impl: str = "torch") -> "pd.DataFrame":
    """How far apart the two streams are, a row per layer id (default: every id that can be had).

    layer, tokens, blocks   the id, how many tokens, how many committed blocks the consumer reads
    cosine, cosine_p05, …   cosine of prefix and mixture per token: mean, 5%, 50% and 95% quantile
    norm_ratio              |prefix| / |mixture| per token: mean
    weight_0 …, weight_prefix   mean weight of each block and of the prefix; NaN for a block that the consumer does not read

    Raises BadInput as streams does.
    """
    import pandas as pd  # here, because the recorder of this package also runs in servers that have no pandas

    taps = _taps(capture)
    rows = []
    for i in _ids(taps) if layers is None else layers:
        s = _streams(taps, i, impl)
        a, b = s.prefix.double(), s.mixture.double()
        cosine = torch.nn.functional.cosine_similarity(a, b, -1)
        mean = s.weights.double().mean(0).tolist()
        row = {"layer": i, "tokens": len(a), "blocks": len(mean) - 1, "cosine": float(cosine.mean())}
        row |= {name: float(cosine.quantile(q)) for name, q in QUANTILES.items()}
        row |= {"norm_ratio": float((a.norm(dim=-1) / b.norm(dim=-1)).mean()), "weight_prefix": mean[-1]}
        rows.append(row | {f"weight_{j}": w for j, w in enumerate(mean[:-1])})
    blocks = [f"weight_{j}" for j in range(max((r["blocks"] for r in rows), default=0))]
    fixed = ["layer", "tokens", "blocks", "cosine", *QUANTILES, "norm_ratio"]
    return pd.DataFrame(rows, columns=[*fixed, *blocks, "weight_prefix"])


@torch.no_grad()
def taps_of(net: "TinyK3", tokens: Tensor, last: int | None = None, dtype: torch.dtype | None = None, **metadata: Any) -> Capture:
    """Every tap of the tiny model as one capture, teacher-forced on tokens [B, T] or [T]; the rows of a batch one after the other.

    last    keep the last so many tokens of each row; dtype: what activations are rounded to, default the model's. Keyword arguments
    add to the metadata.
    """
    from k3lab.tiny.model import new_collect

    tokens = tokens[None] if tokens.dim() == 1 else tokens
    collect = new_collect()
    net(tokens.to(net.device), collect=collect)
    keep = slice(None) if last is None else slice(-last, None)

    def rows(x: Tensor) -> Tensor:
        return x[:, keep].flatten(0, 1).to(dtype)

    taps, shapes = collect["taps"], net.config.shapes
    consumers = [*(m.attn_res for m in net.layers[1:]), net.out_res]
    tensors = {
        "bank": torch.stack([rows(x) for x in taps[-1]["bank"]]),
        "prefix": torch.stack([rows(t["prefix"]) for t in taps]), "pending": torch.stack([rows(t["pending"]) for t in taps]),
        "score_norm": torch.stack([c.norm for c in consumers]), "score_proj": torch.stack([c.proj for c in consumers]),
        "token_ids": tokens[:, keep].flatten().int(),
    }  # fmt: skip
    about = {
        "kind": "attn_res", "layers": list(range(shapes.num_layers)), "num_layers": shapes.num_layers, "eps": net.out_res.eps,
        "attn_res_block": shapes.attn_res_block, "dtype": str(tensors["prefix"].dtype).removeprefix("torch."), "model": "k3lab tiny K3",
    }  # fmt: skip
    return Capture(tensors, about | metadata)


Taps = Mapping[int, tuple[Capture, int | None]]


def _taps(capture: Captures) -> Taps:
    """Where each tap is: after which layer -> its capture, and its index there if that holds several."""
    found: dict[int, tuple[Capture, int | None]] = {}
    for c in _captures(capture):
        if c.kind != "attn_res":
            raise BadInput(f"{c.name}: kind: is {c.kind!r}; the streams at a tap need captures of kind 'attn_res'")
        layers, one = c.metadata.get("layers"), c.metadata.get("layer")
        if layers is None and one is None:
            raise BadInput(f"{c.name}: metadata layer: is missing; say after which layer (0-based) the tap sits")
        if "prefix" not in c.tensors:
            raise BadInput(f"{c.name}: prefix: is missing, expected {TENSORS['attn_res']['prefix']}")
        if layers is not None and (c.tensors["prefix"].dim() != 3 or len(layers) != len(c.tensors["prefix"])):
            shape = list(c.tensors["prefix"].shape)
            raise BadInput(f"{c.name}: prefix: shape {shape}, expected [{len(layers)}, T, hidden] for the {len(layers)} taps of layers")
        for i, tap in enumerate([one] if layers is None else layers):
            if tap in found:
                raise BadInput(
                    f"the tap after layer {tap} is in {found[tap][0].name} and in {c.name}; give the captures of one step and one rank"
                )
            found[tap] = (c, None if layers is None else i)
    if not found:
        raise BadInput("capture: no captures of kind 'attn_res' were given")
    return found


def _captures(capture: Captures) -> list[Capture]:
    if isinstance(capture, Capture):
        return [capture]
    if isinstance(capture, str | os.PathLike):
        path = Path(capture)
        if not path.is_dir():
            return [Capture.load(path)]
        inside = [Capture.load(p) for p in sorted(path.glob("*.safetensors"))]
        found = [c for c in inside if c.kind == "attn_res"]
        if not found:
            raise BadInput(f"{path}: none of the {len(inside)} captures in this folder is of kind 'attn_res'")
        return found
    return [c if isinstance(c, Capture) else Capture.load(c) for c in capture]


def _ids(taps: Taps) -> list[int]:
    """The layer ids that can be had, in order: the taps, the embedding if it is there, not the end of a non-final stage."""
    ids = sorted(layer_id(tap) for tap, (c, _) in taps.items() if not _crosses_stage(c, tap))
    return ([0] if _embedding(taps) is not None else []) + ids


def _embedding(taps: Taps) -> Tensor | None:
    """Layer id 0: recorded as such, or block 0, which is what layer 0 commits."""
    for c, _ in taps.values():
        if "embedding" in c.tensors:
            return c.tensors["embedding"]
        if "bank" in c.tensors and len(c.tensors["bank"]):
            return _bank(c, c.tensors["prefix"].shape[-2])[0]
    return None


def _bank(c: Capture, tokens: int) -> Tensor:
    """The bank as [blocks, T, hidden]; engines keep [T, blocks, hidden], told apart by the number of tokens."""
    bank = c.tensors["bank"]
    if bank.dim() == 3 and bank.shape[1] != tokens and bank.shape[0] == tokens:
        return bank.transpose(0, 1)
    return bank


def _crosses_stage(c: Capture, tap: int) -> bool:
    """True if the tap ends a pipeline stage that is not the last. Raises BadInput if the metadata cannot be true."""
    stage, count = c.metadata.get("pp_layers"), c.metadata.get("num_layers")
    if stage is None:
        return False
    if len(stage) != 2 or count is None or not 0 <= stage[0] <= tap < stage[1] <= count:
        raise BadInput(
            f"{c.name}: metadata pp_layers: {stage} with num_layers {count} cannot hold a tap after layer {tap}; "
            "give [first layer, first layer of the next stage], 0-based, and the layers of the whole model"
        )
    return tap + 1 == stage[1] < count


def _streams(taps: Taps, wanted: int, impl: str) -> Streams:
    counts = {c.metadata["num_layers"] for c, _ in taps.values() if "num_layers" in c.metadata}
    if len(counts) > 1:
        raise BadInput(f"capture: the captures are of models with {' and '.join(map(str, sorted(counts)))} layers; give those of one model")
    last = min(counts, default=None)
    if wanted < 0 or (last is not None and wanted > last):
        upto = "" if last is None else f" to {last} (after the last layer)"
        raise BadInput(f"layer: id {wanted} does not exist; ids run from 0 (the embedding){upto}; a tap after layer l has id l + 1")
    if wanted == 0:
        x = _embedding(taps)
        if x is None:
            raise BadInput("layer: id 0 is the embedding, and no capture holds it (tensor embedding, or the bank, whose block 0 it is)")
        return Streams(0, x, x, torch.ones(len(x), 1, device=x.device))
    if wanted - 1 not in taps:
        there = ", ".join(map(str, _ids(taps)))
        raise BadInput(f"layer: id {wanted} (after layer {wanted - 1}) was not recorded; the captures hold ids {there}")
    c, i = taps[wanted - 1]
    if _crosses_stage(c, wanted - 1):
        raise BadInput(
            f"{c.name}: layer id {wanted} ends a pipeline stage (layers {c.metadata['pp_layers']}) that is not the last: the consumer's "
            "weights are on the next rank; take another tap, or record it without pipeline parallelism"
        )
    x = {n: v if i is None or n == "bank" else v[i] for n, v in c.tensors.items() if n in TAP}
    if "pending" not in x and "pending" not in c.metadata.get("absent", []):
        raise BadInput(f'{c.name}: pending: is missing; if prefix already holds the MLP output, say so: metadata absent ["pending"]')
    n = _valid_blocks(c, wanted, last)
    if n:
        x["bank"] = _bank(c, x["prefix"].shape[0])
        if "eps" not in c.metadata:
            raise BadInput(f"{c.name}: metadata eps: is missing; give the epsilon of the consumer's norm")
    else:
        x = {name: v for name, v in x.items() if name in ("prefix", "pending")}
    try:
        out = attn_res(**x, num_blocks=n, eps=c.metadata.get("eps", 0.0), return_weights=True, impl=impl)
    except BadInput as e:
        raise BadInput(f"{c.name}: {e}") from e
    return Streams(wanted, out.prefix, out.o.to(out.prefix.dtype), out.weights.float())


def _valid_blocks(c: Capture, wanted: int, num_layers: int | None) -> int:
    """How many blocks the consumer of layer id `wanted` reads; 0 for a model without AttnRes."""
    block, bank = c.metadata.get("attn_res_block"), c.tensors.get("bank")
    if block == 0:
        return 0
    if bank is None:
        raise BadInput(f"{c.name}: bank: is missing; record it, or say attn_res_block 0 for a model without AttnRes")
    if block is None:
        return len(_bank(c, c.tensors["prefix"].shape[-2]))  # a capture of one tap holds the blocks its consumer reads
    return math.ceil(wanted / block)
