"""The six stages of chunk KDA, vectorised in torch: any device, real sizes, every stage's output by name.

A sequence is cut into chunks of 64 tokens. A stage loads tiles of 64 token rows, computes on the whole tile and stores
the rows that exist. What a masked row is worth is the experiment (`padding`). With G the cumulative log-decay of a chunk:

    gate_cumsum    g   = cumsum(log-decay) inside the chunk, log2 units
    intra          Aqk[i,j] = scale q_i . (k_j exp2(G_i - G_j)), j <= i;   Akk[i,j] = beta_i k_i . (k_j exp2(G_i - G_j)), j < i
    inverse        A   = (I + Akk)^-1, forward substitution on 16 x 16 blocks, then a merge of the blocks
    recompute_w_u  u   = A (beta v),  w = A (beta exp2(G) k),  kg_j = k_j exp2(G_last - G_j)
    state          v_new = u - w S^T,  S <- S Diag(exp2(G_last)) + v_new^T kg,   one chunk after the other
    output         o   = (scale q exp2(G)) S^T + Aqk v_new

The stage split, the tiles and the blocked inverse mirror flash-linear-attention's and vLLM's chunk kernels, because the
fault of vLLM PR 50649 lives in them; a whole-tile triangular solve would be a different experiment.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from k3lab.errors import BadInput
from k3lab.kda.call import KdaCall
from k3lab.kda.reference import l2norm, log_decay
from k3lab.shapes import CHUNK, SUB_CHUNK

STAGES = ("gate_cumsum", "intra", "inverse", "recompute_w_u", "state", "output")
STAGE_OUTPUTS = {
    "gate_cumsum": ("g",),
    "intra": ("Aqk", "Akk"),
    "inverse": ("A",),
    "recompute_w_u": ("w", "u", "kg"),
    "state": ("h", "v_new", "final_state"),
    "output": ("o",),
}
PADDINGS = ("undefined", "zero", "nan")
Padding = str | Mapping[str, str] | Tensor

RCP_LN2 = 1.4426950408889634  # natural log to log2 units
LOWEST_BOUND = -10.0  # half a row block may reach exp2(8 * 10 / ln 2) = 2^115 in float32; a lower bound is taken pair by pair


def gate_is_bounded(lower_bound: float | None) -> bool:
    """True where half a row block of the gate stays inside float32's exponents, so that intra may split them there."""
    return lower_bound is not None and lower_bound >= LOWEST_BOUND


def chunk_index(cu_seqlens: Tensor) -> Tensor:
    """(sequence, chunk within the sequence) of every chunk, [NT, 2] int32 on the device of cu_seqlens."""
    chunks = (cu_seqlens.long().diff() + CHUNK - 1) // CHUNK
    sequence = torch.repeat_interleave(torch.arange(len(chunks), device=chunks.device), chunks)
    first = chunks.cumsum(0) - chunks
    within = torch.arange(len(sequence), device=chunks.device) - first[sequence]
    return torch.stack([sequence, within], 1).int()


def padding_of(padding: Padding, stage: str) -> str:
    """The padding of one stage: the one name given, or the mapping's entry (default "zero")."""
    name = padding if isinstance(padding, str) else padding.get(stage, "zero")
    if name not in PADDINGS:
        raise BadInput(f"padding: {name!r} is not one of {PADDINGS}")
    return name


def check_padding(padding: Padding, sequences: int, heads: int) -> None:
    """Raise BadInput unless padding is a name, a mapping stage -> name, or a bool tensor [sequences, heads]."""
    if isinstance(padding, Tensor):
        if tuple(padding.shape) != (sequences, heads) or padding.dtype != torch.bool:
            raise BadInput(f"padding: shape {tuple(padding.shape)} dtype {padding.dtype}, expected bool [N, H] = {[sequences, heads]}")
        return
    if not isinstance(padding, str | Mapping):
        raise BadInput(f"padding: {padding!r} is neither one of {PADDINGS} nor a mapping from stage to one of them")
    unknown = [] if isinstance(padding, str) else [s for s in padding if s not in STAGES]
    if unknown:
        raise BadInput(f"padding: {unknown[0]!r} is not a stage; the stages are {', '.join(STAGES)}")
    for stage in STAGES:
        padding_of(padding, stage)


