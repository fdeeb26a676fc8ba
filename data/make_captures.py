#!/usr/bin/env python3
"""Record the captures in data/captures/: KDA calls of real serving steps of the tiny Kimi-K3 on held-out prompts, and AttnRes taps.

    python data/make_captures.py --out data/captures                                    about 30 s on one core
    python data/make_captures.py --weights /tmp/t/tiny_k3.safetensors --out /tmp/caps   the same with other weights

The model computes in fp32; the token tensors of a KDA call (q k v raw_g raw_beta output_gate) are rounded to bf16 before the call and o
is bf16, as in an engine that serves in bf16, so a file holds exactly what the kernels read and wrote. States are fp32, in
mixed_128_decodes bf16 (a bf16 state pool). conv_state is rounded to bf16 in the file alone.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from k3lab import __version__
from k3lab.attn_res.streams import taps_of
from k3lab.capture import Capture
from k3lab.kda.call import KdaCall
from k3lab.provenance import sha256
from k3lab.tiny import data, model, serving
from k3lab.tiny.batch import Batch, KdaStep
from k3lab.tiny.cards import made_on, made_with, write_text

HERE = Path(__file__).resolve().parent
BF16 = torch.bfloat16
WHOLE_CHUNKS = (64, 128, 64, 192, 128)  # prompts of the requests that decode: no ragged chunk, so a prefill leaves them sound
RAGGED = (1, 63, 64, 65, 200)
ARRIVE = 6  # the step at which the second group of prompts arrives: the mixed step that is recorded
DRAFTS = 3


@dataclass(frozen=True)
class Recording:
    """One capture to write: its file name, the step and how it came about."""

    name: str
    step: KdaStep
    story: str
    padding: str = "zero"
    heads: int | None = None  # the first heads only: what one tensor-parallel rank would record
    results: tuple[str, ...] = ("o", "final_state")


def held_out_prompts(lengths: tuple[int, ...], seed: int) -> list[Tensor]:
    """Prompts of exactly these lengths, BOS included: held-out code, prose and arithmetic in turn, each cut to its length."""
    gen = torch.Generator().manual_seed(seed)
    library = data.standard_library(max_bytes=2_000_000)
    texts = {d: b"\n\n".join(library[d][True]) for d in ("code", "prose")}
    stream = data.problems(seed, held_out=True)
    texts["arithmetic"] = "".join(next(stream).text for _ in range(50)).encode()
    prompts = []
    for i, n in enumerate(lengths):
        text = texts[data.DOMAINS[i % 3]]
        start = int(torch.randint(0, len(text) - n, (1,), generator=gen))
        prompts.append(data.encode(text[start : start + n - 1]))
    return prompts


def record_steps(net: model.TinyK3, prompts: list[Tensor], wanted: Callable[[KdaCall], bool], **options) -> list[KdaStep]:
    """Serve prompts and keep the KDA layer steps whose call is wanted; stops after the first step that had any."""
    seen: list[KdaStep] = []

    def hook(step: KdaStep) -> None:
        if wanted(step.call):
            seen.append(step)

    serving.serve(net, prompts, kda_dtype=BF16, hook=hook, **options)
    return [s for s in seen if s.call.step == seen[0].call.step]


def mixed_steps(net: model.TinyK3, seed: int, route: str, padding: str, ragged: tuple[int, ...], layers: list[int]) -> list[KdaStep]:
    """The step at which five requests decode and prompts of the lengths `ragged` arrive, at some layers."""
    prompts = held_out_prompts(WHOLE_CHUNKS + ragged, seed)
    arrivals = [0] * len(WHOLE_CHUNKS) + [ARRIVE] * len(ragged)
    return record_steps(
        net, prompts, lambda c: c.step == ARRIVE and c.layer in layers, route=route, padding=padding, arrivals=arrivals,
        max_new=ARRIVE + 2, stop=b"", max_steps=ARRIVE + 1,
    )  # fmt: skip


def crowded_step(net: model.TinyK3, seed: int, decodes: int, layer: int) -> KdaStep:
    """A mixed step of `decodes` decodes and one prefill of 100 tokens, served from a bf16 state pool."""
    asked = [p.tokens for p in data.arithmetic_prompts(decodes, seed, max_shots=0)]
    late = held_out_prompts((100,), seed)
    steps = record_steps(
        net, asked + late, lambda c: c.num_decodes == decodes < c.num_sequences and c.layer == layer, route="split",
        state_dtype=BF16, arrivals=[0] * decodes + [8], max_seqs=decodes + 1, max_new=16, stop=b"", max_steps=12,
    )  # fmt: skip
    return steps[0]


def lookup_drafts(tokens: Tensor, n: int) -> Tensor:
    """n draft tokens by prompt lookup: what followed the latest earlier occurrence of the last two tokens (else the last token again)."""
    ids = tokens.tolist()
    for at in range(len(ids) - 3, 0, -1):
        if ids[at : at + 2] == ids[-2:]:
            found = ids[at + 2 : at + 2 + n]
            return torch.tensor(found + [ids[-1]] * (n - len(found)))
    return torch.full((n,), ids[-1])


def speculative_step(net: model.TinyK3, seed: int, layer: int) -> KdaStep:
    """An interleaved step: sequences 0 and 2 verify DRAFTS drafts, 1, 3 and 4 decode plainly.

    A first verification gives the counts of accepted tokens; its accepted rows alone are then run on the state before it, so the recorded
    step starts from states that are rolled back.
    """
    prompts = held_out_prompts((90, 70, 130, 64, 100), seed)
    n = len(prompts)
    spec = torch.tensor([True, False, True, False, False])
    cache = net.new_cache(n + 1, 400)
    slots = list(range(1, n + 1))
    net.step(Batch(torch.cat([p[:-1] for p in prompts]), [len(p) - 1 for p in prompts], slots, [0] * n), cache, kda_dtype=BF16)
    seen: list[KdaStep] = []

    def run(rows: list[Tensor], on, accepted: Tensor | None, step: int, hook=None) -> Tensor:
        context = [len(p) - 1 for p in prompts]
        batch = Batch(torch.cat(rows), [len(r) for r in rows], slots, context, 0, spec, accepted, step)
        return net.step(batch, on, "gather_split", kda_dtype=BF16, all_rows=True, hook=hook)

    def proposed() -> list[Tensor]:
        return [torch.cat([p[-1:], lookup_drafts(p, DRAFTS)]) if s else p[-1:] for p, s in zip(prompts, spec.tolist(), strict=True)]

    rows = proposed()
    picked = model.greedy(run(rows, cache.clone(), None, 0)).split([len(r) for r in rows])
    accepted = torch.tensor([1 + int((r[1:] == g[:-1]).long().cumprod(0).sum()) for r, g in zip(rows, picked, strict=True)])
    run([r[:k] for r, k in zip(rows, accepted.tolist(), strict=True)], cache, None, 0)
    # the tokens that were kept: the accepted drafts, then the model's own next token
    prompts = [torch.cat([p, g[:k].cpu()]) for p, g, k in zip(prompts, picked, accepted.tolist(), strict=True)]
    run(proposed(), cache, accepted, 1, lambda s: seen.append(s) if s.call.layer == layer else None)
    return seen[0]


def first_heads(step: KdaStep, heads: int) -> tuple[KdaCall, dict[str, Tensor]]:
    """The call and the other tensors of a step, over its first heads alone: heads do not mix inside a KDA call."""
    c, full = step.call, step.call.q.shape[1]
    token = {n: getattr(c, n)[:, :heads] for n in ("q", "k", "v", "raw_g", "raw_beta", "output_gate", "initial_state")}
    call = replace(c, A_log=c.A_log[:heads], dt_bias=c.dt_bias[:heads], **token)

    def channels(x: Tensor) -> Tensor:
        return x.unflatten(1, (3, full, -1))[:, :, :heads].flatten(1, 3)

    return call, {
        "o": step.result.o[:, :heads],
        "final_state": step.result.final_state[:, :heads],
        "conv_state": channels(step.conv_state),
        "conv_state_after": channels(step.conv_state_after),
    }


def kda_capture(r: Recording, about: dict) -> Capture:
    """The Capture of a recording, with conv state, slots and token ids beside the call."""
    heads = r.heads or r.step.call.q.shape[1]
    call, rest = first_heads(r.step, heads)
    call = replace(call, cu_seqlens=call.cu_seqlens.int())
    return Capture.from_call(
        call,
        **{n: rest[n] for n in r.results},
        conv_state=rest["conv_state"].to(BF16),
        conv_state_after=rest["conv_state_after"].to(BF16),
        state_indices=r.step.state_indices.int(),
        token_ids=r.step.token_ids.int(),
        route=r.step.route,
        padding=r.padding,
        tp_rank=0,
        tp_size=r.step.call.q.shape[1] // heads,
        **about,
    )


def tap_capture(net: model.TinyK3, seed: int, layer: int, about: dict) -> Capture:
    """What the AttnRes mixture after `layer` reads, teacher-forced on 96 held-out tokens; o is the mixture (the consumer's input)."""
    tokens = held_out_prompts((96,), seed)[0]
    collect = model.new_collect()
    with torch.no_grad():
        net(tokens[None].to(net.device), collect=collect)
    tap, consumer = collect["taps"][layer], net.layers[layer + 1].attn_res
    tensors = {
        "bank": torch.stack([x[0] for x in tap["bank"]]), "prefix": tap["prefix"][0], "pending": tap["pending"][0],
        "score_norm": consumer.norm, "score_proj": consumer.proj, "token_ids": tokens.int(), "o": collect["mixture"][layer][0],
    }  # fmt: skip
    shapes = net.config.shapes
    sizes = {"num_layers": shapes.num_layers, "attn_res_block": shapes.attn_res_block, "eps": consumer.eps, "dtype": "float32"}
    return Capture(tensors, {"kind": "attn_res", "layer": layer, "stream": "mixture", **sizes, **about})


def taps_capture(net: model.TinyK3, seed: int, about: dict) -> Capture:
    """Every tap of the model in bf16: the last 32 tokens of 128 of code, prose and arithmetic."""
    tokens = torch.stack(held_out_prompts((128, 128, 128), seed))
    return taps_of(net, tokens, last=32, dtype=BF16, domains=list(data.DOMAINS), **about)


def card(name: str, c: Capture, story: str, made: dict, seed: int, path: Path) -> str:
    """The data card of one capture, every number out of the capture."""
    tensors = "\n".join(
        f"| {n} | {list(x.shape)} | {str(x.dtype).removeprefix('torch.')} | {int((~torch.isfinite(x.float())).sum()) or ''} |"
        for n, x in sorted(c.tensors.items())
    )
    lengths = ""
    if "cu_seqlens" in c.tensors:
        n = c.tensors["cu_seqlens"].diff().tolist()
        ones = next((i for i, k in enumerate(n) if k != 1), len(n))
        shown = f"{ones} x 1, then {n[ones:]}" if ones > 8 else n
        lengths = f"\n| sequences | {len(n)} of lengths {shown}, num_decodes {c.metadata['num_decodes']} |"
    meta = ", ".join(f"{k} {v}" for k, v in sorted(c.metadata.items()) if k not in ("weights_sha256", "made_by"))
    return f"""# {name}.safetensors

| | |
|---|---|
| what | {story} |{lengths}
| metadata | {meta} |
| made by | `data/make_captures.py`, seed {seed}, {made_on(made)} |
| source | held-out prompts (standard library of Python {made["python"]}, generated arithmetic) run through tiny_k3.safetensors |
| weights sha256 | `{c.metadata["weights_sha256"]}` |
| licence | prompts out of the standard library: PSF licence; the rest: this project's |
| sha256 | `{sha256(path)}` |

| tensor | shape | dtype | not finite |
|---|---|---|---|
{tensors}
"""


def recordings(net: model.TinyK3, seed: int) -> list[Recording]:
    """Every KDA capture of data/captures/."""
    kda = net.kda_layers
    deep = kda[(2 * len(kda)) // 3]
    out = []
    for s in mixed_steps(net, seed, "split", "zero", RAGGED, [kda[1], deep]):
        story = "a mixed step: five decodes, then prefills of lengths 1, 63, 64, 65, 200; decodes took the recurrent kernel"
        one = s.call.layer != kda[1]  # both heads once is enough, for size
        story += "; the first head alone (rank 0 of 2)" if one else ""
        out.append(Recording(f"mixed_split_layer{s.call.layer}", s, story, heads=1 if one else None))
    for s in mixed_steps(net, seed, "chunk_all", "nan", (1, 64, 63), [kda[0]]):
        story = (
            "a mixed step as a user with the fault would capture it: decodes went through the chunk kernel, its undefined rows were set "
            "to NaN (set here, not observed on a GPU), o and final_state hold NaN but for the prefill of 64 tokens; the inputs are sound: "
            "every earlier chunk was full, and this is the first layer"
        )
        out.append(Recording(f"mixed_chunk_all_nan_layer{s.call.layer}", s, story, padding="nan"))
    story = "128 decodes and a prefill of 100 tokens, state pool in bf16; the first head alone (rank 0 of 2), final_state left out for size"
    out.append(Recording("mixed_128_decodes", crowded_step(net, seed, 128, kda[1]), story, heads=1, results=("o",)))
    story = f"speculative and plain rows interleaved: sequences 0 and 2 verify {DRAFTS} prompt-lookup drafts, 1, 3, 4 decode one token"
    out.append(Recording("speculative_interleaved", speculative_step(net, seed, kda[1]), story))
    return out


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--weights", type=Path, default=HERE / "tiny_k3.safetensors")
    ap.add_argument("--out", type=Path, default=HERE / "captures")
    ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args()
    torch.set_num_threads(1)  # one order of additions, so the same weights give the same bytes
    net = model.load(a.weights)
    about = {"model": "k3lab tiny K3", "engine": "k3lab.tiny.serving", "engine_version": __version__, "weights_sha256": sha256(a.weights)}
    made = made_with("cpu")
    a.out.mkdir(parents=True, exist_ok=True)
    captures = [(r.name, r.story, kda_capture(r, about)) for r in recordings(net, a.seed)]
    layer = net.config.shapes.attn_res_block  # the layer that commits the second block
    story = f"what the mixture after layer {layer} reads: the committed blocks, the prefix, the pending MLP output, its consumer's weights"
    captures.append((f"attn_res_layer{layer}", story, tap_capture(net, a.seed, layer, about)))
    story = (
        "every AttnRes tap: prefix and pending MLP output after each layer, all committed blocks, and the weights of each tap's consumer; "
        "32 tokens of each domain, teacher-forced behind 96 others, activations rounded to bf16"
    )
    captures.append(("attn_res_taps", story, taps_capture(net, a.seed, about)))
    for name, story, c in tqdm(captures, desc="captures", file=sys.stderr, ascii=True):
        path = c.save(a.out / f"{name}.safetensors")
        write_text(a.out / f"{name}.md", card(name, c, story, made, a.seed, path))


if __name__ == "__main__":
    main()
