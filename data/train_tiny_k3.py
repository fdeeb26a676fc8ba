#!/usr/bin/env python3
"""Train the tiny Kimi-K3 of data/: weights, the numbers measured on them (tiny_k3.json) and the data card (tiny_k3.md).

    python data/train_tiny_k3.py --device cuda --out data                 about 4 minutes on one H200
    python data/train_tiny_k3.py --device cpu --size small --out /tmp/t   about 2 minutes on two cores

The number of steps is fixed, not the time, and every draw comes from --seed: on a CPU the same seed gives the same weights bit for bit,
on a GPU up to the order of atomic additions.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import Tensor
from tqdm import tqdm

from k3lab.provenance import sha256
from k3lab.tiny import data, model
from k3lab.tiny.cards import made_on, made_with, write_text

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True)
class Recipe:
    """One training run: what is trained, on how much, for how long."""

    config: model.TinyConfig
    steps: int
    batch: int = 96
    window: int = 384
    rate: float = 2e-3
    warmup: int = 100
    problems: int = 200_000
    max_code_bytes: int | None = 24_000_000
    shares: tuple[float, float, float] = (0.42, 0.10, 0.48)  # of data.DOMAINS
    eval_windows: int = 128
    eval_problems: int = 1000


RECIPES = {
    "full": Recipe(model.TinyConfig(), steps=1300),
    "small": Recipe(
        model.SMALL, steps=300, batch=16, window=128, warmup=30, problems=5_000, max_code_bytes=1_000_000, eval_windows=16, eval_problems=16
    ),
}


def training_batch(corpus: data.Corpus, recipe: Recipe, gen: torch.Generator) -> Tensor:
    """One batch [B, T + 1] with the recipe's share of each domain."""
    counts = [round(recipe.batch * s) for s in recipe.shares[1:]]
    counts.insert(0, recipe.batch - sum(counts))
    parts = [data.windows(corpus.train[d], n, recipe.window + 1, gen) for d, n in zip(data.DOMAINS, counts, strict=True) if n]
    return torch.cat(parts)


