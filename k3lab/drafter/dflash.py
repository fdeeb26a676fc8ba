"""A DFlash drafter for the tiny Kimi-K3: one parallel pass drafts a block from the target's own features.

The block at anchor a is the last token and block - 1 MASK tokens, at positions a .. a + block - 1. With f_t the target's features at
position t, taken at several taps, and c_t = RMSNorm(W f_t), every layer attends, without a causal mask within the block:

    x <- x + W_o softmax(q(x) [k(c_t), t < a; k(x)]^T / sqrt(d)) [v(c_t), t < a; v(x)];      x <- x + MLP(RMSNorm(x))

with x normed before q, k, v, and rotary positions on q and k. Row j of the block gives the logits of the token at position a + j.
Embedding and head are the target's and are not stored.

Source: DFlash (z-lab/dflash), in the layout that engines serve. Here, each row of the block also has a learned vector, which a short
training needs and DFlash does without.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from k3lab.errors import BadInput
from k3lab.provenance import sha256
from k3lab.tiny.model import MASK, Mlp, NoLargerThan, RmsNorm, TinyK3, read_weights

FORMAT = "k3lab-dflash-1"
STREAMS = ("prefix", "mixture")
INDEX_BASE = "after layer i, 0-based"
ROPE_BASE = 10_000.0
NORM_EPS = 1e-6
REMAKE = "make one with data/train_drafters.py"


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes of a drafter; taps are the target's layers (0-based) after which its features are read. Raises BadInput if they clash."""

    taps: tuple[int, ...] = (1, 5, 9)
    block: int = 8
    layers: int = 3
    heads: int = 4
    mlp_width: int = 768
    hidden: int = 256

    def __post_init__(self) -> None:
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise BadInput(f"drafter config: taps {self.taps} must be increasing layer numbers from 0 on")
        if self.block < 2 or self.layers < 1:
            raise BadInput(f"drafter config: block={self.block}, layers={self.layers}; a block drafts from 2 tokens and 1 layer on")
        if self.heads < 1 or self.hidden % (2 * self.heads):
            raise BadInput(f"drafter config: hidden={self.hidden} does not split into {self.heads} heads of an even size")


@dataclass(frozen=True)
class Origin:
    """What a drafter was trained on: the stream, the seed, and the sha256 of the target's file."""

    stream: str
    seed: int
    target_sha256: str


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [..., d], pairs (i, i + d/2); cos, sin [..., d/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, c: DFlashConfig):
        super().__init__()
        d = c.hidden
        self.heads, self.dim = c.heads, d // c.heads
        self.attn_norm, self.mlp_norm = RmsNorm(d, NORM_EPS), RmsNorm(d, NORM_EPS)
        self.q, self.kv, self.out = (nn.Linear(d, n, bias=False) for n in (d, 2 * d, d))
        self.mlp = Mlp(d, c.mlp_width)

    def forward(self, x: Tensor, context: Tensor, seen: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, R, D] rows of all blocks; context [B, T, D]; seen [B, 1, R, T + R] bool; cos, sin [B, 1, T + R, d/2]."""
        n = self.attn_norm(x)
        rows = x.shape[1]
        q = self.q(n).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)  # [B, H, R, d]
        kv = self.kv(torch.cat([context, n], 1)).unflatten(-1, (2, self.heads, self.dim))
        k, v = (y.transpose(1, 2) for y in kv.unbind(2))  # [B, H, T + R, d]
        q, k = _rotate(q, cos[:, :, -rows:], sin[:, :, -rows:]), _rotate(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(o.transpose(1, 2).flatten(-2)).to(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).to(x.dtype)


class DFlash(nn.Module):
    """The drafter; `origin` says what it was trained on, None before training."""

    def __init__(self, config: DFlashConfig | None = None):
        super().__init__()
        self.config = c = config or DFlashConfig()
        self.origin: Origin | None = None
        self.fuse = nn.Linear(len(c.taps) * c.hidden, c.hidden, bias=False)
        self.context_norm = RmsNorm(c.hidden, NORM_EPS)
        self.row = nn.Parameter(torch.randn(c.block, c.hidden) * 0.3)
        self.layers = nn.ModuleList(_Layer(c) for _ in range(c.layers))
        self.out_norm = RmsNorm(c.hidden, NORM_EPS)

    def context(self, features: Tensor) -> Tensor:
        """The fused features [..., T, hidden] of the target's features [..., T, taps, hidden]; position by position."""
        want = (len(self.config.taps), self.config.hidden)
        if tuple(features.shape[-2:]) != want:
            raise BadInput(f"features: the last axes are {tuple(features.shape[-2:])}, this drafter reads [taps, hidden] = {want}")
        return self.context_norm(self.fuse(features.flatten(-2)).to(features.dtype))

    def forward(self, target: TinyK3, context: Tensor, last_tokens: Tensor, anchors: Tensor) -> Tensor:
        """Logits [B, A, block - 1, VOCAB] of the tokens after the anchors, every anchor a draft of its own.

        context      [B, T, hidden] of `context`; a block sees positions below its anchor, whatever stands above
        last_tokens  [B, A] int64, the token at each anchor: already emitted, not yet through the target
        anchors      [B, A] int64, positions, at most T
        Raises BadInput if the target has another width.
        """
        c = self.config
        if target.config.shapes.hidden != c.hidden:
            raise BadInput(f"target: hidden size {target.config.shapes.hidden}, this drafter was made for {c.hidden}")
        B, A = anchors.shape
        T, device = context.shape[1], context.device
        ids = torch.full((B, A, c.block), MASK, device=device)
        ids[..., 0] = last_tokens
        x = (target.embed(ids) + self.row).flatten(1, 2)  # [B, R, D], R = A block

        at = torch.arange(T, device=device)
        position = (anchors[..., None] + torch.arange(c.block, device=device)).flatten(1)  # [B, R]
        owner = torch.arange(A, device=device).repeat_interleave(c.block)  # [R]
        before = at < anchors[:, owner, None]  # [B, R, T]
        own = (owner[:, None] == owner).expand(B, -1, -1)  # [B, R, R]
        seen = torch.cat([before, own], -1)[:, None]

        wide = torch.promote_types(x.dtype, torch.float32)
        half = c.hidden // c.heads // 2
        turn = ROPE_BASE ** (-torch.arange(half, device=device, dtype=wide) / half)
        angle = torch.cat([at.expand(B, -1), position], 1)[:, None, :, None] * turn  # [B, 1, T + R, d/2]
        cos, sin = angle.cos(), angle.sin()
        for layer in self.layers:
            x = layer(x, context, seen, cos, sin)
        return target.head(self.out_norm(x).unflatten(1, (A, c.block))[:, :, 1:]).to(x.dtype)


