"""One KDA call, checked: the tensors that a layer hands to its kernels."""

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from k3lab.errors import BadInput

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STATE_LAYOUTS = ("vk", "kv")  # [N, H, V, K] as vLLM keeps it, [N, H, K, V] as fla does by default


@dataclass(frozen=True)
class KdaCall:
    """Inputs of one KDA layer step over a packed batch of N sequences and T tokens.

    q, k           [T, H, K]   after the causal convolution, before the L2 norm
    v              [T, H, V]
    raw_g          [T, H, K]   gate before `lower_bound * sigmoid(exp(A_log) * (raw_g + dt_bias))`
    raw_beta       [T, H]      before the sigmoid
    A_log, dt_bias [H], [H, K] fp32
    cu_seqlens     [N + 1]     int32 or int64, starts at 0, ends at T, strictly increasing
    initial_state  [N, H, V, K] ("vk") or [N, H, K, V] ("kv"), fp32; None means zeros
    has_initial_state [N] bool; a False row starts from zeros whatever initial_state holds
    output_gate    [T, H, V]   before the sigmoid; norm_weight [V]: both None where the capture has none
    lower_bound    natural log, or None for the gate `-exp(A_log) * softplus(raw_g + dt_bias)`
    num_decodes    the first num_decodes sequences are decodes of length 1 (decode-first batch)
    spec_mask      [N] bool, True for a sequence of speculative rows; None where there are none
    num_accepted_tokens [N] int, of the step before; kept for provenance, initial_state is already rolled back
    state_indices  [N] int, the slot each state came from; an index <= 0 is the null slot: no state, output zero
    layer, step    where the call came from, -1 if unknown

    Raises BadInput from `check()`, naming the tensor and the reason.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    raw_g: Tensor
    raw_beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    cu_seqlens: Tensor
    initial_state: Tensor | None = None
    has_initial_state: Tensor | None = None
    output_gate: Tensor | None = None
    norm_weight: Tensor | None = None
    lower_bound: float | None = -5.0
    state_layout: str = "vk"
    num_decodes: int = 0
    spec_mask: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    state_indices: Tensor | None = None
    eps: float = 1e-5
    layer: int = -1
    step: int = -1

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [N] int64 on the CPU."""
        return self.cu_seqlens.long().cpu().diff()

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> "KdaCall":
        """The same call on another device; dtype, if given, recasts the token tensors (q k v raw_g raw_beta output_gate)."""
        token = {"q", "k", "v", "raw_g", "raw_beta", "output_gate"}
        moved = {}
        for f in fields(self):
            x = getattr(self, f.name)
            if isinstance(x, Tensor):
                moved[f.name] = x.to(device=device, dtype=dtype if f.name in token else None)
        return replace(self, **moved)

    def state_vk(self) -> Tensor:
        """The starting state of every sequence as [N, H, V, K] fp32 (or float64 if stored so), zeros where there is none.

        May be initial_state itself: read it, do not write it.
        """
        n, h, kk, vv = self.num_sequences, self.q.shape[1], self.q.shape[2], self.v.shape[2]
        if self.initial_state is None:
            return self.q.new_zeros(n, h, vv, kk, dtype=torch.float32)
        s = self.initial_state if self.state_layout == "vk" else self.initial_state.transpose(-1, -2)
        if self.has_initial_state is not None and not bool(self.has_initial_state.all()):
            # a select, not a product: a stale slot may hold NaN
            s = torch.where(self.has_initial_state.bool()[:, None, None, None], s, torch.zeros_like(s))
        return s.contiguous()

    def select(self, sequences: list[int] | Tensor) -> tuple["KdaCall", Tensor]:
        """The call over some of its sequences, in the order given, and the token rows [T'] they came from.

        cu_seqlens is rebased; num_decodes is reset to 0 because the order may have changed.
        """
        ids = torch.as_tensor(sequences, dtype=torch.long)
        cu = self.cu_seqlens.long().cpu()
        parts = [torch.arange(int(cu[i]), int(cu[i + 1])) for i in ids.tolist()]
        rows = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)
        dev = self.q.device
        rows_d, ids_d = rows.to(dev), ids.to(dev)
        lengths = (cu[1:] - cu[:-1])[ids]
        new_cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(dev, self.cu_seqlens.dtype)
        per_token = {n: getattr(self, n)[rows_d] for n in ("q", "k", "v", "raw_g", "raw_beta")}
        if self.output_gate is not None:
            per_token["output_gate"] = self.output_gate[rows_d]
        per_sequence = {
            n: getattr(self, n)[ids_d]
            for n in ("initial_state", "has_initial_state", "spec_mask", "num_accepted_tokens", "state_indices")
            if getattr(self, n) is not None
        }
        return replace(self, cu_seqlens=new_cu, num_decodes=0, **per_token, **per_sequence), rows_d

    def check(self) -> "KdaCall":
        """Raise BadInput for the first thing that no kernel could use; return self."""

        def fail(name: str, why: str) -> None:
            raise BadInput(f"{name}: {why}")

        for f in fields(self):
            x = getattr(self, f.name)
            if f.type not in (Tensor, Tensor | None) or (x is None and f.type is not Tensor):
                continue
            if not isinstance(x, Tensor):
                fail(f.name, f"is a {type(x).__name__}, expected a tensor")
            if x.device.type == "meta":
                fail(f.name, "is on the meta device, which holds no values")
        if self.state_layout not in STATE_LAYOUTS:
            fail("state_layout", f"{self.state_layout!r} is not one of {STATE_LAYOUTS}")
        if self.q.dim() != 3:
            fail("q", f"shape {tuple(self.q.shape)}, expected [T, H, K]")
        t, h, kk = self.q.shape
        if self.v.dim() != 3:
            fail("v", f"shape {tuple(self.v.shape)}, expected [T, H, V]")
        vv = self.v.shape[2]
        if not (h and kk and vv):
            fail("q, v", f"shapes {tuple(self.q.shape)}, {tuple(self.v.shape)}; H, K and V must be at least 1")
        n = self.num_sequences
        expected = {
            "k": (t, h, kk), "v": (t, h, vv), "raw_g": (t, h, kk), "raw_beta": (t, h), "A_log": (h,), "dt_bias": (h, kk),
            "output_gate": (t, h, vv), "norm_weight": (vv,), "has_initial_state": (n,), "spec_mask": (n,), "num_accepted_tokens": (n,),
            "state_indices": (n,),
            "initial_state": (n, h, vv, kk) if self.state_layout == "vk" else (n, h, kk, vv),
        }  # fmt: skip
        for name, shape in expected.items():
            x = getattr(self, name)
            if x is not None and tuple(x.shape) != shape:
                fail(name, f"shape {tuple(x.shape)}, expected {list(shape)} from q {tuple(self.q.shape)} and cu_seqlens of {n} sequences")
        for name in ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias", "initial_state", "output_gate", "norm_weight"):
            x = getattr(self, name)
            if x is not None and x.dtype not in FLOATS:
                fail(name, f"dtype {x.dtype}, expected float16, bfloat16, float32 or float64")
        for name in ("cu_seqlens", "state_indices", "num_accepted_tokens", "has_initial_state", "spec_mask"):
            x = getattr(self, name)
            if x is not None and (x.is_floating_point() or x.is_complex()):
                fail(name, f"shape {tuple(x.shape)} dtype {x.dtype}, expected whole numbers (masks: bool)")
        if not (self.q.dtype == self.k.dtype == self.v.dtype):
            fail("q, k, v", f"dtypes {self.q.dtype}, {self.k.dtype}, {self.v.dtype} differ")
        cu = self.cu_seqlens
        if cu.dim() != 1 or cu.dtype == torch.bool:
            fail("cu_seqlens", f"shape {tuple(cu.shape)} dtype {cu.dtype}, expected [N + 1] integers")
        c = cu.long().cpu()
        if n < 1 or int(c[0]) != 0 or int(c[-1]) != t:
            fail("cu_seqlens", f"is {c.tolist()[:1]}..{c.tolist()[-1:]}, expected to run from 0 to T = {t} over at least one sequence")
        if bool((c.diff() <= 0).any()):
            i = int((c.diff() <= 0).nonzero()[0])
            fail("cu_seqlens", f"sequence {i} has {int(c[i + 1] - c[i])} tokens; every sequence needs at least one")
        if not isinstance(self.num_decodes, int) or not 0 <= self.num_decodes <= n:
            fail("num_decodes", f"{self.num_decodes!r} is not a whole number in 0..{n}")
        bound = self.lower_bound
        if bound is not None and not (isinstance(bound, float | int) and math.isfinite(bound) and bound < 0):
            fail("lower_bound", f"{bound!r} is not a negative number (natural log); None is the gate without a bound")
        return self
