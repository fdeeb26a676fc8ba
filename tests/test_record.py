"""The recorder on a stand-in engine: kernels in one module, imported by name into the module that calls them, as in vLLM."""

import importlib
import multiprocessing
import os
import sys
import threading
from dataclasses import replace

import pytest
import torch
from standin_engine import write_engine
from torch._subclasses import FakeTensorMode

from k3lab.capture import Capture, record, record_from_env
from k3lab.errors import BadInput
from k3lab.kda.reference import log_decay, recurrent_kda
from k3lab.testing import random_call


@pytest.fixture
def engine(tmp_path, monkeypatch, request):
    """The calling module of a fresh stand-in engine."""
    name = f"engine{abs(hash(request.node.name))}"
    (tmp_path / "lib").mkdir()
    write_engine(tmp_path / "lib", name)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    module = importlib.import_module(f"{name}_layer")
    yield module
    for part in ("layer", "kernels"):
        sys.modules.pop(f"{name}_{part}", None)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "captures"


def files(out):
    return sorted(out.glob("*")) if out.exists() else []


def mixed_call(**kwargs):
    call = random_call((1, 1, 9), heads=2, head_dim=8, **kwargs)
    return replace(call, has_initial_state=None, output_gate=None, norm_weight=None)


def test_a_recorded_chunk_call_replays_to_what_the_engine_returned(engine, out):
    """Arguments by keyword, dense states: the file alone gives the same call and the same result."""
    call = mixed_call()
    handle = record(f"{engine.__name__}:chunk_kda_with_fused_gate", out, max_calls=3, state_layout="vk", layer=5)
    o, final = engine.prefill(call)
    handle.stop()
    (path,) = files(out)
    assert path.name == f"kda-rank0-pid{os.getpid()}-0000.safetensors"
    c = Capture.load(path)
    replayed = c.kda_call()
    for name in ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias", "cu_seqlens", "initial_state"):
        assert torch.equal(getattr(replayed, name), getattr(call, name)), name
    assert (replayed.lower_bound, replayed.layer, replayed.num_decodes) == (-5.0, 5, 2)
    assert torch.equal(c.results()["o"], o[0])
    assert torch.equal(c.results()["final_state"], final)
    again = recurrent_kda(replayed)
    torch.testing.assert_close(again["o"].float(), o[0], rtol=1e-4, atol=1e-5)
    assert set(c.check().severity) <= {"note"}
    assert c.metadata["function"].endswith("_layer:chunk_kda_with_fused_gate")


def test_the_module_that_calls_is_the_one_to_record(engine, out):
    """Recording in the defining module sees nothing: the caller holds its own reference."""
    kernels = engine.__name__.replace("_layer", "_kernels")
    handle = record(f"{kernels}:attend", out)
    engine.step(torch.ones(2))
    assert handle.written == []
    handle.stop()
    with_caller = record(f"{engine.__name__}:attend", out)
    engine.step(torch.ones(2))
    assert len(with_caller.written) == 1
    with_caller.stop()


