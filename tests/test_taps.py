"""vLLM's tap recorded from a stand-in of its model: kind attn_res, by layer, and what notebook 03 reads from it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from k3lab.attn_res import attn_res
from k3lab.attn_res.streams import compare, streams
from k3lab.capture import Capture, record

LAYERS, BLOCK, TOKENS, HIDDEN, EPS = 6, 2, 5, 32, 1e-5


class Model:
    """What the tap reads, with vLLM's names; the bank has a row for every block, also for those that nobody wrote yet."""

    use_attn_res = True

    def __init__(self, mixture: bool, end: int = LAYERS):
        self._aux_attn_res_stream = mixture
        self.start_layer, self.end_layer = 0, end
        self.config = SimpleNamespace(attn_res_block_size=BLOCK)
        self.layers = [self._consumer(-(-i // BLOCK)) for i in range(LAYERS)]
        out = self._consumer(0)
        self.output_attn_res_norm, self.output_attn_res_proj = out.self_attention_res_norm, out.self_attention_res_proj

    @staticmethod
    def _consumer(blocks: int) -> SimpleNamespace:
        return SimpleNamespace(
            self_attention_res_norm=SimpleNamespace(weight=torch.rand(HIDDEN) + 0.5, variance_epsilon=EPS),
            self_attention_res_proj=SimpleNamespace(weight=torch.randn(1, HIDDEN)),
            prev_valid_blocks=blocks,
        )

    def mixed(self, layer_idx, prefix, block_residual):
        last = layer_idx + 1 == LAYERS
        consumer = self.layers[min(layer_idx + 1, LAYERS - 1)]
        norm = self.output_attn_res_norm if last else consumer.self_attention_res_norm
        proj = self.output_attn_res_proj if last else consumer.self_attention_res_proj
        n = LAYERS // BLOCK if last else consumer.prev_valid_blocks
        return attn_res(prefix, norm.weight, proj.weight[0], block_residual.transpose(0, 1), num_blocks=n, eps=EPS).o


class Nvidia(Model):
    def _capture_aux_hidden_stream(self, layer_idx, prefix_sum, pending_mlp_out, block_residual):
        prefix = prefix_sum if pending_mlp_out is None else prefix_sum + pending_mlp_out
        return self.mixed(layer_idx, prefix, block_residual) if self._aux_attn_res_stream else prefix


class Amd(Model):
    def _capture_aux_hidden_stream(self, layer_idx, prefix, block_residual):
        return self.mixed(layer_idx, prefix, block_residual) if self._aux_attn_res_stream else prefix


@pytest.fixture(params=[Nvidia, Amd])
def kind(request, monkeypatch):
    """A model class, found by the recorder in a module of its own."""
    module = ModuleType("engine_with_taps")
    module.KimiLinearModel = type("KimiLinearModel", (request.param,), dict(vars(request.param)))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.KimiLinearModel


def step(model, taps):
    """One step: each tap with fresh activations, and what the engine then feeds its drafter."""
    fed = {}
    for layer in taps:
        bank = torch.randn(TOKENS, LAYERS // BLOCK, HIDDEN)
        bank[:, -(-(layer + 1) // BLOCK) :] = float("nan")  # blocks that are not committed yet
        pending = [torch.randn(TOKENS, HIDDEN)] if isinstance(model, Nvidia) else []
        fed[layer] = model._capture_aux_hidden_stream(layer, torch.randn(TOKENS, HIDDEN), *pending, bank)
    return fed


@pytest.mark.parametrize("mixture", [True, False])
def test_both_streams_of_every_tap_come_back_from_what_one_step_recorded(kind, tmp_path, mixture):
    """The stream that the engine fed is told bit for bit or by the mixture's arithmetic, the other one can be had as well."""
    taps = (0, 1, 3, LAYERS - 1)
    handle = record("engine_with_taps:KimiLinearModel._capture_aux_hidden_stream", tmp_path, max_calls=len(taps))
    fed = step(kind(mixture), taps)
    assert handle.error is None
    assert sorted(Capture.load(p).metadata["layer"] for p in handle.written) == sorted(taps)
    for layer, got in fed.items():
        both = streams(tmp_path, layer + 1)
        torch.testing.assert_close(both.mixture if mixture else both.prefix, got)
        assert both.mixture.isfinite().all()
        assert both.weights.shape == (TOKENS, -(-(layer + 1) // BLOCK) + 1)
    assert compare(tmp_path)["layer"].tolist() == [0, *(t + 1 for t in taps)]
    for path in handle.written:
        capture = Capture.load(path)
        assert capture.metadata["stream"] == ("mixture" if mixture else "prefix")
        assert ("o" in capture.tensors) == mixture, "a prefix must not be taken for the mixture"
        assert not set(capture.check()["severity"]) & {"error", "warning"}


def test_a_tap_whose_consumer_is_on_another_rank_passes_unrecorded(kind, tmp_path):
    handle = record("engine_with_taps:KimiLinearModel._capture_aux_hidden_stream", tmp_path)
    step(kind(False, end=3), [1, 2])
    assert (len(handle.written), handle.skipped, handle.error) == (1, 1, None)
    handle.stop()


def test_a_model_built_otherwise_ends_the_recording_and_not_the_server(kind, tmp_path, capsys):
    handle = record("engine_with_taps:KimiLinearModel._capture_aux_hidden_stream", tmp_path)
    model = kind(False)
    del model.layers[2].self_attention_res_norm
    assert step(model, [1])[1].shape == (TOKENS, HIDDEN)
    assert "self_attention_res_norm" in handle.error
    assert "recording stopped" in capsys.readouterr().err