class Tiles:
    """The 64-row tiles of a packed batch, and what their masked rows are worth in one stage."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        cu = cu_seqlens.long()
        self.sequence, self.within = chunk_index(cu).long().unbind(1)
        start = cu[:-1][self.sequence] + self.within * CHUNK
        self.rows = start[:, None] + torch.arange(CHUNK, device=cu.device)  # [NT, 64]
        self.valid = self.rows < cu[1:][self.sequence][:, None]
        self.count = self.valid.sum(1)  # rows that exist, 1..64
        self.last = start + self.count - 1  # token of the last row
        self.ragged = bool((self.count < CHUNK).any())
        self.fill: float | Tensor = 0.0

    def padded(self, padding: Padding, stage: str) -> "Tiles":
        """Set what a masked row is worth from here on."""
        if isinstance(padding, Tensor):
            nan = torch.full((), float("nan"), device=padding.device)
            self.fill = torch.where(padding[self.sequence], nan, 0.0)[:, :, None, None]  # [NT, H, 1, 1]
        else:
            self.fill = 0.0 if padding_of(padding, stage) == "zero" else float("nan")
        return self

    def load(self, x: Tensor, dtype: torch.dtype, tiles: Tensor | slice = slice(None)) -> Tensor:
        """Tiles of x [T, H, D] as [NT, H, 64, D] in dtype; masked rows hold the fill."""
        valid = self.valid[tiles]
        rows = torch.where(valid, self.rows[tiles], 0)
        out = x[rows].to(dtype).transpose(1, 2)
        if not self.ragged:
            return out
        fill = self.fill[tiles].to(dtype) if isinstance(self.fill, Tensor) else torch.full((), self.fill, dtype=dtype, device=x.device)
        return torch.where(valid[:, None, :, None], out, fill)

    def store(self, out: Tensor, tile: Tensor, tiles: Tensor | slice = slice(None)) -> None:
        """Write the rows that exist of tile [NT, H, 64, D] to out [T, H, D], rounding to out's dtype."""
        valid = self.valid[tiles]
        out[self.rows[tiles][valid]] = tile.transpose(1, 2)[valid].to(out.dtype)


def gate_cumsum(tiles: Tiles, call: KdaCall, acc: torch.dtype) -> Tensor:
    """g [T, H, K]: the inclusive cumulative log-decay inside each chunk, log2 units."""
    g = log_decay(tiles.load(call.raw_g, acc).transpose(1, 2), call.A_log.to(acc), call.dt_bias.to(acc), call.lower_bound)
    out = torch.empty_like(call.raw_g, dtype=acc)
    tiles.store(out, (g * RCP_LN2).cumsum(1).transpose(1, 2))
    return out


