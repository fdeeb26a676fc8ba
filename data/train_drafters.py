#!/usr/bin/env python3
"""Train DFlash drafters for the tiny Kimi-K3, one on the mixture and one on the prefix per seed, and count what each accepts.

    python data/train_drafters.py --device cuda --seeds 0 1 2 --out data                 about 8 minutes on one H200
    python data/train_drafters.py --device cpu --size small --steps 20 --out /tmp/t      about a minute, on any target

The two drafters of a seed start from the same weights and see the same batches and anchors. Every draw comes from the seed. A seed is
counted as soon as it is trained, so a run that is cut keeps what is done. Weights are kept of the first seed, counts of all.
Writes drafter_{mixture,prefix}.safetensors, drafter_counts.csv, drafter_prompts.{csv,safetensors}, drafters.json and the two cards.
"""

import argparse
import copy
import csv
import io
import json
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from k3lab.drafter import counts, dflash
from k3lab.errors import BadInput
from k3lab.provenance import sha256
from k3lab.tiny import data, model
from k3lab.tiny.batch import Batch
from k3lab.tiny.cards import made_on, made_with, write_text

FEEDS = [(stream, offset) for stream in dflash.STREAMS for offset in (-1, 0, 1)] + [("zeros", 0)]
GRAM = 16  # uniqueness of a continuation: distinct 16-grams over all
ASKED = b"\nAnswer:"


@dataclass(frozen=True)
class Recipe:
    """One training run and its evaluation: sizes of the drafter, of the batches and of the prompts."""

    drafter: dflash.DFlashConfig
    steps: int
    batch: int = 64  # half corpus, half the target's own continuations
    window: int = 384
    anchors: int = 32  # per sequence
    rate: float = 1.5e-3
    warmup: int = 100
    loss_decay: float = 4.0  # position j of a block weighs exp(-j / loss_decay)
    shares: tuple[float, float, float] = (0.42, 0.10, 0.48)  # of data.DOMAINS, as the target was trained
    problems: int = 200_000
    max_code_bytes: int | None = 24_000_000
    own_texts: int = 4096
    own_prompt: int = 64
    own_batch: int = 2048
    prompts: int = 200  # held-out prompts per domain, at most
    prompt_len: int = 128
    new_tokens: int = 128


RECIPES = {
    "full": Recipe(dflash.DFlashConfig(), steps=1400),
    "small": Recipe(
        dflash.DFlashConfig(taps=(1, 2, 3), layers=1, heads=2, mlp_width=64), steps=60, batch=8, window=96, anchors=8, warmup=10,
        problems=5_000, max_code_bytes=1_000_000, own_texts=24, own_prompt=32, own_batch=24, prompts=8, prompt_len=32, new_tokens=32,
    ),
}  # fmt: skip


