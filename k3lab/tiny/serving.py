"""A small continuous-batching loop over TinyK3.step: decodes first, then prefills of ragged lengths, as vLLM schedules them.

Every step takes one token of each running request and fills what is left of the token budget with prefill pieces, so a long prompt may
be cut and continue in later steps. A step with decodes and prefills is mixed; only there does the route matter: a step of decodes alone
goes to the recurrent kernel on every route, as in the engine.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from k3lab.errors import BadInput
from k3lab.shapes import CHUNK
from k3lab.tiny.batch import Batch, KdaStep
from k3lab.tiny.data import STOP
from k3lab.tiny.model import TinyK3, greedy


@dataclass
class Output:
    """What one request got.

    tokens     the ids generated, the stop included
    reason     "stop" or "length"
    exposed    for each of tokens, how many KDA workgroups (layer, head, launch) of this request had undefined rows up to and
               including the step that made it: ragged chunks in the chunk kernel, whatever those rows were worth
    poisoned   workgroups of this request whose undefined rows were NaN
    """

    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    exposed: list[int] = field(default_factory=list)
    poisoned: int = 0


@dataclass
class _Request:
    index: int
    prompt: Tensor
    slot: int = 0
    done: int = 0  # tokens in the state
    exposed: int = 0

    @property
    def left(self) -> int:
        return len(self.prompt) - self.done


def poisson_arrivals(n: int, per_step: float, seed: int) -> list[int]:
    """Steps at which n requests arrive, exponential gaps with a mean of 1 / per_step steps."""
    return np.floor(np.random.default_rng(seed).exponential(1 / per_step, n).cumsum()).astype(int).tolist()


def serve(
    model: TinyK3,
    prompts: Sequence[Tensor],
    *,
    max_seqs: int = 128,
    max_tokens: int = 4096,
    max_new: int = 80,
    stop: bytes = STOP,
    arrivals: Sequence[int] | None = None,
    route: str = "split",
    impl: str = "torch",
    padding: str = "zero",
    p: float | None = None,
    seed: int = 0,
    kda_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    hook: Callable[[KdaStep], None] | None = None,
    max_steps: int | None = None,
    progress: bool = False,
) -> tuple[list[Output], pd.DataFrame]:
    """Serve prompts (token ids [T] each) greedily; one Output each, in their order, and a frame with one row a step.

    max_seqs     requests running at a time, each in a state slot of its own; slot 0 is the null slot
    max_tokens   token budget of a step, decodes and prefill pieces together
    arrivals     the step each prompt arrives at, ascending; None: all at step 0
    route, impl  of the KDA layers in mixed steps and steps of prefills (k3lab.kda.layer)
    padding      what undefined rows are worth; with p instead, those of a workgroup (sequence, head, layer, launch) are NaN with
                 probability p, drawn from seed, and zero otherwise (impl "torch")
    kda_dtype, state_dtype   rounding of the KDA token tensors and of the recurrent state pool (TinyK3.step, new_cache)
    hook         called with every KDA layer of every step; max_steps stops early, leaving the rest unfinished (reason "")

    Frame columns: step, decodes, prefills, tokens, mixed, exposed_decodes and exposed_prefills (workgroups with undefined rows in the
    chunk kernel), poisoned (of those, NaN ones), running, waiting. Raises BadInput for arguments that cannot be served.
    """
    if not prompts or min(len(x) for x in prompts) < 1:
        raise BadInput("prompts: need at least one prompt, each with at least one token")
    if max_tokens < max_seqs or max_seqs < 1:
        raise BadInput(f"max_tokens {max_tokens} is below max_seqs {max_seqs} (or that below 1): a step could not hold its decodes")
    arrivals = [0] * len(prompts) if arrivals is None else list(arrivals)
    if len(arrivals) != len(prompts) or sorted(arrivals) != arrivals:
        raise BadInput(f"arrivals: {len(arrivals)} steps for {len(prompts)} prompts; give one per prompt, ascending")
    if p is not None and not 0 <= p <= 1:
        raise BadInput(f"p: {p} is no probability; give 0 to 1, or None for plain padding")
    if max_new < 1:
        raise BadInput(f"max_new: {max_new} is below 1; a request makes at least one token")
    if p is not None and padding != "zero":
        raise BadInput(f"padding {padding!r} and p={p}: with p, undefined rows are NaN or zero by the draw; leave padding at its default")
    heads, layers = model.config.shapes.num_heads, model.kda_layers
    cache = model.new_cache(max_seqs + 1, max(len(x) for x in prompts) + max_new, state_dtype)
    gen = torch.Generator().manual_seed(seed)
    outputs = [Output() for _ in prompts]
    waiting = deque(_Request(i, x.cpu()) for i, x in enumerate(prompts))
    free = deque(range(1, max_seqs + 1))
    decoding: list[_Request] = []
    filling: deque[_Request] = deque()
    log = []
    step = -1
    bar = tqdm(total=len(prompts), desc=f"serve {route}", file=sys.stderr, ascii=True, mininterval=5, disable=not progress)
    while (waiting or decoding or filling) and (max_steps is None or len(log) < max_steps):
        step += 1
        if not decoding and not filling:
            step = max(step, arrivals[waiting[0].index])
        while free and waiting and arrivals[waiting[0].index] <= step:
            filling.append(waiting.popleft())
            filling[-1].slot = free.popleft()
        pieces = [(r, 1) for r in decoding]
        budget = max_tokens - len(pieces)
        for r in filling:
            if not budget:
                break
            pieces.append((r, min(r.left, budget)))
            budget -= pieces[-1][1]
        n, num_decodes = len(pieces), len(decoding)
        mixed = 0 < num_decodes < n
        used = "split" if num_decodes == n else route
        at_chunk = torch.tensor([used == "chunk_all" or i >= num_decodes for i in range(n)])
        ragged = at_chunk & torch.tensor([k % CHUNK != 0 for _, k in pieces])
        bad = torch.zeros(len(layers), n, heads, dtype=torch.bool)
        if p is not None:
            bad = (torch.rand(bad.shape, generator=gen) < p) & ragged[:, None]
            on_device = dict(zip(layers, bad.to(model.device), strict=True))
        elif padding != "zero":
            bad |= ragged[:, None]
        batch = Batch(
            torch.cat([r.prompt[r.done : r.done + k] for r, k in pieces]),
            [k for _, k in pieces],
            [r.slot for r, _ in pieces],
            [r.done for r, _ in pieces],
            num_decodes,
            step=step,
        )
        fill = padding if p is None else on_device.__getitem__
        ids = greedy(model.step(batch, cache, used, impl, fill, kda_dtype=kda_dtype, hook=hook)).tolist()
        poisoned = bad.sum((0, 2)).tolist()
        log.append(
            {
                "step": step,
                "decodes": num_decodes,
                "prefills": n - num_decodes,
                "tokens": len(batch.tokens),
                "mixed": mixed,
                "exposed_decodes": int(ragged[:num_decodes].sum()) * len(layers) * heads,
                "exposed_prefills": int(ragged[num_decodes:].sum()) * len(layers) * heads,
                "poisoned": sum(poisoned),
                "running": n,
                "waiting": len(waiting),
            }
        )
        keep = []
        for (r, k), token, hit, nan in zip(pieces, ids, ragged.tolist(), poisoned, strict=True):
            out = outputs[r.index]
            r.done += k
            r.exposed += hit * len(layers) * heads
            out.poisoned += nan
            if r.left:
                continue  # a prompt cut by the budget: its last row predicts a known token
            out.tokens.append(token)
            out.exposed.append(r.exposed)
            ended = bytes(t for t in out.tokens[-len(stop) :]) == stop
            if ended or len(out.tokens) == max_new:
                out.reason = "stop" if ended else "length"
                free.append(r.slot)
                bar.update()
            else:
                r.prompt = torch.cat([r.prompt, torch.tensor([token])])
                keep.append(r)
        filling = deque(r for r in filling if not outputs[r.index].tokens)
        decoding = keep
    bar.close()
    return outputs, pd.DataFrame(log)
