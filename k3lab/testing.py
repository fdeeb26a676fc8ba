"""What notebooks, tests and benchmarks share: input factories and the error budget against float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from k3lab.kda.call import KdaCall
from k3lab.kda.reference import chunk_kda

LENGTH_MIXES = {
    "single tokens": (1, 1, 1),
    "tile edges": (1, 63, 64, 65),
    "decodes and a prefill": (1, 1, 1, 1, 1, 200),
    "ragged": (2, 16, 17, 130, 1, 48),
}


def random_call(
    lengths: Sequence[int],
    heads: int = 2,
    head_dim: int = 128,
    dtype: torch.dtype = torch.float32,
    decay: str = "mixed",
    lower_bound: float | None = -5.0,
    state_layout: str = "vk",
    seed: int = 0,
    device: str = "cpu",
) -> KdaCall:
    """A KdaCall from random draws at realistic magnitudes.

    decay: "mixed" spreads the log-decay over (lower_bound, 0); "strong" holds it near the lower bound (overflow of
    exp(-G)); "weak" holds it near 0 with keys correlated at about 0.7 (large norm of Akk). Draws from randn alone
    show neither hazard. num_decodes is the number of leading length-1 sequences.
    """
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float32)

    t, n, h, d = sum(lengths), len(lengths), heads, head_dim
    k = randn(t, h, d)
    raw_g = 2.0 * randn(t, h, d)
    if decay == "strong":
        raw_g = 6.0 + 0.1 * raw_g
    elif decay == "weak":
        raw_g = -6.0 + 0.1 * raw_g
        k = 0.7**0.5 * randn(1, h, d) + 0.3**0.5 * k
    elif decay != "mixed":
        raise ValueError(f"decay {decay!r} is not mixed, strong or weak")
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    lead = next((i for i, x in enumerate(lengths) if x != 1), n)
    has = torch.ones(n, dtype=torch.bool)
    has[lead:] = torch.arange(n - lead) % 2 == 1
    state = 0.3 * randn(n, h, d, d)
    call = KdaCall(
        q=randn(t, h, d).to(dtype), k=k.to(dtype), v=randn(t, h, d).to(dtype), raw_g=raw_g.to(dtype), raw_beta=randn(t, h).to(dtype),
        A_log=0.2 * randn(h), dt_bias=0.5 * randn(h, d), cu_seqlens=cu, initial_state=state, has_initial_state=has,
        output_gate=randn(t, h, d).to(dtype), norm_weight=1.0 + 0.1 * randn(d),
        lower_bound=lower_bound, state_layout=state_layout, num_decodes=lead,
    )  # fmt: skip
    return call.check().to(device)


def repeated_token(call: KdaCall, raw_beta: float) -> KdaCall:
    """The call with one key in every row and no decay: the terms of a row of (I + Akk)^-1 k cancel, so that roundings show."""
    k, raw_g = call.k[:1].expand_as(call.k).contiguous(), torch.full_like(call.raw_g, -60.0)
    return replace(call, k=k, raw_g=raw_g, raw_beta=torch.full_like(call.raw_beta, raw_beta))


def random_sources(
    tokens: int, hidden: int, blocks: int, dtype: torch.dtype = torch.float32, pending: bool = True, output_norm: bool = False,
    spare: int = 0, seed: int = 0, device: str = "cpu",
) -> dict[str, Tensor | int | float]:  # fmt: skip
    """Arguments of attn_res from random draws: blocks of growing norm, as in a trained model, and scores of a few units.

    spare: further rows of the bank, all NaN, which nothing may read.
    """
    gen = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    bank = torch.stack([(0.5 + 0.3 * i) * randn(tokens, hidden) for i in range(blocks + spare)]) if blocks + spare else None
    if spare:
        bank[blocks:] = float("nan")
    out = {
        "prefix": randn(tokens, hidden).to(dtype), "bank": None if bank is None else bank.to(dtype), "num_blocks": blocks, "eps": 1e-5,
        "score_norm": (1 + 0.1 * randn(hidden)).to(dtype), "score_proj": (randn(hidden) * hidden**-0.5).to(dtype),
    }  # fmt: skip
    if pending:
        out["pending"] = randn(tokens, hidden).to(dtype)
    if output_norm:
        out["output_norm"] = (1 + 0.1 * randn(hidden)).to(dtype)
    return out


def low_precision_reference(call: KdaCall, dtype: torch.dtype) -> dict[str, Tensor]:
    """The chunked twin in float32 arithmetic with stage outputs stored in dtype: the error such storage cannot avoid."""
    return chunk_kda(call, torch.float32, store=dtype)


@dataclass(frozen=True)
class Budget:
    """An error and what it may be: budget = 2 x (error of the low-precision reference + one rounding of the truth)."""

    name: str
    error: float
    budget: float
    rms_error: float
    rms_budget: float
    reference_error: float
    finite: bool

    @property
    def ok(self) -> bool:
        return self.finite and self.error <= self.budget and self.rms_error <= self.rms_budget

    def __str__(self) -> str:
        return (
            f"{self.name}: max error {self.error:.3g} of {self.budget:.3g}, rms {self.rms_error:.3g} of {self.rms_budget:.3g}, "
            f"low-precision reference {self.reference_error:.3g}, {'finite' if self.finite else 'NOT FINITE'}"
        )


def error_budget(name: str, got: Tensor, truth: Tensor, low: Tensor, dtype: torch.dtype) -> Budget:
    """Judge `got` against the float64 `truth`, given `low`, a reference run at the precision of dtype.

        error  = max |got - truth|          budget = 2 (max |low - truth| + eps(dtype) max |truth|)

    and the same with root mean squares, so that a small systematic error cannot hide under one large element.
    """
    got, truth, low = got.double().cpu(), truth.double().cpu(), low.double().cpu()
    eps = torch.finfo(dtype).eps

    def rms(x: Tensor) -> float:
        return float(x.square().mean().sqrt())

    finite = bool(torch.isfinite(got).all())
    bad, ref = got - truth, low - truth
    return Budget(
        name=name,
        error=float(bad.abs().max()),
        budget=2 * (float(ref.abs().max()) + eps * float(truth.abs().max())),
        rms_error=rms(bad),
        rms_budget=2 * (rms(ref) + eps * rms(truth)),
        reference_error=float(ref.abs().max()),
        finite=finite,
    )


def assert_within_budget(name: str, got: Tensor, truth: Tensor, low: Tensor, dtype: torch.dtype) -> Budget:
    """error_budget, as an assertion that prints error, budget and the reference's error."""
    b = error_budget(name, got, truth, low, dtype)
    assert b.ok, str(b)
    return b
