"""Acceptance counts of a drafter along a known greedy continuation, without walking it token by token.

In greedy mode the emitted text does not depend on the drafter, so one teacher-forced pass gives the accepted drafts n(a) at every
anchor a, and the speculative walk is a -> a + n(a) + 1 over that table. Counts are summed; ratios are taken at the end.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3lab.drafter.dflash import DFlash, features
from k3lab.errors import BadInput
from k3lab.tiny.model import TinyK3, greedy, new_collect

PROMPTS_FORMAT = "k3lab-drafter-prompts-1"
KEYS = ("drafter", "seed", "stream", "offset", "domain", "prompt")


@dataclass(frozen=True)
class Prompts:
    """Prompts of equal length with the target's greedy continuation.

    tokens [N, prompt_len + new_tokens + block or more] int64; domain [N] names; new_tokens is the limit that the walk runs to,
    the token that the prefill emits included; what stands after it is there so that the last blocks have something to agree with.
    """

    tokens: Tensor
    domain: list[str]
    prompt_len: int
    new_tokens: int

    def __getitem__(self, rows: list[int]) -> "Prompts":
        """Some of the prompts, by row."""
        return Prompts(self.tokens[rows], [self.domain[i] for i in rows], self.prompt_len, self.new_tokens)


def save_prompts(prompts: Prompts, path: str | os.PathLike, metadata: dict[str, str]) -> None:
    """Write prompts as int16 with their lengths and domains in the metadata; a temporary name, then renamed."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    sizes = json.dumps({"prompt_len": prompts.prompt_len, "new_tokens": prompts.new_tokens, "domain": prompts.domain})
    save_file({"tokens": prompts.tokens.cpu().short()}, part, metadata={"format": PROMPTS_FORMAT, "prompts": sizes, **metadata})
    os.replace(part, path)


def load_prompts(path: str | os.PathLike) -> Prompts:
    """The prompts in `path`. Raises BadInput for a file that is not one of ours."""
    try:
        with safe_open(path, framework="pt") as f:
            meta = f.metadata() or {}
            if meta.get("format") != PROMPTS_FORMAT:
                raise BadInput(f"{path}: metadata format is {meta.get('format')!r}, expected {PROMPTS_FORMAT!r}")
            prompts = Prompts(f.get_tensor("tokens").long(), **json.loads(meta["prompts"]))
        sizes, domain = (prompts.prompt_len, prompts.new_tokens), prompts.domain
        if not all(type(n) is int and n > 0 for n in sizes) or prompts.tokens.dim() != 2 or sum(sizes) > prompts.tokens.shape[1]:
            raise ValueError(f"prompts of {str(sizes)[:80]} tokens in {list(prompts.tokens.shape)}")
        if not isinstance(domain, list) or len(domain) != len(prompts.tokens) or not all(isinstance(d, str) for d in domain):
            raise ValueError(f"domain names {len(prompts.tokens)} prompts: {str(domain)[:80]}")
        return prompts
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError, RecursionError, AttributeError) as e:
        raise BadInput(f"{path}: not a readable file of prompts ({e!r}); make one with data/train_drafters.py") from e


@torch.no_grad()
def anchor_acceptance(drafter: DFlash, target: TinyK3, tokens: Tensor, prompt_len: int, new_tokens: int, feed: Tensor) -> Tensor:
    """Accepted drafts at every anchor, [B, new_tokens - 1] int64 in 0 .. block - 1.

        n(a) = the largest n with greedy(draft logits at a)_j = tokens_(a+j) for all 1 <= j <= n

    tokens  [B, L], prompts of prompt_len tokens and the target's greedy continuation, L >= prompt_len + new_tokens + block - 2
    feed    [B, L, taps, hidden], features of those tokens in a teacher-forced forward; a block sees positions below its anchor

    Anchors are prompt_len .. prompt_len + new_tokens - 2: the prefill emits the token at prompt_len, and a round starts as long as
    fewer than new_tokens tokens are out. Raises BadInput if the continuation is too short.
    """
    block = drafter.config.block
    need = prompt_len + new_tokens + block - 2
    if tokens.shape[1] < need or prompt_len < 1 or new_tokens < 2:
        raise BadInput(
            f"tokens: {tokens.shape[1]} of them, prompt_len={prompt_len} and new_tokens={new_tokens} with blocks of {block} need {need}"
        )
    anchors = torch.arange(prompt_len, prompt_len + new_tokens - 1, device=tokens.device)
    context = drafter.context(feed[:, : prompt_len + new_tokens - 2])
    drafts = greedy(drafter(target, context, tokens[:, anchors], anchors.expand(len(tokens), -1)))  # [B, A, block - 1]
    expected = tokens[:, anchors[:, None] + torch.arange(1, block, device=tokens.device)]
    return (drafts == expected).long().cumprod(-1).sum(-1)


def walk_counts(accepted_at_anchor: Tensor, block: int) -> dict[str, np.ndarray]:
    """The greedy walk over a table of accepted drafts [N, A], one entry per prompt in each int64 column of the counts schema.

        a <- 0;  while a < A: a <- a + n(a) + 1

    drafts, rounds; drafted = drafts (block - 1); accepted, drafts accepted, no bonus; emitted = accepted + drafts, the bonus token of
    each round included; accepted_j, rounds that accepted the draft at 0-based position j and all before it. The round in which the
    limit falls counts in full. Raises BadInput if the table holds a count outside 0 .. block - 1.
    """
    table = accepted_at_anchor.cpu().numpy()
    if table.ndim != 2 or (table.size and not 0 <= table.min() <= table.max() < block):
        raise BadInput(f"accepted_at_anchor: expected [prompts, anchors] of 0 .. {block - 1}, got shape {table.shape}")
    rows, at = np.arange(len(table)), np.zeros(len(table), dtype=np.int64)
    drafts = np.zeros_like(at)
    survived = np.zeros((block - 1, len(table)), dtype=np.int64)
    while (live := at < table.shape[1]).any():
        n = np.where(live, table[rows, np.minimum(at, table.shape[1] - 1)], 0)
        survived += live & (n > np.arange(block - 1)[:, None])
        drafts += live
        at += np.where(live, n + 1, 0)
    accepted = survived.sum(0)
    out = {"drafts": drafts, "drafted": drafts * (block - 1), "accepted": accepted, "emitted": accepted + drafts}
    return out | {f"accepted_{j}": survived[j] for j in range(block - 1)}


def prompt_counts(
    drafter: DFlash, target: TinyK3, prompts: Prompts, feeds: Iterable[tuple[str, int]], batch: int = 32
) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """walk_counts of every (stream, offset) in `feeds`, from one target forward per batch of prompts."""
    feeds = list(feeds)
    tables: dict[tuple[str, int], list[Tensor]] = {feed: [] for feed in feeds}
    for tokens in prompts.tokens.to(target.device).split(batch):
        collect = new_collect()
        with torch.no_grad():
            target(tokens, collect)
        for stream, offset in feeds:
            feed = features(collect, drafter.config.taps, stream, offset)
            tables[stream, offset].append(anchor_acceptance(drafter, target, tokens, prompts.prompt_len, prompts.new_tokens, feed))
    return {feed: walk_counts(torch.cat(parts), drafter.config.block) for feed, parts in tables.items()}
