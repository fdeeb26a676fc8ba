"""Attention Residuals in torch: the float64 definition, which is the truth here, and its folded form, which takes real sizes.

A consumer (a layer's attention or MLP side, or the model's output) reads a mixture of the committed block states bank[0..n-1]
and the running prefix, with one learned norm weight a and one projection p (both [hidden]):

    score(x) = (a * p) . x * rsqrt(mean(x^2) + eps)        weights = softmax over the n + 1 sources        mixture = sum weights * x

x is the raw source, before any norm. The prefix is prefix + pending (the MLP output of the layer before, kept as a delta by
engines), rounded to the storage dtype before anything reads it. With no block the mixture is the prefix itself.
A layer l of block size B whose l % B == 0 then commits that prefix as block l // B, which is block n: n = ceil(l / B).
Sources: the Attention Residuals paper (arXiv 2603.15031); vLLM's attn_res for Kimi-K3 (vllm/models/kimi_k3/nvidia/ops/attn_res.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from k3lab.errors import BadInput


class Mixture(NamedTuple):
    """What attn_res returns.

    o        [T, hidden] the mixture, or its RMSNorm with an output norm, in the storage dtype (reference: float64)
    prefix   [T, hidden] prefix + pending in the storage dtype; the tensor that was given where nothing is pending
    weights  [T, n + 1] fp32 (reference: float64), blocks in order and the prefix last; None unless asked for
    """

    o: Tensor
    prefix: Tensor
    weights: Tensor | None


def check(
    prefix: Tensor, score_norm: Tensor | None, score_proj: Tensor | None, bank: Tensor | None, pending: Tensor | None,
    num_blocks: int | None, output_norm: Tensor | None, commit: bool,
) -> int:  # fmt: skip
    """The number of valid blocks. Looks at shapes, dtypes and devices alone, so it never waits for a device. Raises BadInput."""
    if prefix.dim() != 2 or not prefix.is_floating_point():
        raise BadInput(f"prefix: shape {list(prefix.shape)} dtype {prefix.dtype}, expected [T, hidden] of a floating type")
    shape, dtype = prefix.shape, prefix.dtype
    if pending is not None and (pending.shape != shape or pending.dtype != dtype):
        raise BadInput(f"pending: shape {list(pending.shape)} dtype {pending.dtype}, expected prefix's {list(shape)} {dtype}")
    held = 0
    if bank is not None:
        if bank.dim() != 3 or bank.shape[1:] != shape or bank.dtype != dtype:
            raise BadInput(
                f"bank: shape {list(bank.shape)} dtype {bank.dtype}, expected [blocks, {shape[0]}, {shape[1]}] {dtype} as prefix has it; "
                "an engine's [T, blocks, hidden] is bank.transpose(0, 1)"
            )
        held = len(bank)
    n = held - commit if num_blocks is None else num_blocks
    if not 0 <= n <= held - commit:
        more = " and room for the one that is committed" if commit else ""
        raise BadInput(f"num_blocks: {n}, but the bank holds {held} blocks; it must hold the valid ones{more}")
    if n and (score_norm is None or score_proj is None):
        raise BadInput(f"score_norm, score_proj: missing; {n} blocks and the prefix cannot be weighed without the consumer's weights")
    given = {"bank": bank, "pending": pending, "score_norm": score_norm, "score_proj": score_proj, "output_norm": output_norm}
    for name, x in given.items():
        if x is None:
            continue
        if name not in ("bank", "pending") and (x.shape != shape[1:] or not x.is_floating_point()):
            raise BadInput(f"{name}: shape {list(x.shape)} dtype {x.dtype}, expected [{shape[1]}] of a floating type")
        if x.device != prefix.device:
            raise BadInput(f"{name}: is on {x.device}, prefix on {prefix.device}; move them to one")
    return n


def _new_prefix(prefix: Tensor, pending: Tensor | None, bank: Tensor | None, n: int, commit: bool) -> Tensor:
    """The prefix as a source, rounded to its dtype, and committed where asked. fp32 sums of two 16-bit floats round as exact ones do."""
    if pending is not None:
        prefix = prefix + pending if prefix.element_size() > 2 else (prefix.float() + pending.float()).to(prefix.dtype)
    if commit:
        bank[n] = prefix
    return prefix


def attn_res_reference(
    prefix: Tensor, score_norm: Tensor | None = None, score_proj: Tensor | None = None, bank: Tensor | None = None,
    pending: Tensor | None = None, num_blocks: int | None = None, eps: float = 1e-5, output_norm: Tensor | None = None,
    output_eps: float | None = None, commit: bool = False, return_weights: bool = False, dtype: torch.dtype = torch.float64,
) -> Mixture:  # fmt: skip
    """The definition, word for word, in dtype: every source is normalised, weighted by a, projected on p. Arguments as attn_res."""
    n = check(prefix, score_norm, score_proj, bank, pending, num_blocks, output_norm, commit)
    prefix = _new_prefix(prefix, pending, bank, n, commit)
    x = torch.stack([*(bank[:n] if n else ()), prefix], 1).to(dtype)  # [T, n + 1, hidden]
    if n:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * score_norm.to(dtype)
        weights = (normed @ score_proj.to(dtype)).softmax(-1)
    else:
        weights = x.new_ones(len(x), 1)
    o = (weights[..., None] * x).sum(1)
    if output_norm is not None:
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + (eps if output_eps is None else output_eps)) * output_norm.to(dtype)
    return Mixture(o, prefix, weights if return_weights else None)


def attn_res_torch(
    prefix: Tensor, score_norm: Tensor | None = None, score_proj: Tensor | None = None, bank: Tensor | None = None,
    pending: Tensor | None = None, num_blocks: int | None = None, eps: float = 1e-5, output_norm: Tensor | None = None,
    output_eps: float | None = None, commit: bool = False, return_weights: bool = False,
) -> Mixture:  # fmt: skip
    """The folded form, one source at a time, in fp32 (float64 for float64 sources). Arguments as attn_res.

    a * p is folded in fp32: normalising and rounding x before the projection is another result.
    """
    n = check(prefix, score_norm, score_proj, bank, pending, num_blocks, output_norm, commit)
    prefix = _new_prefix(prefix, pending, bank, n, commit)
    acc = torch.promote_types(prefix.dtype, torch.float32)
    sources = [*(bank[:n] if n else ()), prefix]
    weights = torch.ones(len(prefix), 1, dtype=acc, device=prefix.device)
    if n:
        w = score_norm.to(acc) * score_proj.to(acc)
        scores = [(x.to(acc) @ w) * torch.rsqrt(x.to(acc).square().mean(-1) + eps) for x in sources]
        weights = torch.stack(scores, -1).softmax(-1)
    o = weights[:, :1] * sources[0].to(acc)
    for i, x in enumerate(sources[1:], 1):
        o.addcmul_(weights[:, i : i + 1], x.to(acc))
    if output_norm is not None:
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + (eps if output_eps is None else output_eps)) * output_norm.to(acc)
    return Mixture(o.to(prefix.dtype), prefix, weights if return_weights else None)
