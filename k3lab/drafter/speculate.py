"""The speculative walk over TinyK3.step: a drafter proposes k tokens, one step of the target verifies them, the output is plain decoding's.

A round feeds the last token and its k drafts as one speculative sequence. With p_j the target's distribution behind row j of that step
and q_j the drafter's for draft j (0-based):

    accept draft x_j with probability min(1, p_j(x_j) / q_j(x_j)), until the first rejection
    then one more token, the bonus: after m < k accepted from max(p_m - q_m, 0), normalised; after all k from p_k

Every emitted token is then distributed as p (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). Greedy
decoding is the same rule with p and q one-hot. Rejected rows are undone by k3lab.tiny.batch.rollback.

Token-for-token equality of greedy decoding holds for exact arithmetic. Both ways run the same recurrence, but their matrix products have 1
and k + 1 rows a sequence and may sum in another order, so two logits closer than that rounding (about 1e-5 in float32, 1e-14 in float64)
may swap their order, and the texts part there.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from k3lab.drafter.counts import KEYS
from k3lab.drafter.dflash import DFlash, features
from k3lab.errors import BadInput
from k3lab.tiny.batch import Batch, Cache, rollback
from k3lab.tiny.model import BOS, VOCAB, TinyK3, greedy, new_collect


@dataclass(frozen=True)
class Walk:
    """What a speculative walk returns, by prompt in the order given.

    tokens, reasons  the ids generated, the stop string included, and "stop" or "length": as `generate` returns them
    counts           one row a prompt: the key columns known (of KEYS), then whole numbers: drafts, drafted, accepted, emitted, and
                     accepted_0 .. accepted_{k-1}, the rounds in which the draft at that 0-based position and all before it were accepted
    rounds           one row a draft round: prompt, anchor (0-based position of the last token), accepted, emitted
    """

    tokens: list[list[int]]
    reasons: list[str]
    counts: pd.DataFrame
    rounds: pd.DataFrame


@dataclass
class _Request:
    index: int
    slot: int
    prompt_length: int
    rng: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    reason: str = ""

    @property
    def anchor(self) -> int:
        """Position of the last token: emitted, not yet through the target; as many tokens are in its state."""
        return self.prompt_length + len(self.tokens) - 1

    def emit(self, new: Sequence[int], stop: bytes | None, max_new: int) -> int:
        """Append new up to and including a completed stop string; how many of them were taken, before the token limit cuts."""
        taken = 0
        for token in new:
            self.tokens.append(token)
            taken += 1
            if stop and bytes(self.tokens[-len(stop) :]) == stop:
                self.reason = "stop" if len(self.tokens) <= max_new else "length"
                break
        if not self.reason and len(self.tokens) >= max_new:
            self.reason = "length"
        if self.reason:
            del self.tokens[max_new:]
        return taken


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities over bytes [..., 256], float64, of logits [..., VOCAB]: softmax(logits / temperature), at temperature 0 one-hot.

    BOS and MASK are left out. A row without a softmax (NaN, +inf) is one-hot at `greedy`, so NaN logits give id 0 at any temperature.
    """
    chosen = F.one_hot(greedy(logits), BOS).double()
    if temperature == 0:
        return chosen
    x = logits[..., :BOS].double()
    p = ((x - x.amax(-1, keepdim=True)) / temperature).softmax(-1)
    lost = torch.isnan(logits).any(-1, keepdim=True) | torch.isnan(p).any(-1, keepdim=True)
    return torch.where(lost, chosen, p)


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """Ids [...] drawn by weights [..., n], not negative and of any sum, at u [...] in [0, 1) of the running sum; never one of weight 0."""
    cdf = weights.cumsum(-1)
    total = cdf[..., -1:]
    # u * total may round up to the total, which no id lies above
    at = torch.minimum(u[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cdf <= at).sum(-1)


def rejection_sample(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted drafts [N] and the bonus token [N] of one round; the law of the emitted tokens is p's whatever q is.

    p [N, k + 1, n] and q [N, k, n] probabilities, drafts [N, k] drawn from q, u [N, k + 1] uniform in [0, 1): the first k decide
    acceptance, the last draws the bonus (equations in the module's docstring).
    """
    n, k = drafts.shape
    px, qx = (x[:, :k].gather(-1, drafts[..., None]).squeeze(-1) for x in (p, q))
    accepted = (u[:, :k] * qx < px).long().cumprod(-1).sum(-1)
    at = torch.arange(n, device=p.device), accepted
    p_m = p[at]
    residual = (p_m - F.pad(q, (0, 0, 0, 1))[at]).clamp(min=0)  # a zero q behind the last draft leaves p itself
    # p = q up to rounding cannot reject, yet rounding may: p is then the residual's limit
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_m)
    return accepted, pick(residual, u[:, k])


def _check(prompts: Sequence[Tensor], max_new: int, temperature: float, seed: int, max_seqs: int) -> None:
    if not len(prompts):
        raise BadInput("prompts: none given; need at least one, each with at least one token")
    for i, x in enumerate(prompts):
        if not isinstance(x, Tensor) or x.dim() != 1 or x.is_floating_point() or not len(x):
            what = f"shape {tuple(x.shape)} dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise BadInput(
                f"prompts: number {i} is {what}, expected token ids [T] with at least one token (k3lab.tiny.data.encode makes them)"
            )
        if not 0 <= int(x.min()) <= int(x.max()) < VOCAB:
            raise BadInput(f"prompts: number {i} holds ids {int(x.min())}..{int(x.max())}, outside 0..{VOCAB - 1}")
    if max_new < 1:
        raise BadInput(f"max_new: {max_new} is below 1; a request makes at least one token")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise BadInput(f"temperature: {temperature} is no finite number from 0 (greedy) up")
    if seed < 0 or max_seqs < 1:
        raise BadInput(f"seed {seed}, max_seqs {max_seqs}: a seed is at least 0, and a step holds at least one sequence")


def _groups(prompts: Sequence[Tensor], seed: int, max_seqs: int) -> Iterator[list[_Request]]:
    """Requests in groups of max_seqs, each with its own slot and its own draws: no prompt's tokens depend on its neighbours."""
    for first in range(0, len(prompts), max_seqs):
        ids = range(first, min(first + max_seqs, len(prompts)))
        yield [_Request(i, i - first + 1, len(prompts[i]), np.random.default_rng([seed, i])) for i in ids]


def _prefill(
    target: TinyK3, group: list[_Request], prompts: Sequence[Tensor], max_new: int, drafts: int, collect: dict | None
) -> tuple[Cache, Tensor]:
    """A cache that holds every prompt of the group and has room for what follows, and the logits [N, VOCAB] behind the prompts."""
    lengths = [r.prompt_length for r in group]
    cache = target.new_cache(len(group) + 1, max(lengths) + max_new + drafts, token_rows=len(group) * (drafts + 1) if drafts else 0)
    batch = Batch(torch.cat([prompts[r.index].cpu().long() for r in group]), lengths, [r.slot for r in group], [0] * len(group))
    return cache, target.step(batch, cache, collect=collect)


def _uniform(group: list[_Request], n: int, temperature: float, device: torch.device) -> Tensor:
    """n draws of each request's own generator, [N, n] float64; zeros where nothing is drawn."""
    if temperature == 0:
        return torch.zeros(len(group), n, dtype=torch.float64, device=device)
    return torch.from_numpy(np.stack([r.rng.random(n) for r in group])).to(device)


def _first_token(group: list[_Request], logits: Tensor, temperature: float, stop: bytes | None, max_new: int) -> list[_Request]:
    """Emit one token of each request from logits [N, VOCAB]; the requests that go on."""
    ids = pick(distribution(logits, temperature), _uniform(group, 1, temperature, logits.device)[:, 0])
    for r, token in zip(group, ids.tolist(), strict=True):
        r.emit([token], stop, max_new)
    return [r for r in group if not r.reason]


def generate(
    target: TinyK3,
    prompts: Sequence[Tensor],
    *,
    max_new: int,
    stop: bytes | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    max_seqs: int = 64,
) -> tuple[list[list[int]], list[str]]:
    """Plain decoding of prompts (token ids [T] each): the tokens of each, at most max_new, and why it ended ("stop" or "length").

    stop         bytes that end a request once they stand in its output (they are returned); None: never
    temperature  0 is greedy; else softmax(logits / temperature) over bytes; seed and a prompt's place in the list fix its draws
    max_seqs     requests decoded together
    Raises BadInput for arguments that cannot be decoded.
    """
    _check(prompts, max_new, temperature, seed, max_seqs)
    done = []
    for group in _groups(prompts, seed, max_seqs):
        cache, logits = _prefill(target, group, prompts, max_new, 0, None)
        live = _first_token(group, logits, temperature, stop, max_new)
        while live:
            tokens, n = torch.tensor([r.tokens[-1] for r in live]), len(live)
            logits = target.step(Batch(tokens, [1] * n, [r.slot for r in live], [r.anchor for r in live], n), cache)
            live = _first_token(live, logits, temperature, stop, max_new)
        done += group
    return [r.tokens for r in done], [r.reason for r in done]


def speculate(
    target: TinyK3,
    drafter: DFlash,
    prompts: Sequence[Tensor],
    *,
    max_new: int,
    stream: str,
    offset: int = 0,
    stop: bytes | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    max_seqs: int = 64,
    keys: Mapping[str, object] | None = None,
    progress: bool = False,
) -> Walk:
    """Decode prompts with the drafter's help: what `generate` returns, in fewer target steps, and the counts of what was accepted.

    stream, offset  what the drafter is fed, after layer tap + offset for each of its taps: "prefix", "mixture" or "zeros" (dflash.features)
    keys            values for the counts' other key columns (drafter, seed, domain): one for all, or a sequence with one a prompt
    progress        prompts done, on stderr
    The rest as in `generate`; at temperature > 0 drafts are drawn at the same temperature, each position on its own.

    The first token comes from the prompt's own step and counts nowhere. A stop string inside an accepted prefix ends its counts: tokens
    behind it are neither accepted nor emitted, and there is no bonus. max_new cuts the returned tokens alone, never a round's counts.
    NaN logits are id 0 on both sides, so the walk goes on as plain decoding does.
    Raises BadInput for arguments that cannot be decoded, a drafter of another hidden size, an unknown stream, a tap outside the model.
    """
    _check(prompts, max_new, temperature, seed, max_seqs)
    _check_drafter(target, drafter)
    if keys and not set(keys) <= {"drafter", "seed", "domain"}:
        raise BadInput(f"keys: {sorted(keys)}; the walk takes drafter, seed and domain, and knows stream, offset and prompt itself")
    k = drafter.config.block - 1
    done, rounds = [], []
    bar = tqdm(total=len(prompts), desc=f"speculate {stream} {offset:+d}", file=sys.stderr, ascii=True, mininterval=5, disable=not progress)
    for group in _groups(prompts, seed, max_seqs):
        collect = new_collect()
        cache, logits = _prefill(target, group, prompts, max_new, k, collect)
        rows = drafter.context(features(collect, drafter.config.taps, stream, offset))  # [T, hidden]
        context = rows.new_zeros(len(group), cache.max_len, rows.shape[-1])
        for r, own in zip(group, rows.split([r.prompt_length for r in group]), strict=True):
            context[r.slot - 1, : r.prompt_length] = own
        live = _first_token(group, logits, temperature, stop, max_new)
        kept = {r.slot: 1 for r in live}
        bar.update(len(group) - len(live))
        while live:
            drafts, accepted, bonus = _round(target, drafter, cache, context, live, kept, stream, offset, temperature)
            for r, x, m, b in zip(live, drafts.tolist(), accepted.tolist(), bonus.tolist(), strict=True):
                anchor = r.anchor
                emitted = r.emit([*x[:m], b], stop, max_new)
                rounds.append((r.index, anchor, min(m, emitted), emitted))
            bar.update(sum(bool(r.reason) for r in live))
            live = [r for r in live if not r.reason]
        done += group
    bar.close()
    frame = pd.DataFrame(rounds, columns=["prompt", "anchor", "accepted", "emitted"], dtype=np.int64)
    known = {"stream": stream, "offset": offset, "prompt": range(len(prompts)), **(keys or {})}
    counts = pd.DataFrame({name: known[name] for name in KEYS if name in known}, index=range(len(prompts)))
    return Walk([r.tokens for r in done], [r.reason for r in done], counts.join(_counts(frame, k, len(prompts))), frame)


def _check_drafter(target: TinyK3, drafter: DFlash) -> None:
    hidden, weight = target.config.shapes.hidden, target.embed.weight
    if drafter.config.hidden != hidden:
        raise BadInput(f"drafter: made for hidden size {drafter.config.hidden}, the target has {hidden}; take a drafter of this target")
    own = next(drafter.parameters(), weight)
    if own.dtype != weight.dtype or own.device != weight.device:
        raise BadInput(f"drafter: {own.dtype} on {own.device}, the target {weight.dtype} on {weight.device}; move it with drafter.to(...)")


def _round(
    target: TinyK3, drafter: DFlash, cache: Cache, context: Tensor, live: list[_Request], kept: dict[int, int],
    stream: str, offset: int, temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Drafts [N, k], accepted [N] and bonus [N] of one round; cache, context and kept are left as the accepted tokens leave them."""
    n, k, device = len(live), drafter.config.block - 1, target.device
    last = torch.tensor([r.tokens[-1] for r in live], device=device)
    anchors = torch.tensor([r.anchor for r in live], device=device)
    lane = torch.tensor([r.slot - 1 for r in live], device=device)
    u = _uniform(live, 2 * k + 1, temperature, device)
    seen = context[:, : max(r.anchor for r in live)]
    with torch.no_grad():
        proposed = drafter(target, seen if n == len(context) else seen[lane], last[:, None], anchors[:, None])
    q = distribution(proposed[:, 0], temperature)  # [N, k, 256]
    drafts = pick(q, u[:, :k])
    batch = Batch(
        torch.cat([last[:, None], drafts], 1).flatten(),
        [k + 1] * n,
        [r.slot for r in live],
        [r.anchor for r in live],
        spec_mask=torch.ones(n, dtype=torch.bool),
        num_accepted_tokens=torch.tensor([kept[r.slot] for r in live]),
    )
    collect, steps = new_collect(), []
    logits = target.step(batch, cache, "gather_split", all_rows=True, hook=steps.append, collect=collect)
    accepted, bonus = rejection_sample(distribution(logits.view(n, k + 1, VOCAB), temperature), q, drafts, u[:, k:])
    rollback(cache, steps, accepted + 1)
    kept.update(zip([r.slot for r in live], (accepted + 1).tolist(), strict=True))
    rows = drafter.context(features(collect, drafter.config.taps, stream, offset)).view(n, k + 1, -1)
    passed = torch.arange(k + 1, device=device) <= accepted[:, None]  # the last token and the accepted drafts
    at = anchors[:, None] + torch.arange(k + 1, device=device)
    context[lane[:, None].expand_as(at)[passed], at[passed]] = rows[passed]
    return drafts, accepted, bonus


def _counts(rounds: pd.DataFrame, k: int, prompts: int) -> pd.DataFrame:
    """The count columns of rounds, summed by prompt; a prompt that needed no round counts zeros."""
    by_position = {f"accepted_{j}": (rounds.accepted > j).astype(np.int64) for j in range(k)}
    one = pd.DataFrame({"drafts": 1, "drafted": k, "accepted": rounds.accepted, "emitted": rounds.emitted, **by_position})
    return one.groupby(rounds.prompt).sum().reindex(range(prompts), fill_value=0).astype(np.int64)