def intra(tiles: Tiles, q_n: Tensor, k_n: Tensor, g: Tensor, beta: Tensor, bounded: bool, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """Aqk [T, H, 64] in the dtype of q_n, scaled, and Akk [T, H, 64] in acc, beta applied; both masked by a select.

    Off the diagonal the exponents are split at the first row of the row block, so both are <= 0. On the diagonal they are
    split at row min(8, n - 1) when the gate is bounded (at most 8 rows * |lower_bound|), else, or below LOWEST_BOUND, taken
    pair by pair.
    """
    q, k, G = (tiles.load(x, acc) for x in (q_n, k_n, g))
    shape = (*q.shape[:2], CHUNK, CHUNK)
    Aqk, Akk = q.new_zeros(shape), q.new_zeros(shape)
    for r in range(0, CHUNK, SUB_CHUNK):
        rows = slice(r, r + SUB_CHUNK)
        Gr, qr, kr = G[:, :, rows], q[:, :, rows], k[:, :, rows]
        if r:
            ref = G[:, :, r : r + 1]
            up = (Gr - ref).exp2()
            down = (k[:, :, :r] * (ref - G[:, :, :r]).exp2()).transpose(-1, -2)
            Aqk[:, :, rows, :r] = (qr * up) @ down
            Akk[:, :, rows, :r] = (kr * up) @ down
        if bounded:
            n = (tiles.count - r).clamp(1, SUB_CHUNK)
            at = torch.minimum(n - 1, torch.full_like(n, SUB_CHUNK // 2))
            ref = Gr.gather(2, at[:, None, None, None].expand(-1, Gr.shape[1], 1, Gr.shape[3]))
            up = (Gr - ref).exp2()
            down = (kr * (ref - Gr).exp2()).transpose(-1, -2)
            Aqk[:, :, rows, rows] = (qr * up) @ down
            Akk[:, :, rows, rows] = (kr * up) @ down
        else:
            for j in range(SUB_CHUNK):
                # rows above j would overflow; the causal select below drops them
                pair = (Gr - Gr[:, :, j : j + 1]).exp2() * kr[:, :, j : j + 1]
                Aqk[:, :, rows, r + j] = (qr * pair).sum(-1)
                Akk[:, :, rows, r + j] = (kr * pair).sum(-1)
    i = torch.arange(CHUNK, device=q.device)
    zero = torch.zeros((), dtype=acc, device=q.device)
    b = tiles.load(beta[:, :, None], acc)
    out_qk = torch.empty(*q_n.shape[:2], CHUNK, dtype=q_n.dtype, device=q_n.device)
    out_kk = torch.empty_like(out_qk, dtype=acc)
    tiles.store(out_qk, torch.where(i[:, None] >= i, Aqk * q_n.shape[-1] ** -0.5, zero))
    tiles.store(out_kk, torch.where(i[:, None] > i, Akk * b, zero))
    return out_qk, out_kk


def inverse(tiles: Tiles, Akk: Tensor, out_dtype: torch.dtype, acc: torch.dtype) -> Tensor:
    """A = (I + Akk)^-1 as [T, H, 64]: 16 x 16 blocks by forward substitution, then the blocks below the diagonal by products.

    A step of the substitution multiplies one row by the whole block, masked rows included: that is where NaN enters.
    """
    L = tiles.load(Akk, acc)
    nb = CHUNK // SUB_CHUNK
    i = torch.arange(SUB_CHUNK, device=L.device)
    zero = torch.zeros((), dtype=acc, device=L.device)
    D = L.unflatten(3, (nb, SUB_CHUNK)).unflatten(2, (nb, SUB_CHUNK)).diagonal(dim1=2, dim2=4).movedim(-1, 2)  # [NT, H, 4, 16, 16]
    X = -torch.where(i[:, None] > i, D, zero)
    exists = (tiles.count[:, None] - SUB_CHUNK * torch.arange(nb, device=L.device))[:, None, :, None]  # rows of each block
    for r in range(2, SUB_CHUNK):
        row = X[:, :, :, r] + (X[:, :, :, r, :, None] * X).sum(-2)
        X[:, :, :, r] = torch.where(exists > r, row, X[:, :, :, r])
    blocks = (X + torch.eye(SUB_CHUNK, dtype=acc, device=L.device)).unbind(2)
    out = L.new_zeros(L.shape)
    inv: dict[tuple[int, int], Tensor] = {}
    for r in range(nb):
        inv[r, r] = blocks[r]
        for c in range(r - 1, -1, -1):
            below = sum(L[:, :, r * SUB_CHUNK : (r + 1) * SUB_CHUNK, m * SUB_CHUNK : (m + 1) * SUB_CHUNK] @ inv[m, c] for m in range(c, r))
            inv[r, c] = -(blocks[r] @ below)
        for c in range(r + 1):
            out[:, :, r * SUB_CHUNK : (r + 1) * SUB_CHUNK, c * SUB_CHUNK : (c + 1) * SUB_CHUNK] = inv[r, c]
    A = torch.empty(*Akk.shape, dtype=out_dtype, device=Akk.device)
    tiles.store(A, out)
    return A


def recompute_w_u(
    tiles: Tiles, k_n: Tensor, v: Tensor, beta: Tensor, A: Tensor, g: Tensor, acc: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """w [T, H, K], u [T, H, V] and kg [T, H, K]: contractions over the token axis, the first stage where length 1 is hit."""
    b_A, b_b = tiles.load(A, acc), tiles.load(beta[:, :, None], acc)
    u, w, kg = torch.empty_like(v), torch.empty_like(k_n), torch.empty_like(k_n)
    tiles.store(u, b_A @ (tiles.load(v, acc) * b_b))
    b_k, b_g = tiles.load(k_n, acc), tiles.load(g, acc)
    tiles.store(w, b_A @ (b_k * b_b * b_g.exp2()))
    tiles.store(kg, b_k * (g[tiles.last].to(acc)[:, :, None] - b_g).exp2())
    return w, u, kg


def state(tiles: Tiles, w: Tensor, u: Tensor, kg: Tensor, g: Tensor, start: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """h [NT, H, V, K] (the state before each chunk), v_new [T, H, V] and final_state [N, H, V, K], chunk after chunk."""
    S = start.to(acc).clone()
    h = S.new_empty(len(tiles.sequence), *S.shape[1:], dtype=u.dtype)
    v_new = torch.empty_like(u)
    for c in range(int(tiles.within.max()) + 1):
        now = (tiles.within == c).nonzero().flatten()
        seq = tiles.sequence[now]
        before = S[seq]
        h[now] = before.to(h.dtype)
        # the product reads the state at storage precision, as the kernels do
        b_v = tiles.load(u, acc, now) - tiles.load(w, acc, now) @ before.to(h.dtype).to(acc).transpose(-1, -2)
        tiles.store(v_new, b_v, now)
        decay = g[tiles.last[now]].to(acc).exp2()[:, :, None, :]
        S[seq] = before * decay + b_v.to(u.dtype).to(acc).transpose(-1, -2) @ tiles.load(kg, acc, now)
    return h, v_new, S


def output(tiles: Tiles, q_n: Tensor, g: Tensor, Aqk: Tensor, v_new: Tensor, h: Tensor, acc: torch.dtype) -> Tensor:
    """o [T, H, V]: what the state before the chunk gives, plus the chunk's own tokens through Aqk."""
    qg = tiles.load(q_n, acc) * tiles.load(g, acc).exp2() * q_n.shape[-1] ** -0.5
    o = torch.empty_like(v_new)
    tiles.store(o, qg @ h.to(acc).transpose(-1, -2) + tiles.load(Aqk, acc) @ tiles.load(v_new, acc))
    return o


def prepare(call: KdaCall, acc: torch.dtype) -> dict[str, Tensor]:
    """q_n, k_n (L2-normalised, in the dtype of q) and beta: row by row, so padding cannot reach them."""
    dtype = call.q.dtype
    return {
        "q_n": l2norm(call.q.to(acc)).to(dtype),
        "k_n": l2norm(call.k.to(acc)).to(dtype),
        "beta": torch.sigmoid(call.raw_beta.to(acc)),
    }


def chunk_kda(call: KdaCall, padding: Padding = "zero", progress: Callable[[str], None] | None = None) -> dict[str, Tensor]:
    """Chunk KDA over a varlen batch, every stage's output by name (STAGE_OUTPUTS), plus q_n, k_n and beta.

    padding   "zero" | "nan" | "undefined" for every stage, or a mapping stage -> name (others "zero"). torch has no
              undefined value, so "undefined" is NaN here: a value that Triton permits, not one that was observed.
              A bool tensor [N, H] sets NaN for those (sequence, head) workgroups and zero for the rest.
    progress  called with the name of each stage before it runs

    Arithmetic is float32 (float64 for float64 calls); stage outputs are stored in the dtype of q, as the kernels store
    them, except g, Akk, beta and final_state. States are [N, H, V, K]. Raises BadInput for a malformed call or padding.
    """
    call.check()
    check_padding(padding, call.num_sequences, call.q.shape[1])
    acc = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    tiles = Tiles(call.cu_seqlens)
    out = prepare(call, acc)

    def begin(stage: str) -> Tiles:
        if progress:
            progress(stage)
        return tiles.padded(padding, stage)

    q_n, k_n, beta = out["q_n"], out["k_n"], out["beta"]
    out["g"] = g = gate_cumsum(begin("gate_cumsum"), call, acc)
    bounded = gate_is_bounded(call.lower_bound)
    out["Aqk"], out["Akk"] = intra(begin("intra"), q_n, k_n, g, beta, bounded, acc)
    out["A"] = inverse(begin("inverse"), out["Akk"], call.q.dtype, acc)
    out["w"], out["u"], out["kg"] = recompute_w_u(begin("recompute_w_u"), k_n, call.v, beta, out["A"], g, acc)
    start = call.state_vk()
    out["h"], out["v_new"], out["final_state"] = state(begin("state"), out["w"], out["u"], out["kg"], g, start, acc)
    out["o"] = output(begin("output"), q_n, g, out["Aqk"], out["v_new"], out["h"], acc)
    return out