@torch.no_grad()
def continuations(target: model.TinyK3, prompts: Tensor, new_tokens: int, batch: int, what: str) -> Tensor:
    """Greedy continuations [N, P + new_tokens] of prompts [N, P], by the serving step."""
    done = []
    length = prompts.shape[1]
    bar = tqdm(total=-(-len(prompts) // batch) * new_tokens, desc=what, file=sys.stderr, mininterval=5, ascii=True)
    for part in prompts.split(batch):
        n = len(part)
        slots = list(range(1, n + 1))
        cache = target.new_cache(n + 1, length + new_tokens)
        tokens = torch.cat([part, part.new_zeros(n, new_tokens)], 1)
        new, now = part, 0
        for at in range(length, length + new_tokens):
            step = Batch(new.flatten(), [new.shape[1]] * n, slots, [now] * n, n if now else 0)
            tokens[:, at] = model.greedy(target.step(step, cache))
            new, now = tokens[:, at : at + 1], at
            bar.update()
        done.append(tokens)
    bar.close()
    return torch.cat(done)


def by_share(n: int, shares: tuple[float, ...]) -> list[int]:
    """n split by shares of data.DOMAINS."""
    rest = [round(n * s) for s in shares[1:]]
    return [n - sum(rest), *rest]


def draw(corpus: data.Corpus, n: int, length: int, shares: tuple[float, ...], gen: torch.Generator) -> Tensor:
    """n training windows [n, length] with the share of each domain."""
    parts = zip(data.DOMAINS, by_share(n, shares), strict=True)
    return torch.cat([data.windows(corpus.train[d], m, length, gen) for d, m in parts if m])


def held_out_prompts(corpus: data.Corpus, recipe: Recipe, gen: torch.Generator) -> tuple[Tensor, list[str]]:
    """At most recipe.prompts windows of each domain's held-out text that nowhere overlap; an arithmetic one ends where it asks."""
    rows, domain = [], []
    length = recipe.prompt_len
    for d in data.DOMAINS:
        stream = corpus.held_out[d].cpu()
        if d == "arithmetic":
            ends, last = [], 0
            at = stream.unfold(0, len(ASKED), 1).eq(torch.tensor(list(ASKED), dtype=stream.dtype)).all(1).nonzero().flatten()
            for end in (at + len(ASKED)).tolist():
                if end - last >= length:
                    ends.append(end)
                    last = end
        else:
            ends = list(range(length, len(stream) + 1, length))
        picked = [ends[i] for i in torch.randperm(len(ends), generator=gen)[: recipe.prompts].tolist()]
        rows += [stream[end - length : end].long() for end in picked]
        domain += [d] * len(picked)
    return torch.stack(rows), domain


def training_loss(
    target: model.TinyK3, drafters: dict[str, dflash.DFlash], tokens: Tensor, anchors: Tensor, decay: float
) -> dict[str, Tensor]:
    """Cross-entropy of each drafter in nats, over tokens [B, T] at anchors [B, A], from one forward of the target.

    sum_j w_j CE(token at a + j), w_j = exp(-(j - 1) / decay) / sum of them, mean over anchors
    """
    collect = model.new_collect()
    with torch.no_grad():
        target(tokens, collect)
    some = next(iter(drafters.values())).config
    ahead = torch.arange(1, some.block, device=tokens.device)
    labels = tokens.gather(1, (anchors[..., None] + ahead).flatten(1)).view(*anchors.shape, -1)
    weight = torch.exp(-(ahead - 1) / decay)
    weight /= weight.sum()
    out = {}
    for stream, drafter in drafters.items():
        context = drafter.context(dflash.features(collect, some.taps, stream))
        logits = drafter(target, context, tokens.gather(1, anchors), anchors)
        ce = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none").view(labels.shape)
        out[stream] = (ce.mean((0, 1)) * weight).sum()
    return out


def train(target: model.TinyK3, corpus: data.Corpus, own: Tensor, recipe: Recipe, seed: int) -> tuple[dict[str, dflash.DFlash], dict]:
    """The two drafters of a seed, and the record of their training. AdamW, cosine rate, gradients of each clipped at norm 1."""
    device = target.device
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    first = dflash.DFlash(recipe.drafter).to(device)
    drafters = {"mixture": first, "prefix": copy.deepcopy(first)}
    decay = [p for m in drafters.values() for n, p in m.named_parameters() if p.dim() == 2 and n != "row"]
    rest = [p for m in drafters.values() for n, p in m.named_parameters() if p.dim() < 2 or n == "row"]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        lr=recipe.rate, betas=(0.9, 0.95), fused=device.type == "cuda",
    )  # fmt: skip
    half = recipe.batch // 2
    # a corpus window is drafted from nearly its start, the target's own text from the target's first token
    low = torch.tensor([min(8, recipe.own_prompt)] * (recipe.batch - half) + [recipe.own_prompt] * half)[:, None]
    every = max(1, recipe.steps // 60)
    curve, skipped = [], torch.zeros(len(drafters), device=device)
    start = time.perf_counter()
    bar = tqdm(range(recipe.steps), desc=f"train seed {seed}", file=sys.stderr, mininterval=5, ascii=True)
    for step in bar:
        progress = step / recipe.steps
        rate = recipe.rate * min(1, (step + 1) / recipe.warmup) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in opt.param_groups:
            group["lr"] = rate
        ours = own[torch.randint(0, len(own), (half,), generator=gen).to(device)]
        tokens = torch.cat([draw(corpus, recipe.batch - half, recipe.window, recipe.shares, gen), ours])
        where = torch.rand(recipe.batch, recipe.anchors, generator=gen)
        anchors = (low + where * (recipe.window - recipe.drafter.block + 1 - low)).long().to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = training_loss(target, drafters, tokens, anchors, recipe.loss_decay)
        opt.zero_grad(set_to_none=True)
        sum(losses.values()).backward()
        for i, drafter in enumerate(drafters.values()):
            finite = torch.isfinite(torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0))
            skipped[i] += ~finite
            for p in drafter.parameters():
                p.grad.copy_(torch.where(finite, p.grad, 0.0))  # one bad batch must not reach the weights; it is counted
        opt.step()
        if step % every == 0 or step == recipe.steps - 1:
            values = [float(x.detach()) for x in losses.values()]
            if not all(map(math.isfinite, values)) or float(skipped.max()) > 0.01 * recipe.steps:
                raise SystemExit(f"train: losses {values} at step {step}, {skipped.tolist()} batches skipped; lower the rate")
            curve.append([step, *values])
            bar.set_postfix(loss="/".join(f"{x:.4f}" for x in values))
    seconds = time.perf_counter() - start
    print(
        f"seed {seed}: {recipe.steps} steps in {seconds:.1f} s, {1e3 * seconds / recipe.steps:.1f} ms a step", file=sys.stderr, flush=True
    )
    lost = {k: int(n) for k, n in zip(drafters, skipped.tolist(), strict=True)}
    record = {"seconds": seconds, "steps": recipe.steps, "skipped_batches": lost, "loss_curve_nats": curve, "columns": ["step", *drafters]}
    return {k: m.eval().requires_grad_(False) for k, m in drafters.items()}, record


def describe_prompts(target: model.TinyK3, prompts: counts.Prompts, batch: int = 32) -> list[dict]:
    """One row per prompt: how repetitive its continuation is, and how often the teacher-forced forward has the step's argmax."""
    rows = []
    p, n = prompts.prompt_len, prompts.new_tokens
    for tokens in prompts.tokens.to(target.device).split(batch):
        with torch.no_grad():
            agreed = (model.greedy(target(tokens)[:, p - 1 : p + n - 1]) == tokens[:, p : p + n]).sum(1)
        for text, same in zip(tokens[:, p : p + n].tolist(), agreed.tolist(), strict=True):
            grams = [tuple(text[i : i + GRAM]) for i in range(n - GRAM + 1)]
            row = {"domain": prompts.domain[len(rows)], "prompt": len(rows), "grams": len(grams), "unique_grams": len(set(grams))}
            row |= {"uniqueness": round(len(set(grams)) / len(grams), 4), "tokens": n, "argmax_agreed": same}
            rows.append(row)
    return rows


def count_rows(name: str, seed: int, by_feed: dict, domain: list[str]) -> list[dict]:
    """Rows of drafter_counts.csv."""
    rows = []
    for (stream, offset), columns in by_feed.items():
        for i, d in enumerate(domain):
            key = dict(zip(counts.KEYS, (name, seed, stream, offset, d, i), strict=True))
            rows.append(key | {c: int(x[i]) for c, x in columns.items()})
    return rows


def write_csv(path: Path, rows: list[dict]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def mean_emitted(rows: list[dict], **key: object) -> float:
    """Emitted tokens a round, the bonus included, over the rows with that key."""
    some = [r for r in rows if all(r[k] == v for k, v in key.items())]
    return sum(r["emitted"] for r in some) / sum(r["drafts"] for r in some)


def summarise(rows: list[dict]) -> list[dict]:
    """Mean emitted length by drafter and feed: pooled, by domain, and by seed."""
    seeds = sorted({r["seed"] for r in rows})
    out = []
    for name in dflash.STREAMS:
        for stream, offset in FEEDS:
            key = {"drafter": name, "stream": stream, "offset": offset}
            some = [r for r in rows if all(r[k] == v for k, v in key.items())]
            means = {"all": mean_emitted(some)} | {d: mean_emitted(some, domain=d) for d in data.DOMAINS}
            out.append(key | means | {f"seed {s}": mean_emitted(some, seed=s) for s in seeds})
    return out


def made_by(r: dict) -> str:
    done = " ".join(map(str, sorted(map(int, r["seeds"]))))
    other = "" if r["target"] == "tiny_k3.safetensors" else f" --target {r['target']}"
    device = r["made_with"]["device_type"]
    return f"python data/train_drafters.py --device {device} --size {r['size']} --seeds {done} --steps {r['steps']}{other}"


def weights_card(r: dict) -> str:
    """The data card of the two weight files, every number out of the record r."""
    c, recipe, kept = r["drafter"], r["recipe"], r["seeds"][str(r["kept_seed"])]
    shares = ", ".join(f"{d} {s:.0%}" for d, s in zip(data.DOMAINS, recipe["shares"], strict=True))
    files = "\n".join(
        f"| drafter_{k}.safetensors | the {k} | {kept['training']['loss_curve_nats'][-1][i + 1]:.4f} | `{r['sha256'][k]}` |"
        for i, k in enumerate(kept["training"]["columns"][1:])
    )
    training = "\n".join(
        f"| {s} | {x['training']['seconds']:.0f} | {1e3 * x['training']['seconds'] / x['training']['steps']:.0f} "
        f"| {x['training']['skipped_batches']} |"
        for s, x in r["seeds"].items()
    )
    return f"""# drafter_mixture.safetensors, drafter_prefix.safetensors: two DFlash drafters for the tiny Kimi-K3

| | |
|---|---|
| what | {r["parameters"]:,} parameters each: {c["layers"]} layer{"s"[: c["layers"] > 1]}, hidden {c["hidden"]}, {c["heads"]} heads, \
blocks of {c["block"]} ({c["block"] - 1} drafts), taps {tuple(c["taps"])} ({dflash.INDEX_BASE}); embedding and head are the target's |
| storage | bf16; configuration, trained stream, taps, seed and the target's sha256 in the metadata |
| target | {r["target"]}, sha256 `{r["target_sha256"]}` |
| made by | `{made_by(r)}`; these are the weights of seed {r["kept_seed"]} |
| made on | {made_on(r["made_with"])} |
| training | {r["steps"]} steps of {recipe["batch"]} x {recipe["window"]} tokens with {recipe["anchors"]} anchors each, half windows of \
the corpus ({shares}), half the target's own greedy text ({recipe["own_texts"]} continuations of {recipe["own_prompt"]}-token prompts \
from training text, {r["own_text"]["seconds"]:.0f} s); position j of a block weighs exp(-j/{recipe["loss_decay"]:g}) in the loss |
| source | the standard library of Python {r["corpus"]["python"]} and the word problems of `k3lab/tiny/data.py`, corpus sha256 \
`{r["corpus"]["sha256"]}` ({r["corpus_note"]}) |
| licence | source text: PSF licence; generated problems and weights: this project's |

| file | trained on | last training loss, nats | sha256 |
|---|---|---|---|
{files}

The two of a seed start from the same weights and see the same batches and anchors; only the stream differs.

| seed | seconds for both | ms a step | batches skipped |
|---|---|---|---|
{training}
"""


def counts_card(r: dict) -> str:
    """The data card of the counts and of their prompts, every number out of the record r."""
    seeds = list(r["seeds"])
    head = ["trained on", "fed", "all", *data.DOMAINS, *(f"seed {s}" for s in seeds)]
    lines = "\n".join(
        f"| {x['drafter']} | {x['stream']}{x['offset']:+d} | " + " | ".join(f"{x[h]:.2f}" for h in head[2:]) + " |" for x in r["summary"]
    )
    domains = "\n".join(
        f"| {d} | {x['prompts']} | {x['uniqueness']:.3f} | {x['argmax_agreed']} of {x['tokens']} |" for d, x in r["prompts"].items()
    )
    hashes = "\n".join(f"| sha256 of {name} | `{r['sha256'][name]}` |" for name in sorted(r["sha256"]) if name.startswith("drafter_"))
    recipe = r["recipe"]
    return f"""# drafter_counts.csv: what each drafter accepts, by the stream it is fed

| | |
|---|---|
| what | one row per drafter, seed, stream, offset and prompt: rounds (`drafts`), `drafted`, `accepted` (no bonus), `emitted` \
(accepted + one bonus a round), `accepted_j` (rounds that accepted position j, 0-based, and all before it) |
| drafters | mixture and prefix, seeds {", ".join(seeds)}, rounded to bf16 as stored |
| streams | prefix and mixture at layers tap + offset, and zeros, the floor without the target's features |
| prompts | drafter_prompts.safetensors: {recipe["prompt_len"]} tokens of held-out text, no two overlap, an arithmetic one ends where it \
asks, with the target's greedy continuation; the walk runs to {recipe["new_tokens"]} new tokens, no stop string |
| counted by | `k3lab.drafter.counts`, {r["arithmetic"]} |
| made by | `{made_by(r)}` |
| made on | {made_on(r["made_with"])} |
| target | {r["target"]}, sha256 `{r["target_sha256"]}` |
| corpus sha256 | `{r["corpus"]["sha256"]}` ({r["corpus_note"]}) |
| licence | prompts of code and prose: PSF licence; the rest: this project's |
{hashes}

Mean emitted length, tokens a round with the bonus, the sum of `emitted` over the sum of `drafts`; pooled over seeds but for the last
columns. Repetitive text is drafted more easily: drafter_prompts.csv has the uniqueness of each continuation.

| {" | ".join(head)} |
|{"---|" * len(head)}
{lines}

drafter_prompts.csv, mean over prompts: distinct {GRAM}-grams over all of the continuation; and in how many tokens the teacher-forced
forward, whose features the drafters read, has the same argmax as the serving step that wrote the text.

| domain | prompts | uniqueness | argmax agrees |
|---|---|---|---|
{domains}
"""


def write_cards(record: dict, out: Path) -> None:
    write_text(out / "drafters.json", json.dumps(record, indent=1) + "\n")
    write_text(out / "drafters.md", weights_card(record))
    write_text(out / "drafter_counts.md", counts_card(record))


def corpus_note(described: dict, target: Path) -> str:
    """Whether this is the text that the target was trained on, by the record beside the target."""
    beside = target.with_suffix(".json")
    if not beside.is_file():
        return "no record of the target's own corpus beside it"
    same = json.loads(beside.read_text())["corpus"]["sha256"] == described["sha256"]
    return "the target's own corpus" if same else "another standard library than the target's; held-out files are the same paths"


def run(recipe: Recipe, size: str, device: str, seeds: list[int], target_path: Path, out: Path) -> dict:
    """Train, save, count on what was saved; records and cards after every seed."""
    target = model.load(target_path, device)
    s = target.config.shapes
    recipe = replace(recipe, drafter=replace(recipe.drafter, hidden=s.hidden))
    lowest, highest = recipe.drafter.taps[0] - 1, recipe.drafter.taps[-1] + 1
    if lowest < 0 or highest >= s.num_layers:
        raise BadInput(f"{target_path}: {s.num_layers} layers, but taps with offsets reach layers {lowest}..{highest}; pick another --size")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    corpus = data.build_corpus(recipe.problems, recipe.max_code_bytes)
    described = corpus.describe()
    print(f"corpus: {described}", file=sys.stderr, flush=True)
    corpus = data.Corpus(*({d: x.to(device) for d, x in part.items()} for part in (corpus.train, corpus.held_out)))

    gen = torch.Generator().manual_seed(12345)
    start = time.perf_counter()
    asked = draw(corpus, recipe.own_texts, recipe.own_prompt, recipe.shares, gen)
    own = continuations(target, asked, recipe.window - recipe.own_prompt, recipe.own_batch, "the target's own text")
    seconds = time.perf_counter() - start
    print(f"own text: {tuple(own.shape)} in {seconds:.1f} s", file=sys.stderr, flush=True)

    torch.set_float32_matmul_precision("highest")  # what is counted is what a CPU would compute
    tokens, domain = held_out_prompts(corpus, recipe, gen)
    full = continuations(target, tokens.to(device), recipe.new_tokens + recipe.drafter.block, recipe.own_batch, "held-out prompts")
    prompts = counts.Prompts(full, domain, recipe.prompt_len, recipe.new_tokens)
    described_prompts = describe_prompts(target, prompts)
    target_sha = sha256(target_path)
    counts.save_prompts(prompts, out / "drafter_prompts.safetensors", {"target_sha256": target_sha})
    write_csv(out / "drafter_prompts.csv", described_prompts)
    by_domain = {}
    for d in data.DOMAINS:
        some = [r for r in described_prompts if r["domain"] == d]
        sums = {k: sum(r[k] for r in some) for k in ("argmax_agreed", "tokens")}
        by_domain[d] = {"prompts": len(some), "uniqueness": sum(r["uniqueness"] for r in some) / len(some), **sums}

    record = {
        "size": size, "steps": recipe.steps, "kept_seed": seeds[0], "made_with": made_with(device),
        "target": target_path.name, "target_sha256": target_sha,
        "corpus": described, "corpus_note": corpus_note(described, target_path), "drafter": asdict(recipe.drafter),
        "recipe": {k: v for k, v in asdict(recipe).items() if k != "drafter"},
        "own_text": {"seconds": seconds, "shape": list(own.shape)}, "prompts": by_domain,
        "arithmetic": "float32, matrix products without TF32" if device == "cuda" else "float32",
        "seeds": {},
    }  # fmt: skip
    rows: list[dict] = []
    for seed in seeds:
        torch.set_float32_matmul_precision("high")
        drafters, training = train(target, corpus, own, recipe, seed)
        record["parameters"] = sum(p.numel() for p in drafters["mixture"].parameters())
        torch.set_float32_matmul_precision("highest")
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            keep = out if seed == seeds[0] else Path(scratch)
            for name, drafter in drafters.items():
                drafter.origin = dflash.Origin(name, seed, target_sha)
                dflash.save(drafter, keep / f"drafter_{name}.safetensors", {"size": size, "made_by": "data/train_drafters.py"})
                stored = dflash.load(keep / f"drafter_{name}.safetensors", device, target=target_path)
                rows += count_rows(name, seed, counts.prompt_counts(stored, target, prompts, FEEDS), domain)
        write_csv(out / "drafter_counts.csv", rows)
        seconds = time.perf_counter() - start
        print(f"seed {seed}: counted in {seconds:.1f} s", file=sys.stderr, flush=True)
        record["seeds"][str(seed)] = {"training": training, "count_seconds": seconds}
        record["summary"] = summarise(rows)
        names = ("drafter_counts.csv", "drafter_prompts.csv", "drafter_prompts.safetensors")
        record["sha256"] = {k: sha256(out / f"drafter_{k}.safetensors") for k in drafters} | {n: sha256(out / n) for n in names}
        write_cards(record, out)
    return record


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--size", choices=tuple(RECIPES), default="full")
    ap.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the weights of the first are kept")
    ap.add_argument("--steps", type=int, help="instead of the recipe's")
    ap.add_argument("--target", type=Path, default=Path(__file__).parent / "tiny_k3.safetensors")
    ap.add_argument("--out", type=Path, default=Path(__file__).parent)
    a = ap.parse_args()
    recipe = RECIPES[a.size]
    if a.steps:
        recipe = replace(recipe, steps=a.steps)
    try:
        record = run(recipe, a.size, a.device, list(dict.fromkeys(a.seeds)), a.target, a.out)
    except BadInput as e:
        raise SystemExit(f"train_drafters: {e}") from e
    for x in record["summary"]:
        print(f"{x['drafter']} fed {x['stream']}{x['offset']:+d}: {x['all']:.3f} tokens a round", file=sys.stderr)


if __name__ == "__main__":
    main()