def parameter_groups(net: model.TinyK3) -> list[dict]:
    """Weight decay on the matrices of projections alone: not on gates' biases, norms, convolutions and the embedding."""
    decay = [p for n, p in net.named_parameters() if p.dim() == 2 and not n.endswith(("dt_bias", "conv", "embed.weight"))]
    rest = [p for p in net.parameters() if all(p is not d for d in decay)]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def train(net: model.TinyK3, corpus: data.Corpus, recipe: Recipe, seed: int) -> dict:
    """AdamW, cosine rate, gradients clipped at norm 1; returns the loss curve. Stops with a message if the loss is not finite."""
    device = net.device
    gen = torch.Generator().manual_seed(seed)
    opt = torch.optim.AdamW(parameter_groups(net), lr=recipe.rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    every = max(1, recipe.steps // 60)
    curve, skipped = [], torch.zeros((), device=device)
    start = time.perf_counter()
    bar = tqdm(range(recipe.steps), desc="train", file=sys.stderr, mininterval=5, ascii=True)
    for step in bar:
        progress = step / recipe.steps
        rate = recipe.rate * min(1, (step + 1) / recipe.warmup) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in opt.param_groups:
            group["lr"] = rate
        tokens = training_batch(corpus, recipe, gen)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = net(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        finite = torch.isfinite(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        skipped += ~finite
        for g in grads:
            g.copy_(torch.where(finite, g, 0.0))  # one bad batch must not reach the weights; it is counted
        opt.step()
        if step % every == 0 or step == recipe.steps - 1:
            value = float(loss.detach())
            if not math.isfinite(value) or float(skipped) > 0.01 * recipe.steps:
                raise SystemExit(f"train: loss {value} at step {step}, {int(skipped)} batches without a finite gradient; lower the rate")
            curve.append([step, value])
            bar.set_postfix(loss=f"{value:.4f}")
    seconds = time.perf_counter() - start
    return {"loss_curve_nats": curve, "seconds": seconds, "steps": recipe.steps, "skipped_batches": int(skipped)}


@torch.no_grad()
def bits_per_byte(net: model.TinyK3, corpus: data.Corpus, recipe: Recipe, seed: int) -> dict[str, float]:
    """Cross-entropy on held-out windows, by domain, in bits per token (a token is a byte, or the BOS of a document)."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for d in data.DOMAINS:
        total = 0.0
        batches = data.windows(corpus.held_out[d], recipe.eval_windows, recipe.window + 1, gen).split(32)
        for t in batches:
            total += float(F.cross_entropy(net(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten(), reduction="sum"))
        out[d] = total / (recipe.eval_windows * recipe.window) / math.log(2)
    return out


@torch.no_grad()
def exact_match(net: model.TinyK3, n: int, seed: int, max_new: int = 80) -> dict:
    """Greedy answers to n held-out problems by the teacher-forced forward, re-run at every byte: no cache, nothing to trust."""
    correct = 0
    prompts = data.arithmetic_prompts(n, seed)
    for at in tqdm(range(0, n, 250), desc="exact match", file=sys.stderr, ascii=True):
        part = prompts[at : at + 250]
        length = torch.tensor([len(p.tokens) for p in part], device=net.device)
        grid = torch.zeros(len(part), int(length.max()) + max_new, dtype=torch.long, device=net.device)
        for i, p in enumerate(part):
            grid[i, : len(p.tokens)] = p.tokens.to(net.device)
        rows, first = torch.arange(len(part), device=net.device), length.clone()
        done = torch.zeros(len(part), dtype=torch.bool, device=net.device)
        for _ in range(max_new):
            with torch.autocast(net.device.type, torch.bfloat16, enabled=net.device.type == "cuda"):
                logits = net(grid[:, : int(length.max())])[rows, length - 1]
            grid[rows, length] = model.greedy(logits)
            length += 1
            done |= (grid[rows, length - 1] == data.STOP[-1]) & (grid[rows, length - 2] == data.STOP[-1])
            if bool(done.all()):
                break
        correct += sum(data.is_correct(grid[i, int(first[i]) : int(length[i])], p.problem) for i, p in enumerate(part))
    low, high = binomtest(correct, n).proportion_ci(0.95, "wilson")
    return {
        "correct": correct,
        "total": n,
        "rate": correct / n,
        "wilson_95": [low, high],
        "prompt_seed": seed,
        "max_new": max_new,
        "max_shots": data.MAX_SHOTS,
    }


@torch.no_grad()
def gate_statistics(net: model.TinyK3, corpus: data.Corpus, recipe: Recipe, seed: int) -> list[dict]:
    """Per KDA layer, on held-out text of the three domains: quantiles of -g (nats per token) and of the Frobenius norm of Akk (chunk 64).

    Akk[i,j] = beta_i sum_c k_ic k_jc exp(G_ic - G_jc), j < i, in float64.
    """
    gen = torch.Generator().manual_seed(seed)
    length = recipe.window // 64 * 64
    tokens = torch.cat([data.windows(corpus.held_out[d], max(4, recipe.eval_windows // 8), length, gen) for d in data.DOMAINS])
    rows = []

    def probe(layer: int, seen: dict) -> None:
        k, g, beta = (x.double() for x in (seen["k"], seen["g"], seen["beta"]))
        k, g, beta = (x.unflatten(2, (-1, 64)) for x in (k, g, beta))  # [B, H, NT, 64, ...]
        G = g.cumsum(3)
        mid = G[:, :, :, 31:32]
        Akk = ((k * (G - mid).exp()) @ (k * (mid - G).exp()).transpose(-1, -2)).tril(-1) * beta[..., None]
        norm = Akk.square().sum((-1, -2)).sqrt().flatten()
        decay = -g.flatten()
        decay = decay[torch.randint(0, len(decay), (200_000,), generator=gen).to(decay.device)]  # quantile() takes 16 million at most
        at = torch.tensor(QUANTILES, dtype=torch.float64, device=norm.device)
        rows.append(
            {
                "layer": layer,
                "decay_nats": dict(zip(map(str, QUANTILES), torch.quantile(decay, at).tolist(), strict=True)),
                "akk_norm": dict(zip(map(str, QUANTILES), torch.quantile(norm, at).tolist(), strict=True)),
                "akk_norm_max": float(norm.max()),
                "beta_mean": float(beta.mean()),
                "chunks": len(norm),
            }
        )

    net(tokens, probe=probe)
    return rows


def card(r: dict) -> str:
    """The data card of the weights, every number out of the record r."""
    em, corpus, made, recipe, training = r["exact_match"], r["corpus"], r["made_with"], r["recipe"], r["training"]
    shares = ", ".join(f"{d} {s:.0%}" for d, s in zip(data.DOMAINS, recipe["shares"], strict=True))
    sizes = "\n".join(
        f"| {d} | {corpus[f'{d}_train_tokens']:,} | {corpus[f'{d}_held_out_tokens']:,} | {r['bits_per_byte'][d]:.4f} |"
        for d in data.DOMAINS
    )
    gates = "\n".join(
        f"| {g['layer']} | " + " | ".join(f"{g['decay_nats'][str(q)]:.2g}" for q in QUANTILES) + f" | {g['beta_mean']:.2f} | "
        f"{g['akk_norm']['0.5']:.2f} | {g['akk_norm']['0.99']:.2f} | {g['akk_norm_max']:.2f} |"
        for g in r["gates"]
    )
    full = ", ".join(map(str, r["full_attention_layers"]))
    command = (
        f"python data/train_tiny_k3.py --device {made['device_type']} --size {r['size']} --seed {r['seed']} --steps {training['steps']}"
    )
    return f"""# tiny_k3.safetensors: a trained tiny Kimi-K3

| | |
|---|---|
| what | {r["parameters"]:,} parameters: {r["layers"]} layers, hidden {r["hidden"]}, {r["heads"]} KDA heads of {r["head_dim"]}, \
full attention (no positions, output gate) at layers {full} (0-based), AttnRes block {r["attn_res_block"]}, bytes + BOS + MASK |
| storage | bf16, `A_log` and `dt_bias` fp32; configuration in the metadata; computed in fp32 when loaded |
| made by | `{command}` |
| training | {training["steps"]} steps of {recipe["batch"]} x {recipe["window"]} bytes in {training["seconds"]:.0f} s; \
{training["skipped_batches"]} batches skipped for a non-finite gradient |
| made on | {made_on(made)} |
| source | the standard library of Python {corpus["python"]} (code; docstrings, language reference and licence as prose) \
and arithmetic word problems of `k3lab/tiny/data.py`; mix {shares} |
| corpus sha256 | `{corpus["sha256"]}` |
| licence | source text: PSF licence; generated problems and weights: this project's |
| sha256 | `{r["sha256"]}` |

Held out: files by a hash of their path, problems by a hash of the question's text (the numbers of a held-out problem may occur in
training under other names). Measured on the stored (rounded) weights.

| domain | train tokens | held-out tokens | held-out bits per byte |
|---|---|---|---|
{sizes}

Exact match on held-out arithmetic problems, greedy, 0 to {em["max_shots"]} solved problems before the question:
**{em["correct"]} of {em["total"]}** ({em["rate"]:.1%}, 95% Wilson interval {em["wilson_95"][0]:.1%} to {em["wilson_95"][1]:.1%}; \
prompt seed {em["prompt_seed"]}).

Gates on held-out text, by KDA layer: quantiles of the decay -g in nats per token (lower bound of g: {r["lower_bound"]}), mean beta, \
and the Frobenius norm of Akk over {r["gates"][0]["chunks"]} (chunk, head) pairs of 64 tokens, in float64.

| layer | {" | ".join(f"decay q{q:g}" for q in QUANTILES)} | beta | Akk median | Akk q0.99 | Akk max |
|---|{"---|" * (len(QUANTILES) + 4)}
{gates}
"""


def run(recipe: Recipe, size: str, device: str, seed: int, out: Path) -> dict:
    """Train, save, measure on what was saved, and write the record and the card."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    corpus = data.build_corpus(recipe.problems, recipe.max_code_bytes, seed)
    described = corpus.describe()
    print(f"corpus: {described}", file=sys.stderr, flush=True)
    corpus = data.Corpus(*({d: x.to(device) for d, x in part.items()} for part in (corpus.train, corpus.held_out)))
    net = model.TinyK3(recipe.config).to(device)
    training = train(net, corpus, recipe, seed)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "tiny_k3.safetensors"
    model.save(net, path, {"seed": str(seed), "size": size, "made_by": "data/train_tiny_k3.py"})
    net = model.load(path, device)
    s = recipe.config.shapes
    record = {
        "size": size, "seed": seed, "training": training, "corpus": described,
        "recipe": {"batch": recipe.batch, "window": recipe.window, "rate": recipe.rate, "warmup": recipe.warmup, "shares": recipe.shares},
        "parameters": sum(p.numel() for p in net.parameters()), "layers": s.num_layers, "hidden": s.hidden, "heads": s.num_heads,
        "head_dim": s.head_dim, "attn_res_block": s.attn_res_block, "lower_bound": s.lower_bound,
        "full_attention_layers": [i for i in range(s.num_layers) if s.is_full_attention(i)],
        "made_with": made_with(device),
        "sha256": sha256(path),
        "bits_per_byte": bits_per_byte(net, corpus, recipe, seed + 1),
        "exact_match": exact_match(net, recipe.eval_problems, seed + 2),
        "gates": gate_statistics(net, corpus, recipe, seed + 3),
    }  # fmt: skip
    write_text(out / "tiny_k3.json", json.dumps(record, indent=1) + "\n")
    write_text(out / "tiny_k3.md", card(record))
    return record


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--size", choices=tuple(RECIPES), default="full")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--steps", type=int, help="instead of the recipe's")
    ap.add_argument("--out", type=Path, default=Path(__file__).parent)
    a = ap.parse_args()
    recipe = RECIPES[a.size]
    if a.steps:
        recipe = replace(recipe, steps=a.steps)
    r = run(recipe, a.size, a.device, a.seed, a.out)
    print(
        f"{a.out / 'tiny_k3.safetensors'}: bits per byte {r['bits_per_byte']}, exact match {r['exact_match']['rate']:.3f}", file=sys.stderr
    )


if __name__ == "__main__":
    main()
