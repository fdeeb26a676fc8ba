"""vLLM's tap of Attention Residuals as a capture of kind "attn_res": the call has the sources, its object the consumer's weights.

    record("vllm.models.kimi_k3.nvidia.model:KimiLinearModel._capture_aux_hidden_stream", "captures", max_calls=3)

(`vllm.models.kimi_k3.amd.linear` on ROCm.) vLLM calls it once a step for each layer that a drafter reads, whichever stream it feeds.
Source: that method in the two modules; on ROCm the prefix holds the MLP output already.
"""

from typing import Any

TAP = {"self", "layer_idx", "block_residual"}
PREFIX = ("prefix_sum", "prefix")


def is_tap(named: dict[str, Any]) -> bool:
    """Whether arguments by name are those of vLLM's tap."""
    return named.keys() >= TAP and any(n in named for n in PREFIX)


def tap(named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(tensors, metadata) of a tap, named as in the format, from the arguments of vLLM's method.

    bank is block_residual [T, blocks, hidden] as [n, T, hidden], the n blocks that the consumer reads. score_norm, score_proj and eps
    are the consumer's: the next layer's attention side, or the output side after the last layer. stream is what the engine feeds.
    None at the end of a pipeline stage that is not the last: the consumer is on another rank; and in a model without AttnRes.
    Raises AttributeError where the object is built otherwise.
    """
    model, layer = named["self"], int(named["layer_idx"])
    if not model.use_attn_res:
        return None
    count, end = len(model.layers), model.end_layer
    if layer + 1 < end:
        consumer = model.layers[layer + 1]
        norm, proj, blocks = consumer.self_attention_res_norm, consumer.self_attention_res_proj, consumer.prev_valid_blocks
    elif end < count:
        return None
    else:
        norm, proj, blocks = model.output_attn_res_norm, model.output_attn_res_proj, -(-count // model.config.attn_res_block_size)
    tensors = {
        "prefix": next(named[n] for n in PREFIX if n in named), "bank": named["block_residual"][:, :blocks].transpose(0, 1),
        "score_norm": norm.weight, "score_proj": proj.weight.squeeze(0), "pending": named.get("pending_mlp_out"),
    }  # fmt: skip
    metadata = {
        "layer": layer, "num_layers": count, "pp_layers": [getattr(model, "start_layer", 0), end], "eps": float(norm.variance_epsilon),
        "stream": "mixture" if model._aux_attn_res_stream else "prefix", "dtype": str(tensors["prefix"].dtype).removeprefix("torch."),
    }  # fmt: skip
    if tensors["pending"] is None:
        del tensors["pending"]
        metadata["absent"] = ["pending"]
    return tensors, metadata
