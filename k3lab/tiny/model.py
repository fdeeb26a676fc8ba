"""A tiny Kimi-K3: KDA layers, full-attention layers without positions, Block Attention Residuals; real layout, small sizes.

Two forwards over the same trunk: `TinyK3.forward` is teacher-forced over [B, T] (training, reference), `TinyK3.step` serves a
packed ragged batch through `kda_layer_step`, with conv, recurrent and KV state by slot, slot 0 the null slot.

AttnRes, per consumer, over the committed block states and the running prefix (a, p: learned norm weight and projection, [hidden]):

    score(x) = (a * p) . x * rsqrt(mean(x^2) + eps),      mixture = sum softmax(score) x           (the raw x, before the norm)

Not modelled: the mixture of experts and its SiTU activation (a SwiGLU MLP stands in), MLA's low-rank projections, tensor parallelism.
Sizes: k3lab.shapes.TINY. Mathematics: the KDA recurrence in k3lab.kda.reference.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from k3lab.errors import BadInput
from k3lab.kda.call import KdaCall
from k3lab.kda.reference import chunk_kda_core, l2norm, log_decay, output_norm_gate
from k3lab.shapes import TINY, Shapes
from k3lab.tiny.batch import Batch, Cache, KdaStep, rows_of

BOS, MASK, VOCAB = 256, 257, 258  # bytes are their own ids; MASK is the drafters' block token
TRAIN_CHUNK = 32  # exponents reach lower_bound * 16 = -80 around the chunk's middle row: inside fp32
FORMAT = "k3lab-tiny-k3-1"
FP32_NAMES = ("A_log", "dt_bias")  # what inference engines keep in fp32


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the tiny model: `shapes`, the heads of its full-attention layers, its MLP width and the rank of the decay gate."""

    shapes: Shapes = TINY
    attention_heads: int = 4
    mlp_width: int = 768
    gate_rank: int = 128

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "TinyConfig":
        d = json.loads(text)
        return TinyConfig(**{**d, "shapes": Shapes(**d["shapes"])})


SMALL = TinyConfig(replace(TINY, num_layers=5, hidden=64, num_heads=2, head_dim=32, attn_res_block=2), 2, 128, 32)


def _linear(i: int, o: int, gain: float = 0.6) -> nn.Linear:
    layer = nn.Linear(i, o, bias=False)
    nn.init.normal_(layer.weight, std=gain / i**0.5)
    return layer