def test_a_pool_updated_in_place_is_recorded_before_and_after_for_the_used_slots(engine, out):
    call = mixed_call()
    pool = torch.randn(40, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    pool[0] = float("nan")  # the null slot may hold anything
    slots = torch.tensor([7, 0, 3, 0, 0], dtype=torch.int32)  # the last two are graph padding
    before = pool.clone()
    record(f"{engine.__name__}:fused_recurrent_kda", out, max_calls=1, state_layout="vk")
    o, returned = engine.decode(call, pool, slots)
    assert returned is pool
    c = Capture.load(files(out)[0])
    zero = torch.zeros(2, 8, 8)
    assert torch.equal(c.tensors["initial_state"], torch.stack([before[7], zero, before[3]]))
    assert torch.equal(c.tensors["final_state"], torch.stack([pool[7], zero, pool[3]]))
    assert not torch.equal(pool[7], before[7])
    assert c.kda_call().state_indices.tolist() == [7, 0, 3]
    assert torch.equal(c.results()["o"], o[0])
    again = recurrent_kda(c.kda_call())
    torch.testing.assert_close(again["final_state"][[0, 2]].float(), c.tensors["final_state"][[0, 2]], rtol=1e-4, atol=1e-5)
    assert "arg.initial_state" not in c.tensors
    assert c.metadata["absent"] == ["num_accepted_tokens"]


def test_speculative_rows_record_the_accepted_slot_and_every_token_state(engine, out):
    call = random_call((3, 2), heads=2, head_dim=8)
    call = replace(call, has_initial_state=None, output_gate=None, norm_weight=None)
    pool = torch.randn(12, 2, 8, 8, generator=torch.Generator().manual_seed(2))
    slots, accepted = torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.tensor([2, 1])
    before = pool.clone()
    record(f"{engine.__name__}:fused_recurrent_kda", out, max_calls=1, state_layout="vk")
    engine.decode(call, pool, slots, accepted)
    c = Capture.load(files(out)[0])
    assert torch.equal(c.tensors["initial_state"], before[[5, 7]])
    assert torch.equal(c.tensors["final_state"], pool[[6, 8]])
    assert torch.equal(c.tensors["token_states"], pool[[4, 5, 6, 7, 8]])
    truth = recurrent_kda(c.kda_call(), token_states=True)
    torch.testing.assert_close(truth["states"].float(), c.tensors["token_states"], rtol=1e-4, atol=1e-5)


def test_packed_decode_input_is_split_and_replays(engine, out):
    call = random_call((1, 1, 1), heads=2, head_dim=8)
    pool = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(3))
    record(f"{engine.__name__}:packed_decode", out, max_calls=1, state_layout="vk")
    o, _ = engine.packed(call, pool, torch.tensor([5, 2, 1]))
    c = Capture.load(files(out)[0])
    replayed = c.kda_call()
    for name in ("q", "k", "v", "raw_g", "cu_seqlens"):
        assert torch.equal(getattr(replayed, name), getattr(call, name)), name
    assert replayed.num_decodes == 3
    torch.testing.assert_close(recurrent_kda(replayed)["o"].float(), o[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activated", [False, True])
def test_gate_and_beta_are_named_by_what_the_call_says_of_them(engine, out, activated):
    """An already activated gate must not be stored as raw: that is a silent mismatch."""
    call = mixed_call()
    flags = {"A_log": call.A_log, "dt_bias": call.dt_bias.flatten(), "cu_seqlens": call.cu_seqlens}
    fed = call
    if activated:
        g = log_decay(call.raw_g, call.A_log, call.dt_bias, call.lower_bound)
        fed, flags = replace(call, raw_g=g, raw_beta=torch.sigmoid(call.raw_beta)), {"cu_seqlens": call.cu_seqlens}
    else:
        flags |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": True, "lower_bound": -5.0}
    record(f"{engine.__name__}:chunk_kda", out, max_calls=1)
    engine.fla_style(fed, **flags)
    c = Capture.load(files(out)[0])
    assert ("g" in c.tensors, "raw_g" in c.tensors) == (activated, not activated)
    assert c.metadata["state_layout"] == "kv"
    want, got = recurrent_kda(replace(call, initial_state=None)), recurrent_kda(c.kda_call())
    torch.testing.assert_close(got["o"], want["o"], rtol=1e-4, atol=1e-5)


def test_unknown_arguments_plain_values_and_functions_without_signature(engine, out):
    record(f"{engine.__name__}:attend", out, max_calls=1, arguments={"x": "prefix"})
    x = torch.arange(4.0)
    engine.step(x, 3.0, [torch.ones(2), torch.zeros(2)])
    c = Capture.load(files(out)[0])
    assert c.kind == "call"
    assert c.tensors.keys() == {"prefix", "arg.cache.0", "arg.cache.1", "result.0"}
    assert c.metadata["arg.scale"] == 3.0
    record(f"{engine.__name__}:add", out, max_calls=1)
    engine.plus(x, x)
    c = Capture.load(files(out)[1])
    assert torch.equal(c.tensors["arg.arg1"], x)
    assert torch.equal(c.tensors["result.0"], 2 * x)


def test_an_argument_can_be_left_out(engine, out):
    record(f"{engine.__name__}:attend", out, max_calls=1, arguments={"cache": None})
    engine.step(torch.ones(2), 3.0, torch.ones(1000))
    assert Capture.load(files(out)[0]).tensors.keys() == {"arg.x", "result.0"}


def test_what_the_call_overwrites_was_copied_before(engine, out):
    x = torch.ones(3)
    engine.attend = lambda x, scale, cache: x.mul_(7.0)
    record(f"{engine.__name__}:attend", out, max_calls=1)
    engine.step(x)
    c = Capture.load(files(out)[0])
    assert torch.equal(c.tensors["arg.x"], torch.ones(3))
    assert torch.equal(c.tensors["result.0"], torch.full((3,), 7.0))


def test_once_full_the_original_function_is_back(engine, out, capsys):
    original = engine.attend
    handle = record(f"{engine.__name__}:attend", out, max_calls=2)
    held = engine.attend  # somebody else's reference to the wrapper
    assert held is not original
    assert held.__name__ == "attend"
    for i in range(5):
        assert torch.equal(engine.step(torch.full((2,), float(i))), torch.full((2,), 2.0 * i))
    assert engine.attend is original
    assert not handle.active
    held(torch.ones(2), 2.0, None)
    assert len(files(out)) == len(handle.written) == 2
    assert capsys.readouterr().err.count("max_calls=2 reached") == 1


@pytest.mark.parametrize(("limit", "expected"), [(63, 0), (64, 0), (127, 0), (128, 1), (200, 1), (256, 2)])
def test_bytes_are_bounded_before_anything_is_written(engine, out, limit, expected):
    """16 floats in and 16 out are 128 bytes a call; a call that would not fit ends the recording."""
    original = engine.attend
    handle = record(f"{engine.__name__}:attend", out, max_calls=100, max_bytes=limit)
    for _ in range(3):
        engine.step(torch.ones(16))
    assert handle.bytes == 128 * expected <= limit
    assert len(files(out)) == expected
    assert engine.attend is original


def test_every_and_skip_pick_one_layer_of_each_step(engine, out):
    handle = record(f"{engine.__name__}:attend", out, max_calls=3, every=4, skip=2)
    for i in range(16):
        engine.step(torch.full((1,), float(i)))
    assert [float(Capture.load(p).tensors["arg.x"]) for p in handle.written] == [2.0, 6.0, 10.0]
    assert [Capture.load(p).metadata["call"] for p in handle.written] == [2, 6, 10]


def test_no_file_is_overwritten(engine, out):
    """Two recorders of one process, and a run after it under the same process id, number on."""
    for _ in range(2):
        first = record(f"{engine.__name__}:attend", out, max_calls=1)
        second = record(f"{engine.__name__}:add", out, max_calls=1)
        engine.step(torch.ones(1))
        engine.plus(torch.ones(1), torch.ones(1))
        assert first.written != second.written
    assert [p.name[-16:-12] for p in files(out)] == ["0000", "0001", "0002", "0003"]


def test_exceptions_of_the_function_propagate_and_recording_goes_on(engine, out):
    handle = record(f"{engine.__name__}:attend", out)
    with pytest.raises(ZeroDivisionError, match="the kernel's own trouble"):
        engine.step(torch.ones(1), None)
    with pytest.raises(TypeError, match="unsupported operand"):
        engine.step(torch.ones(1), object())
    assert files(out) == []
    engine.step(torch.ones(1))
    assert len(handle.written) == 1
    handle.stop()
    handle.stop()


def test_a_call_with_wrong_arguments_fails_as_it_would_unrecorded(engine, out):
    handle = record(f"{engine.__name__}:attend", out)
    with pytest.raises(TypeError, match=r"attend\(\) missing 2 required"):
        engine.attend(torch.ones(1))
    assert (handle.active, handle.error, files(out)) == (True, None, [])
    handle.stop()


@pytest.mark.parametrize("where", ["save", "slots"])
def test_a_failure_to_record_is_reported_once_and_the_server_goes_on(engine, out, monkeypatch, capsys, where):
    call, pool = mixed_call(), torch.zeros(4, 2, 8, 8)
    original = engine.fused_recurrent_kda
    handle = record(f"{engine.__name__}:fused_recurrent_kda", out)
    if where == "save":

        def full_disk(self, path):
            raise OSError("no space left on device")

        monkeypatch.setattr(Capture, "save", full_disk)
        reason = "no space left on device"
        for _ in range(3):
            o, _ = engine.decode(call, pool, torch.tensor([1, 2, 3]))
            assert torch.isfinite(o).all()
    else:
        reason = "slot 9 is outside a pool of 4"
        with pytest.raises(IndexError):  # the stand-in's own error on the bad slot, not the recorder's
            engine.decode(call, pool, torch.tensor([1, 2, 9]))
    err = capsys.readouterr().err
    assert err.count("recording stopped") == 1
    assert reason in err
    assert reason in handle.error
    assert engine.fused_recurrent_kda is original
    assert files(out) == []


def test_compiled_and_captured_calls_pass_through(engine, out, monkeypatch):
    """Under torch.compile the wrapper leaves no trace in the graph; in tracing and graph capture calls are only counted."""
    handle = record(f"{engine.__name__}:attend", out)
    x = torch.ones(2)
    compiled = torch.compile(engine.step, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(x), 2 * x)
    assert (handle.skipped, files(out)) == (0, [])
    with monkeypatch.context() as m:
        m.setattr(torch.compiler, "is_compiling", lambda: True)
        engine.step(x)
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "is_initialized", lambda: True)
        m.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        engine.step(x)
    assert (handle.skipped, files(out)) == (2, [])
    engine.step(x)
    assert len(files(out)) == 1
    handle.stop()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a real graph capture needs a GPU")
def test_a_real_graph_capture_is_not_disturbed(engine, out):
    """Warm-up records, capture and replay do not; GPU tensors and a GPU pool arrive in the file."""
    handle = record(f"{engine.__name__}:attend", out)
    x = torch.ones(4, device="cuda")
    engine.step(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = engine.step(x)
    x.fill_(3.0)
    graph.replay()
    assert y.tolist() == [6.0] * 4
    assert (handle.skipped, len(files(out))) == (1, 1)
    handle.stop()
    pool = torch.randn(6, 2, 8, 8).cuda()
    before = pool.clone()
    record(f"{engine.__name__}:fused_recurrent_kda", out, max_calls=1, state_layout="vk")
    engine.decode(mixed_call().to("cuda"), pool, torch.tensor([4, 0, 2], device="cuda"))
    c = Capture.load(files(out)[1])
    assert torch.equal(c.tensors["initial_state"][[0, 2]], before[[4, 2]].cpu())
    assert torch.equal(c.tensors["final_state"][[0, 2]], pool[[4, 2]].cpu())


def test_a_method_can_be_recorded(engine, out):
    handle = record(f"{engine.__name__}:Layer.forward", out, max_calls=1)
    assert torch.equal(engine.Layer().forward(torch.ones(2)), torch.full((2,), 2.0))
    assert Capture.load(handle.written[0]).tensors.keys() == {"arg.x", "result.0"}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("{}", "not of the form module:function"),
        ("no_such_module_here:f", "cannot import no_such_module_here"),
        ("{}:atend", "has no atend"),
        ("{}:Nothing.forward", "has no Nothing.forward"),
        ("{}:table", "is a dict"),
        ("{}:DECAY", "is a float"),
        ("{}:Layer.helper", "is a staticmethod"),
    ],
)
def test_a_wrong_target_is_refused(engine, out, target, reason):
    with pytest.raises(BadInput, match=reason):
        record(target.format(engine.__name__), out)


