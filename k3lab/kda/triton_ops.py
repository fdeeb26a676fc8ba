"""What the KDA kernels share: loads by a row mask, the span of a chunk, the gate."""

import triton
import triton.language as tl


@triton.jit
def load_rows(p, m, PADDING: tl.constexpr):
    """Load a tile by a row mask; PADDING says what a masked row is worth: no `other`, 0 or NaN."""
    if PADDING == "undefined":
        b = tl.load(p, mask=m)
    elif PADDING == "zero":
        b = tl.load(p, mask=m, other=0.0)
    else:
        b = tl.load(p, mask=m, other=float("nan"))
    return b


@triton.jit
def chunk_span(cu_seqlens, chunk_indices, T, i_t, BT: tl.constexpr):
    """First token row of chunk i_t in the packed batch, and how many of its BT rows are valid (none past T)."""
    i_n = tl.load(chunk_indices + 2 * i_t)
    row0 = tl.load(cu_seqlens + i_n) + tl.load(chunk_indices + 2 * i_t + 1) * BT
    eos = tl.minimum(tl.load(cu_seqlens + i_n + 1), T)
    return row0.to(tl.int64), tl.minimum(eos - row0, BT)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + 2 atanh(y / (2 + y)) with y = exp(-|x|): no overflow, and no log(1 + y) that drops y's digits."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)  # at most 1/3, so the series ends at z^7
    z = s * s
    p = 1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15))))))
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + z * p)


@triton.jit
def log_decay(b_x, b_a, lower_bound, BOUNDED: tl.constexpr):
    """The log-decay, natural log, of x = raw_g + dt_bias at a = exp(A_log)."""
    return lower_bound * tl.sigmoid(b_a * b_x) if BOUNDED else -b_a * softplus(b_x)