class Kda(nn.Module):
    """Projections of a KDA layer, its causal depthwise convolution and its gates."""

    def __init__(self, c: TinyConfig):
        super().__init__()
        s = c.shapes
        d = s.num_heads * s.head_dim
        self.heads, self.dim, self.lower_bound, self.eps = s.num_heads, s.head_dim, s.lower_bound, s.norm_eps
        self.qkv = _linear(s.hidden, 3 * d)
        self.conv = nn.Parameter(torch.cat([torch.randn(s.conv_width - 1, 3 * d) * 0.2, torch.ones(1, 3 * d)]))  # [width, 3HK]
        self.decay_down, self.decay_up = _linear(s.hidden, c.gate_rank), _linear(c.gate_rank, d)
        self.beta = _linear(s.hidden, s.num_heads)
        self.gate = _linear(s.hidden, d)
        self.A_log = nn.Parameter(torch.zeros(s.num_heads))
        # spread the decay of an untrained layer over about 1e-3 to 3 nats a token, evenly in the logarithm
        start = torch.empty(s.num_heads, s.head_dim).uniform_(math.log(1e-3), math.log(3.0)).exp() / -s.lower_bound
        self.dt_bias = nn.Parameter(torch.log(start / (1 - start)))
        self.norm = nn.Parameter(torch.ones(s.head_dim))
        self.out = _linear(d, s.hidden, 0.4)

    def project(self, n: Tensor) -> dict[str, Tensor]:
        """What needs no neighbour: qkv [..., 3HK] before the convolution, raw_g and output_gate [..., H, K], raw_beta [..., H]."""
        w = self.conv.dtype
        per_head = (*n.shape[:-1], self.heads, self.dim)
        return {
            "qkv": self.qkv(n).to(w),
            "raw_g": self.decay_up(self.decay_down(n)).to(w).view(per_head),
            "raw_beta": self.beta(n).to(w),
            "output_gate": self.gate(n).to(w).view(per_head),
        }

    def split_heads(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [..., H, K] of the convolved z [..., 3HK]."""
        return F.silu(z).view(*z.shape[:-1], 3, self.heads, self.dim).unbind(-3)

    def forward(self, n: Tensor, probe: dict | None = None) -> Tensor:
        """Teacher-forced layer output [B, T, hidden] of n [B, T, hidden], from empty states; probe, if given, receives k, g, beta."""
        p = self.project(n)
        b, t = n.shape[:2]
        width = self.conv.shape[0]
        padded = F.pad(p["qkv"], (0, 0, width - 1, 0))
        z = sum(padded[:, i : i + t] * self.conv[i] for i in range(width))
        with torch.autocast(n.device.type, enabled=False):  # the recurrence stays in fp32
            q, k, v = (x.transpose(1, 2) for x in self.split_heads(z))  # [B, H, T, K]
            q, k = l2norm(q) * self.dim**-0.5, l2norm(k)
            g = log_decay(p["raw_g"], self.A_log, self.dt_bias, self.lower_bound).transpose(1, 2)
            beta = torch.sigmoid(p["raw_beta"]).transpose(1, 2)
            o, _ = chunk_kda_core(q, k, v, g, beta, q.new_zeros(b, self.heads, self.dim, self.dim), TRAIN_CHUNK)
            if probe is not None:
                probe.update(k=k, g=g, beta=beta)
            y = output_norm_gate(o.transpose(1, 2), self.norm, p["output_gate"], self.eps)
        return self.out(y.flatten(-2))


class FullAttention(nn.Module):
    """Causal softmax attention without positions, with a sigmoid output gate."""

    def __init__(self, c: TinyConfig):
        super().__init__()
        d = c.shapes.hidden
        self.heads, self.dim = c.attention_heads, d // c.attention_heads
        self.qkv, self.gate, self.out = _linear(d, 3 * d), _linear(d, d), _linear(d, d, 0.4)

    def split_heads(self, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [..., heads, dim]."""
        return self.qkv(n).view(*n.shape[:-1], 3, self.heads, self.dim).unbind(-3)

    def close(self, o: Tensor, n: Tensor) -> Tensor:
        """Output gate and projection of o [..., heads, dim]."""
        return self.out(o.flatten(-2) * torch.sigmoid(self.gate(n)))

    def forward(self, n: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self.split_heads(n))
        return self.close(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), n)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up, self.down = _linear(hidden, 2 * width), _linear(width, hidden, 0.4)

    def forward(self, n: Tensor) -> Tensor:
        a, b = self.up(n).chunk(2, -1)
        return self.down(F.silu(a) * b)