def test_a_bound_method_of_an_object_is_called_as_before_and_put_back(engine, out):
    """The wrapper of module:object.method must not lose self, and stop() leaves no attribute that was not there."""
    engine.layer = engine.Layer()
    handle = record(f"{engine.__name__}:layer.forward", out)
    assert torch.equal(engine.layer.forward(torch.ones(2)), torch.full((2,), 2.0))
    assert len(handle.written) == 1
    handle.stop()
    handle.stop()
    assert vars(engine.layer) == {}

    class Derived(engine.Layer):
        pass

    engine.Derived = Derived
    record(f"{engine.__name__}:Derived.forward", out).stop()
    assert "forward" not in vars(Derived)


def test_a_name_that_the_module_makes_on_demand_can_be_recorded(engine, out):
    """Engines import lazily through a module's __getattr__."""

    def on_demand(name):
        if name != "lazy":
            raise AttributeError(name)
        return lambda x: x + 1

    engine.__getattr__ = on_demand
    handle = record(f"{engine.__name__}:lazy", out)
    engine.lazy(torch.ones(1))
    assert len(handle.written) == 1
    handle.stop()
    assert "lazy" not in vars(engine)


def test_threads_share_the_bounds(engine, out):
    """Eight threads in the call at once write max_calls files, not one more."""
    barrier = threading.Barrier(8)

    def attend(x):
        barrier.wait(30)
        return x

    engine.attend = attend
    handle = record(f"{engine.__name__}:attend", out, max_calls=3)
    inside = engine.attend
    threads = [threading.Thread(target=inside, args=(torch.ones(2),)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(handle.written) == len(files(out)) == 3
    assert handle.error is None


def test_shape_only_passes_go_through_unrecorded(engine, out):
    """Meta tensors and the fake ones of torch.export hold nothing to record, and must not end the recording."""
    handle = record(f"{engine.__name__}:attend", out)
    engine.step(torch.ones(2, device="meta"))
    with FakeTensorMode():
        engine.step(torch.ones(2))
    assert (handle.skipped, handle.error, handle.active) == (2, None, True)
    engine.step(torch.ones(2))
    assert len(handle.written) == 1
    handle.stop()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"max_calls": "3"}, "max_calls='3'"), ({"every": 1.5}, "every=1.5"), ({"layer": "3"}, "metadata layer: '3'"), ({"x": {1}}, "JSON")],
)
def test_options_of_a_wrong_type_are_refused_before_a_server_runs(engine, out, options, reason):
    original = engine.attend
    with pytest.raises(BadInput, match=reason):
        record(f"{engine.__name__}:attend", out, **options)
    assert engine.attend is original


