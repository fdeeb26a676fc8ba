"""One serving step's bookkeeping: state by slot, the packed ragged batch, and the index tensors that its layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3lab.errors import BadInput
from k3lab.kda.call import KdaCall

if TYPE_CHECKING:  # training needs neither the layer step nor its kernels
    from k3lab.kda.layer import StepResult


@dataclass
class Cache:
    """State by slot; slot 0 is the null slot, never written.

    conv [layers][slots, 3HK, width - 1], the last rows before the convolution, oldest first; recurrent [layers][slots, H, V, K];
    keys, values [layers][slots, max_len, heads, dim]; a list holds None where the layer is of the other kind. token_states, if asked for
    [layers][rows, H, V, K], is where speculative steps put the state after each row; the next step writes over it.
    """

    conv: list[Tensor | None]
    recurrent: list[Tensor | None]
    keys: list[Tensor | None]
    values: list[Tensor | None]
    token_states: list[Tensor | None] | None = None

    @property
    def max_len(self) -> int:
        return next(k.shape[1] for k in self.keys if k is not None)

    def clone(self) -> Cache:
        return Cache(*([None if x is None else x.clone() for x in part] for part in (self.conv, self.recurrent, self.keys, self.values)))


@dataclass
class Batch:
    """A packed ragged step: decodes first, then prefills; or, with spec_mask, speculative and plain rows in any order.

    tokens [T]; lengths [N], rows of each sequence; slots [N], state slots, <= 0 for a padding sequence, whose outputs are zeros;
    context [N], tokens of each sequence already in its state; num_decodes, leading sequences of one token that have a context.
    """

    tokens: Tensor
    lengths: list[int]
    slots: list[int]
    context: list[int]
    num_decodes: int = 0
    spec_mask: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    step: int = -1

    def check(self, cache: Cache) -> Batch:
        n = len(self.lengths)
        slots = next(x.shape[0] for x in cache.recurrent if x is not None)
        live = [s for s in self.slots if s > 0]
        if not n == len(self.slots) == len(self.context) or sum(self.lengths) != self.tokens.numel() or min(self.lengths, default=0) < 1:
            raise BadInput(
                f"batch: {n} lengths over {sum(self.lengths)} rows, {len(self.slots)} slots, {self.tokens.numel()} tokens do not fit"
            )
        if len(set(live)) != len(live) or max(live, default=0) >= slots:
            raise BadInput(f"batch: slots {live} repeat or leave the pool of {slots}; give each live sequence its own slot")
        longest = max(c + n for c, n in zip(self.context, self.lengths, strict=True))
        if longest > cache.max_len:
            raise BadInput(f"batch: a sequence reaches {longest} tokens, the KV cache holds {cache.max_len}; make a larger cache")
        if any(n != 1 or c < 1 for n, c in list(zip(self.lengths, self.context, strict=True))[: self.num_decodes]):
            raise BadInput(f"batch: the first {self.num_decodes} sequences must be decodes, one token each, with a context")
        return self


@dataclass
class KdaStep:
    """One KDA layer of one step as a hook sees it: the call, its result, and the state slots around it."""

    call: KdaCall
    result: StepResult
    conv_state: Tensor  # [N, 3HK, width - 1]
    conv_state_after: Tensor
    state_indices: Tensor  # [N]
    token_ids: Tensor  # [T]
    route: str
    conv_rows: Tensor  # [N (width - 1) + T, 3HK] what the convolution read: the states' rows, then the new ones


def _conv_source(cu: Tensor, keep: int, sequence: Tensor, offset: Tensor) -> Tensor:
    """Where the row at `offset` of a sequence lies in (conv states of keep rows, new rows): before its first row, in its state."""
    n = len(cu) - 1
    return torch.where(offset < 0, sequence * keep + keep + offset, n * keep + cu[sequence] + offset)


def rollback(cache: Cache, steps: Sequence[KdaStep], kept: Tensor) -> None:
    """Take a speculative step back: cache becomes what a step over the first kept [N] rows of each sequence would have left.

    steps are what the step's hook saw, one for each KDA layer. The recurrent state is the one after row kept - 1, the conv state the rows
    before the convolution up to it; keys and values need nothing, as the caller's context no longer reaches the rejected rows.
    vLLM's form of it: token t writes state slot state_indices[n, t], and the next step reads state_indices[n, num_accepted_tokens - 1];
    kept is that num_accepted_tokens (last token + accepted drafts, so at least 1), copied here to the sequence's one slot.
    Raises BadInput if kept does not fit the step, or a sequence is not speculative, so that it has no state by token.
    """
    call = steps[0].call
    cu = call.cu_seqlens.long()
    if kept.shape != cu[1:].shape or bool(((kept < 1) | (kept > cu.diff())).any()):
        raise BadInput(f"kept: {kept.tolist()}; each sequence of the step keeps 1 to all of its {cu.diff().tolist()} rows")
    if call.spec_mask is None or not bool(call.spec_mask.all()):
        raise BadInput("steps: not every sequence is speculative; states after each token exist only where spec_mask is set")
    slots = steps[0].state_indices.to(cu.device)
    live = slots > 0
    for step in steps:
        pool, conv = cache.recurrent[step.call.layer], cache.conv[step.call.layer]
        keep = conv.shape[-1]
        back = torch.arange(-keep, 0, device=cu.device)
        pool[slots[live]] = step.result.states[(cu[:-1] + kept - 1)[live]].to(pool.dtype)
        rows = _conv_source(cu, keep, torch.arange(len(kept), device=cu.device)[:, None], kept[:, None] + back)
        conv[slots[live]] = step.conv_rows[rows[live]].transpose(1, 2)


@dataclass
class Rows:
    """Index tensors of one step, shared by its layers."""

    cu: Tensor  # [N + 1]
    live: Tensor  # [N] bool
    slots: Tensor  # [N], null slots as 0
    has_state: Tensor  # [N] bool
    conv_rows: Tensor  # [T, width] into the rows of (states, new rows)
    conv_keep: Tensor  # [N, width - 1]
    row_slot: Tensor  # [T] slot of each row
    row_pos: Tensor  # [T] position of each row in its sequence
    blocks: list = field(default_factory=list)  # (rows, where, q_pos [n, longest], slots [n], dead [n, used]) of sequences padded together


def rows_of(batch: Batch, width: int, device: torch.device) -> Rows:
    """The index tensors of a checked batch, for convolutions of `width` taps."""
    lengths = torch.tensor(batch.lengths)
    n = len(lengths)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    seq = torch.repeat_interleave(torch.arange(n), lengths)
    within = torch.arange(int(cu[-1])) - cu[seq]
    keep = width - 1

    conv_rows = _conv_source(cu, keep, seq[:, None], within[:, None] + torch.arange(-keep, 1))
    conv_keep = _conv_source(cu, keep, torch.arange(n)[:, None], lengths[:, None] + torch.arange(-keep, 0))
    slots = torch.tensor([max(s, 0) for s in batch.slots])
    context = torch.tensor(batch.context)
    row_pos = context[seq] + within
    blocks = []
    for group in (range(batch.num_decodes), range(batch.num_decodes, n)):
        ids = torch.tensor(list(group), dtype=torch.long)
        if not len(ids):
            continue
        longest = int(lengths[ids].max())
        grid = torch.arange(longest)
        where = grid < lengths[ids][:, None]  # [n, longest]
        rows = (cu[ids][:, None] + grid)[where]
        q_pos = (context[ids][:, None] + grid).clamp(max=int((context + lengths).max()) - 1)
        ends = (context + lengths)[ids]
        dead = torch.arange(int(ends.max())) >= ends[:, None]  # [n, used]
        blocks.append(tuple(x.to(device) for x in (rows, where, q_pos, slots[ids], dead)))
    move = [x.to(device) for x in (cu, slots > 0, slots, context > 0, conv_rows, conv_keep, slots[seq], row_pos)]
    return Rows(*move, blocks=blocks)
