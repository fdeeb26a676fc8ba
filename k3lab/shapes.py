"""Kimi-K3 shapes: the full model, one tensor-parallel rank of it, and the tiny model in data/."""

from dataclasses import dataclass, replace

from k3lab.errors import BadInput

CHUNK = 64  # tokens per chunk of the chunk kernel (FLA's and vLLM's BT)
SUB_CHUNK = 16  # rows per block of the blocked inverse and of the safe-gate intra stage (BC)


@dataclass(frozen=True)
class Shapes:
    """Sizes of one model, or of one rank of it.

    num_layers, hidden         depth and width
    num_heads                  KDA heads on this rank; head_dim = K = V
    conv_width                 width of the causal depthwise convolution before q, k, v
    lower_bound                lower bound of the log-decay, natural log, or None (plain softplus gate)
    full_attn_every            layer l is full attention iff (l + 1) % full_attn_every == 0 or l is the last
    attn_res_block             layers per Attention Residuals block, 0 for a model without AttnRes

    Source: the Kimi-K3 checkpoint configuration (93 layers, 96 heads, hidden 7168, block size 12).
    """

    num_layers: int
    hidden: int
    num_heads: int
    head_dim: int = 128
    conv_width: int = 4
    lower_bound: float | None = -5.0
    full_attn_every: int = 4
    attn_res_block: int = 12
    norm_eps: float = 1e-5

    def is_full_attention(self, layer: int) -> bool:
        """True if layer (0-based) is full attention, False if it is KDA."""
        return (layer + 1) % self.full_attn_every == 0 or layer == self.num_layers - 1

    def rank(self, tensor_parallel: int) -> "Shapes":
        """The same model as one of `tensor_parallel` ranks sees it: heads divided, width kept."""
        if self.num_heads % tensor_parallel:
            raise BadInput(f"{self.num_heads} heads do not divide over tensor_parallel={tensor_parallel}; pick a divisor")
        return replace(self, num_heads=self.num_heads // tensor_parallel)


KIMI_K3 = Shapes(num_layers=93, hidden=7168, num_heads=96)
KIMI_K3_TP8 = KIMI_K3.rank(8)
TINY = Shapes(num_layers=12, hidden=256, num_heads=2, attn_res_block=4, norm_eps=1e-6)