def test_a_module_that_fails_at_import_is_bad_input(tmp_path, out, monkeypatch):
    (tmp_path / "needs_gpu.py").write_text("raise RuntimeError('no device')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for target, reason in (
        ("needs_gpu:f", "no device"),
        ("..engine:f", "cannot import"),
        ("builtins:int.bit_length", "cannot be replaced"),
    ):
        with pytest.raises(BadInput, match=reason):
            record(target, out)


def test_wrong_options_are_refused(engine, out, tmp_path):
    target = f"{engine.__name__}:attend"
    for options in ({"max_calls": 0}, {"max_bytes": 0}, {"every": 0}, {"skip": -1}):
        with pytest.raises(BadInput, match="at least"):
            record(target, out, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be used as the folder"):
        record(target, tmp_path / "file" / "sub")
    handle = record(target, out)
    with pytest.raises(BadInput, match="recorded already"):
        record(target, out)
    handle.stop()


def test_the_environment_starts_recording_once(engine, out, monkeypatch):
    monkeypatch.delenv("K3LAB_RECORD", raising=False)
    assert record_from_env() == []
    monkeypatch.setenv("K3LAB_RECORD", f"{engine.__name__}:attend, {engine.__name__}:add")
    monkeypatch.delenv("K3LAB_RECORD_DIR", raising=False)
    with pytest.raises(BadInput, match="K3LAB_RECORD_DIR is not"):
        record_from_env()
    monkeypatch.setenv("K3LAB_RECORD_DIR", str(out))
    monkeypatch.setenv("K3LAB_RECORD_MAX_CALLS", "many")
    with pytest.raises(BadInput, match="K3LAB_RECORD_MAX_CALLS: 'many'"):
        record_from_env()
    monkeypatch.setenv("K3LAB_RECORD_MAX_CALLS", "1")
    handles = record_from_env()
    assert record_from_env() == handles  # an engine may load its plugins again
    engine.step(torch.ones(1))
    assert [len(h.written) for h in handles] == [1, 0]
    handles[1].stop()


def worker(lib: str, name: str, rank: int, barrier) -> None:
    """One worker process of a stand-in server: the plugin first, then the model."""
    sys.path.insert(0, lib)
    os.environ["RANK"] = str(rank)
    record_from_env()
    layer = importlib.import_module(f"{name}_layer")
    barrier.wait(60)
    for i in range(4):
        layer.step(torch.full((2,), 10.0 * rank + i))


def test_worker_processes_write_their_own_files(tmp_path, out, monkeypatch):
    """Spawned workers inherit nothing but the environment, and record at the same time into one folder."""
    write_engine(tmp_path, "served")
    monkeypatch.setenv("K3LAB_RECORD", "served_layer:attend")
    monkeypatch.setenv("K3LAB_RECORD_DIR", str(out))
    monkeypatch.setenv("K3LAB_RECORD_MAX_CALLS", "3")
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(2)
    workers = [spawn.Process(target=worker, args=(str(tmp_path), "served", rank, barrier)) for rank in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    assert [w.exitcode for w in workers] == [0, 0]
    expected = {f"call-rank{r}-pid{w.pid}-{i:04d}.safetensors": 10.0 * r + i for r, w in enumerate(workers) for i in range(3)}
    assert {p.name for p in files(out)} == expected.keys()
    for p in files(out):
        c = Capture.load(p)
        assert float(c.tensors["arg.x"][0]) == expected[p.name]
        assert c.metadata["rank"] == int(expected[p.name] // 10)