class AttnRes(nn.Module):
    """The learned norm weight and projection of one consumer, and its mixture over the sources."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.norm, self.proj, self.eps = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.zeros(hidden)), eps

    def forward(self, sources: list[Tensor]) -> Tensor:
        """The mixture of sources, each [..., hidden]; a single source is its own mixture."""
        if len(sources) == 1:
            return sources[0]
        # a * p is folded first, in the weights' precision: normalising and rounding x before the projection is another result
        w = self.norm * self.proj
        scores = [(x * w).sum(-1) * torch.rsqrt(x.square().mean(-1) + self.eps) for x in sources]
        p = torch.stack(scores, -1).softmax(-1)
        return sum(x * p[..., i : i + 1] for i, x in enumerate(sources))


class RmsNorm(nn.Module):
    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, c: TinyConfig, index: int):
        super().__init__()
        s = c.shapes
        self.attn_res, self.mlp_res = AttnRes(s.hidden, s.norm_eps), AttnRes(s.hidden, s.norm_eps)
        self.attn_norm, self.mlp_norm = RmsNorm(s.hidden, s.norm_eps), RmsNorm(s.hidden, s.norm_eps)
        self.attn = FullAttention(c) if s.is_full_attention(index) else Kda(c)
        self.mlp = Mlp(s.hidden, c.mlp_width)


class TinyK3(nn.Module):
    """The model. `forward` for training and as the teacher-forced reference, `step` for serving."""

    def __init__(self, config: TinyConfig | None = None):
        super().__init__()
        self.config = c = config or TinyConfig()
        s = c.shapes
        self.embed = nn.Embedding(VOCAB, s.hidden)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(s.num_layers))
        self.out_res, self.out_norm = AttnRes(s.hidden, s.norm_eps), RmsNorm(s.hidden, s.norm_eps)
        self.head = _linear(s.hidden, VOCAB, 0.5)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def kda_layers(self) -> list[int]:
        return [i for i, m in enumerate(self.layers) if isinstance(m.attn, Kda)]

    def _trunk(self, tokens: Tensor, attend: Callable[[int, Tensor], Tensor], collect: dict | None) -> Tensor:
        """Normed output [..., hidden] of tokens [...]; attend(layer, n) is the attention side of one layer."""
        block = self.config.shapes.attn_res_block
        prefix, bank = self.embed(tokens), []
        for i, m in enumerate(self.layers):
            mixture = m.attn_res([*bank, prefix])
            if collect is not None and i:
                collect["mixture"].append(mixture)  # the stream after layer i - 1 under its consumer's weights
            y = attend(i, m.attn_norm(mixture)).to(prefix.dtype)
            if i % block == 0:
                bank.append(prefix)
                prefix = y
            else:
                prefix = prefix + y
            pending = m.mlp(m.mlp_norm(m.mlp_res([*bank, prefix]))).to(prefix.dtype)
            if collect is not None:
                collect["taps"].append({"bank": list(bank), "prefix": prefix, "pending": pending})
            prefix = prefix + pending
            if collect is not None:
                collect["prefix"].append(prefix)
        mixture = self.out_res([*bank, prefix])
        if collect is not None:
            collect["mixture"].append(mixture)
        return self.out_norm(mixture)

    def forward(self, tokens: Tensor, collect: dict | None = None, probe: Callable[[int, dict], None] | None = None) -> Tensor:
        """Teacher-forced logits [B, T, VOCAB] of tokens [B, T], from empty states.

        collect (see `new_collect`) receives the streams after every layer; probe(layer, {"k", "g", "beta"}) is called for every KDA
        layer with the prepared keys [B, H, T, K], log-decays (natural log) and beta [B, H, T].
        """

        def attend(i: int, n: Tensor) -> Tensor:
            attn = self.layers[i].attn
            if probe is None or not isinstance(attn, Kda):
                return attn(n)
            seen: dict = {}
            y = attn(n, seen)
            probe(i, seen)
            return y

        return self.head(self._trunk(tokens, attend, collect)).to(self.embed.weight.dtype)

    def new_cache(self, slots: int, max_len: int, state_dtype: torch.dtype | None = None, token_rows: int = 0) -> Cache:
        """Zeroed state for `slots` slots (the null slot 0 included) of at most max_len tokens.

        state_dtype of the recurrent pool: default the model's; torch.bfloat16 halves it, as engines offer. token_rows: memory for the
        states by token of speculative steps of at most so many rows; without it each step takes new memory.
        """
        s = self.config.shapes
        d = s.num_heads * s.head_dim
        w = self.embed.weight
        cache = Cache([], [], [], [])
        for m in self.layers:
            kda = isinstance(m.attn, Kda)
            cache.conv.append(w.new_zeros(slots, 3 * d, s.conv_width - 1) if kda else None)
            cache.recurrent.append(w.new_zeros(slots, s.num_heads, s.head_dim, s.head_dim, dtype=state_dtype) if kda else None)
            shape = (slots, max_len, self.config.attention_heads, s.hidden // self.config.attention_heads)
            cache.keys.append(None if kda else w.new_zeros(shape))
            cache.values.append(None if kda else w.new_zeros(shape))
        if token_rows:
            wide = torch.promote_types(w.dtype, torch.float32)
            cache.token_states = [None if r is None else r.new_empty(token_rows, *r.shape[1:], dtype=wide) for r in cache.recurrent]
        return cache

    @torch.no_grad()
    def step(
        self,
        batch: Batch,
        cache: Cache,
        route: str = "split",
        impl: str = "torch",
        padding: str | Callable[[int], Tensor] = "zero",
        all_rows: bool = False,
        kda_dtype: torch.dtype | None = None,
        hook: Callable[[KdaStep], None] | None = None,
        collect: dict | None = None,
    ) -> Tensor:
        """One serving step: logits [N, VOCAB] of each sequence's last row (all_rows: [T, VOCAB]); cache is updated in place.

        route, impl and padding go to kda_layer_step; padding may also be a function of the layer that returns a bool [N, H] (True:
        the undefined rows of that sequence and head are NaN in this launch). kda_dtype: what the token tensors of the KDA calls are
        rounded to, as in an engine that computes in bf16; default none. hook sees every KDA layer. Raises BadInput for a batch
        that does not fit the cache.
        """
        from k3lab.kda.layer import kda_layer_step  # training needs torch alone

        batch.check(cache)
        s = self.config.shapes
        r = rows_of(batch, s.conv_width, self.device)
        tokens = batch.tokens.to(self.device)
        null_rows = r.row_slot == 0
        all_live = min(batch.slots) > 0
        spec_mask = None if batch.spec_mask is None else batch.spec_mask.to(self.device)

        def kda(i: int, attn: Kda, n: Tensor) -> Tensor:
            p = attn.project(n)
            conv_state = cache.conv[i][r.slots]
            fresh = ~r.has_state[:, None, None]
            conv_state = conv_state.masked_fill(fresh, 0.0)  # a reused slot holds another request's rows
            source = torch.cat([conv_state.transpose(1, 2).flatten(0, 1), p["qkv"]])  # [N (width - 1) + T, 3HK]
            z = (source[r.conv_rows] * attn.conv).sum(1)
            after = source[r.conv_keep].transpose(1, 2)
            q, k, v = attn.split_heads(z)
            states = None if cache.token_states is None else cache.token_states[i][: len(n)]
            call = KdaCall(
                q=q, k=k, v=v, raw_g=p["raw_g"], raw_beta=p["raw_beta"], A_log=attn.A_log.detach(), dt_bias=attn.dt_bias.detach(),
                cu_seqlens=r.cu, initial_state=cache.recurrent[i][r.slots], has_initial_state=r.has_state & r.live,
                output_gate=p["output_gate"], norm_weight=attn.norm.detach(), lower_bound=attn.lower_bound, num_decodes=batch.num_decodes,
                spec_mask=spec_mask, num_accepted_tokens=batch.num_accepted_tokens, eps=attn.eps, layer=i, step=batch.step,
                state_indices=None if all_live else r.slots,
            )  # fmt: skip
            if kda_dtype is not None:
                call = call.to(dtype=kda_dtype)
            out = kda_layer_step(call, route=route, impl=impl, padding=padding(i) if callable(padding) else padding, states=states)
            live = r.slots[r.live]
            cache.recurrent[i][live] = out.final_state[r.live].to(cache.recurrent[i].dtype)
            cache.conv[i][live] = after[r.live]
            if hook is not None:
                hook(KdaStep(call, out, conv_state, after, torch.tensor(batch.slots), batch.tokens.cpu(), route, source))
            y = out.y.to(n.dtype).masked_fill(null_rows[:, None, None], 0.0)
            return attn.out(y.flatten(-2))

        def full(i: int, attn: FullAttention, n: Tensor) -> Tensor:
            q, k, v = attn.split_heads(n)
            alive = ~null_rows
            at = (r.row_slot[alive], r.row_pos[alive])
            cache.keys[i][at], cache.values[i][at] = k[alive], v[alive]
            o = torch.empty_like(q)
            # a rejected draft may be NaN where plain decoding never goes: its row must not reach those before it (0 * NaN again)
            leaks = spec_mask is not None and not bool((torch.isfinite(k) & torch.isfinite(v)).all())
            for rows, where, q_pos, slots, dead in r.blocks:
                grid = q.new_zeros(*where.shape, *q.shape[1:])
                grid[where] = q[rows]
                used, outs = dead.shape[1], []
                for part in [slice(j, j + 1) for j in range(where.shape[1])] if leaks else [slice(None)]:
                    mask = torch.arange(used, device=q.device) <= q_pos[:, part, None]  # [n, rows, used]
                    # a mask alone lets a stale NaN of the slot's last owner through: 0 * NaN
                    hidden = (dead | ~mask.any(1) if leaks else dead)[:, :, None, None]
                    keys, values = (c[i][slots, :used].masked_fill_(hidden, 0.0).transpose(1, 2) for c in (cache.keys, cache.values))
                    outs.append(F.scaled_dot_product_attention(grid[:, part].transpose(1, 2), keys, values, attn_mask=mask[:, None]))
                o[rows] = torch.cat(outs, 2).transpose(1, 2)[where]
            return attn.close(o, n).masked_fill(null_rows[:, None], 0.0)

        def attend(i: int, n: Tensor) -> Tensor:
            attn = self.layers[i].attn
            return kda(i, attn, n) if isinstance(attn, Kda) else full(i, attn, n)

        h = self._trunk(tokens, attend, collect)
        return self.head(h if all_rows else h[r.cu[1:] - 1])


def new_collect() -> dict[str, list]:
    """An empty `collect`, with by layer: prefix (after the layer), mixture (what its consumer reads: the next layer's attention side,
    after the last the output side), taps ({"bank": [n][..., hidden], "prefix", "pending"}: the prefix before the MLP output is added)."""
    return {"prefix": [], "mixture": [], "taps": []}


def greedy(logits: Tensor) -> Tensor:
    """Greedy byte of logits [..., VOCAB]; a row with NaN gives id 0, the stream of zeros that vLLM's sampler shows for NaN logits.

    torch.argmax would return the index of a NaN, here also 0 when the whole row is NaN; stated so that a partial NaN is the same.
    """
    ids = logits[..., :BOS].argmax(-1)
    return ids.masked_fill(torch.isnan(logits).any(-1), 0)


def save(model: TinyK3, path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
    """Write weights in bf16 (A_log and dt_bias in fp32) with the configuration in the metadata; a temporary name, then renamed."""
    path = Path(path)
    tensors = {
        name: x.detach().cpu().to(torch.float32 if name.rsplit(".", 1)[-1] in FP32_NAMES else torch.bfloat16).contiguous()
        for name, x in model.state_dict().items()
    }
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"format": FORMAT, "config": model.config.to_json(), **(metadata or {})})
    os.replace(part, path)


class NoLargerThan(TorchFunctionMode):
    """Within it a model of more elements than the file's tensors raises ValueError: its configuration is not that of the file."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        self.left = sum(x.numel() for x in tensors.values())

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.empty, torch.ones, torch.zeros, torch.randn):
            self.left -= math.prod(args[0] if isinstance(args[0], tuple | list) else args)
            if self.left < 0:
                raise ValueError("it has more elements than the file")
        return func(*args, **(kwargs or {}))


def read_weights(path: str | os.PathLike, form: str, remake: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a weight file whose metadata format is `form`. Raises BadInput, with remake as what to do, for another."""
    try:
        with safe_open(path, framework="pt") as f:
            meta = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (safe_open is not a dict)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as e:
        raise BadInput(f"{path}: not a readable safetensors file ({e}); {remake}") from e
    if meta.get("format") != form:
        raise BadInput(f"{path}: metadata format is {meta.get('format')!r}, expected {form!r}; {remake}")
    return tensors, meta


def load(path: str | os.PathLike, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> TinyK3:
    """The model in `path`, computing in dtype (float32 or float64). Raises BadInput for a file that is not one of ours."""
    tensors, meta = read_weights(path, FORMAT, "make one with data/train_tiny_k3.py")
    try:
        config = TinyConfig.from_json(meta["config"])
        if not 0 < config.shapes.num_layers <= len(tensors):
            raise ValueError(f"{config.shapes.num_layers} layers of {len(tensors)} tensors")
        with NoLargerThan(tensors):
            model = TinyK3(config)
        model.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError, RecursionError, ArithmeticError, AttributeError) as e:
        raise BadInput(f"{path}: tensors do not fit the configuration in its metadata: {type(e).__name__}: {e}") from e
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