def features(collect: dict[str, list[Tensor]], taps: Sequence[int], stream: str, offset: int = 0) -> Tensor:
    """[..., T, taps, hidden] of a TinyK3 `collect` at layers tap + offset.

    stream  "prefix", "mixture" (k3lab.tiny.model.new_collect), or "zeros", the floor: what a drafter guesses without the target
    Raises BadInput for another stream and for a tap that lands before layer 0 or after the last.
    """
    if stream not in (*STREAMS, "zeros"):
        raise BadInput(f'stream: {stream!r} is not one of {STREAMS} or "zeros"')
    by_layer = collect["mixture" if stream == "zeros" else stream]
    outside = [t for t in taps if not 0 <= t + offset < len(by_layer)]
    if outside:
        raise BadInput(f"taps {tuple(taps)} at offset {offset:+d}: layer {outside[0] + offset} is outside 0..{len(by_layer) - 1}")
    out = torch.stack([by_layer[t + offset] for t in taps], -2)
    return torch.zeros_like(out) if stream == "zeros" else out


def save(drafter: DFlash, path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
    """Write the weights in bf16, with configuration and origin in the metadata; a temporary name, then renamed."""
    if drafter.origin is None:
        raise BadInput(f"{path}: the drafter has no origin; set it to what it was trained on, or no reader could tell its stream")
    path, o = Path(path), drafter.origin
    known = {"format": FORMAT, "config": json.dumps(asdict(drafter.config)), "stream": o.stream, "index_base": INDEX_BASE}
    known |= {"seed": str(o.seed), "target_sha256": o.target_sha256}
    tensors = {name: x.detach().to("cpu", torch.bfloat16).contiguous() for name, x in drafter.state_dict().items()}
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={**known, **(metadata or {})})
    os.replace(part, path)


def load(
    path: str | os.PathLike,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    target: str | os.PathLike | None = None,
) -> DFlash:
    """The drafter in `path`, computing in dtype, its `origin` set.

    Raises BadInput for a file that is not one of ours, and, if `target` names a file, for a drafter that was trained on another.
    """
    tensors, meta = read_weights(path, FORMAT, REMAKE)
    try:
        sizes = json.loads(meta["config"])
        config = DFlashConfig(**{**sizes, "taps": tuple(sizes["taps"])})
        origin = Origin(meta["stream"], int(meta["seed"]), meta["target_sha256"])
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise BadInput(f"{path}: configuration or origin missing or malformed in the metadata ({e!r}); {REMAKE}") from e
    if origin.stream not in STREAMS:
        raise BadInput(f"{path}: trained on stream {origin.stream!r}, not one of {STREAMS}; {REMAKE}")
    if target is not None and sha256(target) != origin.target_sha256:
        raise BadInput(
            f"{path}: trained on the target with sha256 {origin.target_sha256[:16]}…, but {target} has {sha256(target)[:16]}…; "
            "use that target, or train the drafter again with data/train_drafters.py"
        )
    try:
        if config.layers > len(tensors):
            raise ValueError(f"{config.layers} layers of {len(tensors)} tensors")
        with NoLargerThan(tensors):
            drafter = DFlash(config)
        drafter.load_state_dict(tensors)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as e:
        raise BadInput(f"{path}: tensors do not fit the configuration in its metadata: {type(e).__name__}: {e}") from e
    drafter.origin = origin
    return drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)
