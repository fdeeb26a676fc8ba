"""The capture format: what is written is what is read, a bad file is one clear error, and no save is ever half done."""

import contextlib
import json
import os
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from k3lab.capture import Capture, load_hidden_states
from k3lab.capture.format import FORMAT_VERSION
from k3lab.errors import BadInput
from k3lab.kda.call import KdaCall
from k3lab.kda.reference import recurrent_kda
from k3lab.testing import random_call


def small_call(**kwargs) -> KdaCall:
    return random_call((1, 1, 5), heads=2, head_dim=8, **kwargs)


def assert_same_call(a: KdaCall, b: KdaCall) -> None:
    for name in KdaCall.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype, name
            assert torch.equal(x, y), name
        else:
            assert x == y, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_a_call_survives_the_file(tmp_path, dtype, layout):
    """Every tensor bit for bit and every field of the call, results included."""
    slots = torch.tensor([3, 1, 2], dtype=torch.int32)
    call = replace(small_call(dtype=dtype, state_layout=layout), layer=7, step=42, state_indices=slots)
    o, final = torch.randn(7, 2, 8).to(dtype), torch.randn(3, 2, 8, 8)
    path = tmp_path / "a.safetensors"
    Capture.from_call(call, o, final, engine="vllm", engine_version="0.33", route="split", token_ids=torch.arange(7)).save(path)
    back = Capture.load(path)
    assert_same_call(call, back.kda_call())
    assert torch.equal(back.tensors["o"], o)
    assert torch.equal(back.tensors["token_ids"], torch.arange(7))
    assert back.metadata["engine"] == "vllm"
    assert back.metadata["engine_version"] == "0.33"  # a string that reads as a number stays a string
    assert back.metadata["format_version"] == FORMAT_VERSION
    expected = final if layout == "vk" else final.transpose(-1, -2)
    assert torch.equal(back.results()["final_state"], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32, torch.int64, torch.bool])
def test_every_dtype_and_awkward_memory_round_trips(tmp_path, dtype):
    """Views, transposes, aliases and empty tensors are written by value."""
    base = torch.arange(24).reshape(4, 6).to(dtype)
    tensors = {"arg.t": base.T, "arg.alias": base, "arg.view": base[1:3], "arg.none": base[:0], "arg.scalar": base[1, 1]}
    Capture(tensors, {"kind": "call"}).save(tmp_path / "a.safetensors")
    back = Capture.load(tmp_path / "a.safetensors").tensors
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], x), name


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x, max_size=3), max_leaves=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_metadata_keeps_type_and_value(tmp_path, value):
    path = tmp_path / "a.safetensors"
    Capture({"arg.x": torch.ones(1)}, {"kind": "call", "arg.value": value}).save(path)
    assert Capture.load(path).metadata["arg.value"] == value
    assert type(Capture.load(path).metadata["arg.value"]) is type(value)


def test_engine_shapes_are_normalised(tmp_path):
    """vLLM's batch axis of 1, flat dt_bias and [1, 1, H, 1] A_log give the same call."""
    call = small_call()
    c = Capture.from_call(call)
    for name in ("q", "k", "v", "raw_g", "raw_beta", "output_gate"):
        c.tensors[name] = c.tensors[name][None]
    c.tensors["dt_bias"] = c.tensors["dt_bias"].flatten()
    c.tensors["A_log"] = c.tensors["A_log"][None, None, :, None]
    c.save(tmp_path / "a.safetensors")
    assert_same_call(call, Capture.load(tmp_path / "a.safetensors").kda_call())


def test_a_batch_without_cu_seqlens_is_packed():
    call = random_call((5, 5, 5), heads=2, head_dim=8)
    c = Capture.from_call(call)
    del c.tensors["cu_seqlens"]
    for name in ("q", "k", "v", "raw_g", "raw_beta", "output_gate"):
        c.tensors[name] = c.tensors[name].unflatten(0, (3, 5))
    assert_same_call(call, c.kda_call())


def test_decode_rows_without_cu_seqlens_are_sequences_of_one():
    call = replace(random_call((1, 1, 1), heads=2, head_dim=8), state_indices=torch.tensor([1, 2, 3], dtype=torch.int32))
    c = Capture.from_call(call)
    del c.tensors["cu_seqlens"]
    assert_same_call(call, c.kda_call())


def test_a_slot_per_speculative_token_starts_at_the_last_accepted_one():
    """[N, S] state_indices, padded by the graph size, become the slot [N] that each sequence starts from."""
    call = random_call((3, 3), heads=2, head_dim=8)
    c = Capture.from_call(call, state_indices=torch.tensor([[4, 5, 6], [7, 8, 9], [0, 0, 0]]))
    assert c.kda_call().state_indices.tolist() == [4, 7]
    c.tensors["num_accepted_tokens"] = torch.tensor([3, 1])
    assert c.kda_call().state_indices.tolist() == [6, 7]


def test_activated_gate_and_beta_give_the_same_result():
    """A capture that holds the log-decay and beta after the sigmoid replays to the same outputs."""
    call = small_call()
    truth = recurrent_kda(call)
    c = Capture.from_call(call)
    x = torch.exp(call.A_log)[:, None] * (call.raw_g + call.dt_bias)
    c.tensors["g"] = call.lower_bound * torch.sigmoid(x)
    c.tensors["beta"] = torch.sigmoid(call.raw_beta)
    for name in ("raw_g", "raw_beta", "A_log", "dt_bias"):
        del c.tensors[name]
    replay = recurrent_kda(c.kda_call())
    assert c.kda_call().lower_bound is None
    for name in truth:
        torch.testing.assert_close(replay[name], truth[name], rtol=1e-5, atol=1e-5)
    c.tensors["g"], c.metadata["gate_base"] = c.tensors["g"] / torch.log(torch.tensor(2.0)), "log2"
    torch.testing.assert_close(recurrent_kda(c.kda_call())["o"], truth["o"], rtol=1e-5, atol=1e-5)


def test_absent_dt_bias_is_zero_only_if_the_engine_passed_none():
    c = Capture.from_call(small_call())
    del c.tensors["dt_bias"]
    with pytest.raises(BadInput, match=r"dt_bias: is missing, expected \[H, K\]"):
        c.kda_call()
    c.metadata["absent"] = ["dt_bias"]
    assert not c.kda_call().dt_bias.any()


@pytest.mark.parametrize("step", ["save_file", "replace"])
def test_a_save_that_dies_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, step):
    path = tmp_path / "a.safetensors"
    Capture.from_call(small_call(seed=1)).save(path)
    before = path.read_bytes()

    def die(data, filename=None, **kwargs):
        if step == "save_file":
            with open(filename, "wb") as f:
                f.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("k3lab.capture.format.save_file" if step == "save_file" else "os.replace", die)
    with pytest.raises(OSError, match="no space left"):
        Capture.from_call(small_call(seed=2)).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a.safetensors"
    Capture.from_call(random_call((1, 3), heads=1, head_dim=4), o=torch.ones(4, 1, 4)).save(path)
    return path.read_bytes()


@given(data=st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_file_is_bad_input_or_a_capture(tmp_path, good_bytes, data):
    """Truncation and flipped bytes, most of them in the header: nothing but BadInput, and a capture that loads can be examined."""
    raw = bytearray(good_bytes)
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(0, 4))):
        limit = data.draw(st.sampled_from([8, header, len(raw)]))
        raw[data.draw(st.integers(0, limit - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.sampled_from([len(raw), len(raw), header]) | st.integers(0, len(raw)))]
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    message = str(path)
    try:
        capture = Capture.load(path)
        assert capture.kda_call().q.dim() == 3
    except BadInput as e:
        message = str(e)
    assert str(path) in message


class Evil:
    def __reduce__(self):
        return (os.system, ("touch owned",))


def write_torch(path):
    torch.save({"q": torch.ones(2)}, path)


def write_pickle(path):
    path.write_bytes(pickle.dumps(Evil()))


def write_truncated(path):
    Capture.from_call(small_call()).save(path)
    path.write_bytes(path.read_bytes()[:-100])


def write_newer(path):
    save_file({"q": torch.ones(1)}, path, metadata={"format_version": str(FORMAT_VERSION + 1), "kind": "kda"})


def write_header(text):
    return lambda p: p.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


ONE = b'"q":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
FILES = {
    "pipe": (os.mkfifo, "is a pipe or a device"),
    "name twice": (write_header(b'{"__metadata__":{"format_version":"1"},' + ONE + b"," + ONE + b"}"), "holds 'q' more than once"),
    "key twice": (
        write_header(b'{"__metadata__":{"format_version":"1","kind":"kda","kind":"call"},' + ONE + b"}"),
        "holds 'kind' more than once",
    ),
    "not UTF-8": (write_header(b'{"__metadata__":{"format_version":"1","model":"\xff"},' + ONE + b"}"), "damaged"),
    "size overflows": (write_header(b'{"q":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,4]}}'), "damaged"),
    "header of 2^64 bytes": (lambda p: p.write_bytes(b"\xff" * 8 + b"{}"), "is not a safetensors file"),
    "endless value": (
        lambda p: save_file({"q": torch.ones(1)}, p, metadata={"format_version": "1", "layer": "9" * 5000}),
        "layer: '999999999999...",
    ),
    "missing": (lambda p: None, "no such file"),
    "folder": (lambda p: p.mkdir(), "is a folder"),
    "empty": (lambda p: p.write_bytes(b""), "is empty"),
    "text": (lambda p: p.write_text("q,k,v\n1,2,3\n"), "is not a safetensors file"),
    "torch.save": (write_torch, "weights_only=True"),
    "pickle": (write_pickle, "weights_only=True"),
    "truncated": (write_truncated, "truncated or damaged"),
    "no metadata": (lambda p: save_file({"q": torch.ones(1)}, p), "no format_version"),
    "newer": (write_newer, "update k3lab"),
    "wrong type": (lambda p: save_file({"q": torch.ones(1)}, p, metadata={"format_version": "1", "layer": "deep"}), "layer: 'deep'"),
    "wrong choice": (lambda p: save_file({"q": torch.ones(1)}, p, metadata={"format_version": "1", "state_layout": "kk"}), "state_layout"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_one_clear_error(tmp_path, monkeypatch, case):
    """The message names the file and the reason, and a pickle is refused unexecuted."""
    monkeypatch.chdir(tmp_path)
    write, reason = FILES[case]
    path = tmp_path / "bad.safetensors"
    write(path)
    with pytest.raises(BadInput) as e:
        Capture.load(path)
    assert str(path) in str(e.value)
    assert reason in str(e.value)
    assert not (tmp_path / "owned").exists()


def test_what_does_not_fit_into_memory_is_said(tmp_path, monkeypatch):
    """Not called damaged: the file may be sound."""
    path = Capture.from_call(small_call()).save(tmp_path / "a.safetensors")

    def refuse(*args, **kwargs):
        raise RuntimeError("unable to mmap 99 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr("k3lab.capture.format.safe_open", refuse)
    with pytest.raises(BadInput, match="do not fit into memory"):
        Capture.load(path)


def edit(tensors=None, drop=(), **metadata):
    def apply(c: Capture) -> None:
        c.tensors |= {name: f(c.tensors[name]) for name, f in (tensors or {}).items()}
        for name in drop:
            c.tensors.pop(name, None)
            c.metadata.pop(name, None)
        c.metadata |= metadata

    return apply


def renamed(old: str, new: str):
    def apply(c: Capture) -> None:
        c.tensors[new] = c.tensors.pop(old)

    return apply


CONTENTS = {
    "no q": (edit(drop=["q"]), r"q: is missing, expected \[T, H, K\]; the file holds A_log"),
    "no A_log": (edit(drop=["A_log"]), "A_log: is missing"),
    "no cu_seqlens": (edit(drop=["cu_seqlens"]), "cu_seqlens: is missing"),
    "no lower_bound": (edit(drop=["lower_bound"]), "lower_bound: is missing"),
    "no state_layout": (edit(drop=["state_layout"]), "state_layout: is missing"),
    "wrong kind": (edit(kind="attn_res"), "kind: is 'attn_res'"),
    "raw gate as g": (renamed("raw_g", "g"), r"g: has a log-decay of .* arguments=\{'g': 'raw_g'\}"),
    "raw beta as beta": (renamed("raw_beta", "beta"), r"beta: has .* lies in \[0, 1\].* arguments=\{'beta': 'raw_beta'\}"),
    "integer q": (edit({"q": lambda x: x.int()}), "q, k, v: dtypes torch.int32"),
    "mixed dtypes": (edit({"k": lambda x: x.half()}), "differ"),
    "integer A_log": (edit({"A_log": lambda x: x.int()}), "A_log: dtype torch.int32"),
    "short v": (edit({"v": lambda x: x[:-1]}), "v: shape"),
    "flat beta": (edit({"raw_beta": lambda x: x.flatten()}), "raw_beta: shape"),
    "two batch rows and cu_seqlens": (edit({"q": lambda x: torch.stack([x, x])}), "batch axis of 2"),
    "state of the other layout": (edit({"initial_state": lambda x: x[..., :4]}), "initial_state: shape"),
    "float cu_seqlens": (edit({"cu_seqlens": lambda x: x.float()}), "cu_seqlens: "),
    "cu_seqlens too short": (edit({"cu_seqlens": lambda x: x - 1}), "cu_seqlens: "),
    "num_decodes": (edit(num_decodes=9), "num_decodes: 9"),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_unusable_content_names_file_tensor_and_reason(tmp_path, case):
    change, reason = CONTENTS[case]
    c = Capture.from_call(small_call())
    change(c)
    path = tmp_path / "a.safetensors"
    c.save(path)
    with pytest.raises(BadInput, match=reason) as e:
        Capture.load(path).kda_call()
    assert str(path) in str(e.value)


def test_save_refuses_what_it_cannot_write(tmp_path):
    x = {"q": torch.ones(1)}
    for capture, reason in [
        (Capture(x, {"layer": "3"}), "layer"),
        (Capture(x, {"arg.x": object()}), "cannot be written as JSON"),
        (Capture({"q": [1.0]}), "q: list is not a tensor"),
        (Capture({"q": torch.ones(1, dtype=torch.complex128)}), "cannot be written as safetensors"),
    ]:
        with pytest.raises(BadInput, match=reason):
            capture.save(tmp_path / "a.safetensors")
    with pytest.raises(BadInput, match="does not exist"):
        Capture(x).save(tmp_path / "no" / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def hidden_file(path, shape=(10, 3, 16), tokens=10, side=None):
    save_file({"hidden_states": torch.randn(shape).bfloat16(), "token_ids": torch.arange(tokens)}, path)
    if side is not None:
        path.with_suffix(".json").write_text(json.dumps(side))
    return path


def test_a_vllm_hidden_state_file_loads_with_its_side_file(tmp_path):
    side = {"layer_ids": [2, 23, 47], "mode": "attn_res_stream", "engine": "vllm", "engine_version": "0.33.0"}
    path = hidden_file(tmp_path / "req-1.safetensors", side=side)
    for c in (Capture.load(path), load_hidden_states(path), load_hidden_states(path, path.with_suffix(".json"))):
        assert c.kind == "hidden_states"
        assert c.tensors["hidden_states"].shape == (10, 3, 16)
        assert (c.metadata["layer_ids"], c.metadata["stream"], c.metadata["engine_version"]) == ([2, 23, 47], "mixture", "0.33.0")
    saved = c.save(tmp_path / "b.safetensors")
    assert load_hidden_states(saved).metadata == c.metadata


def test_hidden_state_axis_order_is_judged_by_size(tmp_path):
    path = hidden_file(tmp_path / "a.safetensors", shape=(3, 10, 16))
    c = load_hidden_states(path)
    assert c.tensors["hidden_states"].shape == (10, 3, 16)
    assert "[3, 10, 16]" in c.metadata["axis_order"]
    one = load_hidden_states(hidden_file(tmp_path / "one.safetensors", shape=(10, 16)))
    assert one.tensors["hidden_states"].shape == (10, 1, 16)
    for shape in [(3, 16, 10), (9, 3, 16), (10,)]:
        with pytest.raises(BadInput, match=r"bad.safetensors: hidden_states: shape .* expected \[10, taps, hidden\]"):
            load_hidden_states(hidden_file(tmp_path / "bad.safetensors", shape=shape))


@pytest.mark.parametrize(
    ("side", "reason"),
    [
        ({"layer_ids": [1, 2]}, "name 2 taps, hidden_states has 3"),
        ({"stream": "residual"}, "'residual' is not one of prefix, mixture"),
        ({"mode": ["prefix", 7, "prefix"]}, "7 is not one of"),
        ([1], "expected an object"),
    ],
)
def test_a_wrong_side_file_is_refused(tmp_path, side, reason):
    with pytest.raises(BadInput, match=reason):
        Capture.load(hidden_file(tmp_path / "a.safetensors", side=side))


def test_unreadable_side_file_and_missing_ids(tmp_path):
    path = hidden_file(tmp_path / "a.safetensors")
    with pytest.raises(BadInput, match=r"nowhere.json: cannot be read"):
        load_hidden_states(path, tmp_path / "nowhere.json")
    save_file({"hidden_states": torch.ones(3, 2, 4)}, path)
    with pytest.raises(BadInput, match="token_ids: is missing"):
        Capture.load(path)


def healthy(lengths=(1, 1, 70), dtype=torch.float32, **kwargs) -> Capture:
    """A capture that the doctor has nothing to say about: real results, fresh tokens, full provenance."""
    call = replace(random_call(lengths, heads=2, head_dim=16, **kwargs), layer=3, step=9)
    call = replace(call, state_indices=torch.arange(1, len(lengths) + 1, dtype=torch.int32))
    out = recurrent_kda(call)
    final = out["final_state"].float()
    if call.state_layout == "kv":
        final = final.transpose(-1, -2).contiguous()
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[: sum(lengths)]
    origin = {"model": "tiny", "engine": "k3lab", "engine_version": "1", "git_commit": "abc", "tp_rank": 0, "tp_size": 1}
    return Capture.from_call(call, out["o"].float(), final, token_ids=ids, **origin)


@pytest.mark.parametrize("decay", ["mixed", "strong", "weak"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_the_doctor_has_nothing_to_say_about_a_healthy_capture(tmp_path, decay, layout):
    path = healthy(decay=decay, state_layout=layout).save(tmp_path / "a.safetensors")
    findings = Capture.load(path).check()
    assert findings.empty, findings.to_string()
    assert list(findings.columns) == ["severity", "tensor", "where", "finding", "what_to_do"]


def at(index, value):
    def apply(x):
        x = x.clone()
        x[index] = value
        return x

    return apply


def activated(scale):
    def apply(c: Capture) -> None:
        x = torch.exp(c.tensors["A_log"])[:, None] * (c.tensors["raw_g"] + c.tensors["dt_bias"])
        c.tensors["raw_g"] = -5.0 * torch.sigmoid(x) * scale

    return apply


def cumulative(c: Capture) -> None:
    activated(1.0)(c)
    c.tensors["raw_g"] = c.tensors["raw_g"].cumsum(0)


def other_width(c: Capture) -> None:
    """V = 8 beside K = 16, with the state stored the other way round."""
    for name in ("v", "output_gate", "o"):
        c.tensors[name] = c.tensors[name][..., :8]
    for name in ("initial_state", "final_state"):
        c.tensors[name] = c.tensors[name][..., :8]
    c.tensors["norm_weight"] = c.tensors["norm_weight"][:8]


NAN, INF = float("nan"), float("inf")
SICK = {  # name: (what is done to a healthy capture, severity, tensor, words of the finding)
    "zero rows": (edit({"k": at(slice(5, 8), 0.0)}), "warning", "k", "3 of 72 rows are all zero"),
    "repeated rows": (edit({"q": lambda x: x[:1].expand_as(x)}), "warning", "q", "71 of 72 rows repeat"),
    "one repeated row": (edit({"v": lambda x: at(9, x[4])(x)}), "note", "v", "1 of 72 rows repeat"),
    "NaN": (edit({"v": at((4, 1, 7), NAN)}), "error", "v", "1 NaN and 0 Inf of 2304"),
    "Inf": (edit({"raw_g": at((0, 0), INF)}), "error", "raw_g", "0 NaN and 16 Inf"),
    "o not finite": (edit({"o": at((71, 1), NAN)}), "error", "o", "recorded result has 16 NaN"),
    "final_state not finite": (edit({"final_state": at((2, 1), NAN)}), "error", "final_state", "recorded result has 256 NaN"),
    "NaN in a state that is read": (
        edit({"initial_state": at(0, NAN)}), "error", "initial_state", "512 NaN"),
    "NaN in a stale slot": (
        edit({"initial_state": at(2, NAN), "has_initial_state": at(2, False)}), "note", "initial_state", "start from zeros"),
    "heads first": (edit({"k": lambda x: x.transpose(0, 1)}), "error", "k", "2 heads before the 72 tokens"),
    "padding rows": (edit({"v": lambda x: torch.cat([x, x])}), "error", "v", "for 72 tokens"),
    "rank": (edit({"q": lambda x: x.flatten(1)}), "error", "q", "expected [T, H, K]"),
    "state axes swapped": (other_width, "error", "initial_state", "expected [N, 2, 8, 16]"),
    "a pool for a state": (edit({"initial_state": lambda x: torch.cat([x, x])}), "error", "initial_state", "6 states for 3"),
    "wrong layout, K = V": (edit(state_layout="kv"), "error", "final_state", "recurrence as 'vk'"),
    "half-precision state": (edit({"initial_state": lambda x: x.half()}), "warning", "initial_state", "kept in float32"),
    "cu_seqlens falls": (edit({"cu_seqlens": at(1, 3)}), "error", "cu_seqlens", "decreases: 3 to 2"),
    "cu_seqlens stands": (edit({"cu_seqlens": at(1, 2)}), "error", "cu_seqlens", "empty sequence: 2 to 2"),
    "cu_seqlens starts late": (edit({"cu_seqlens": at(0, 1)}), "error", "cu_seqlens", "starts at 1"),
    "cu_seqlens is short": (edit({"cu_seqlens": at(3, 60)}), "error", "cu_seqlens", "ends at 60, q has 72"),
    "cu_seqlens float": (edit({"cu_seqlens": lambda x: x.float()}), "error", "cu_seqlens", "dtype torch.float32"),
    "cu_seqlens int16": (edit({"cu_seqlens": lambda x: x.short()}), "warning", "cu_seqlens", "torch.int16"),
    "cu_seqlens missing": (edit(drop=["cu_seqlens", "state_indices"]), "error", "cu_seqlens", "is missing"),
    "decodes too many": (edit(num_decodes=3), "error", "metadata num_decodes", "sequence 2 has 70 tokens"),
    "decodes beyond N": (edit(num_decodes=4), "error", "metadata num_decodes", "there are 3 sequences"),
    "decodes too few": (edit(num_decodes=1), "note", "metadata num_decodes", "sequence 1 has one token too"),
    "no layout": (edit(drop=["state_layout"]), "error", "metadata state_layout", "is missing"),
    "no lower_bound": (edit(drop=["lower_bound"]), "error", "metadata lower_bound", "is missing"),
    "no num_decodes": (edit(drop=["num_decodes"]), "warning", "metadata num_decodes", "0 is assumed"),
    "no engine": (edit(drop=["engine", "git_commit"]), "note", "metadata", "unknown origin: engine, git_commit"),
    "dtype recast": (edit(dtype="bfloat16"), "warning", "metadata dtype", "q is torch.float32"),
    "lower_bound positive": (edit(lower_bound=5.0), "error", "metadata lower_bound", "is 5.0"),
    "one id for ever": (edit({"token_ids": at(slice(60, 72), 0)}), "warning", "token_ids", "ends in 12 tokens of id 0"),
    "a cycle of ids": (
        edit({"token_ids": at(slice(48, 72), torch.arange(24) % 3 + 5000)}), "warning", "token_ids", "24 tokens of the cycle [5000"),
    "negative ids": (edit({"token_ids": at(3, -1)}), "note", "token_ids", "1 ids are negative"),
    "null slot": (edit({"state_indices": at(1, 0)}), "warning", "state_indices", "1 of 3 sequences use the null slot"),
    "shared slot": (edit({"state_indices": at(1, 1)}), "error", "state_indices", "slot 1 serves 2 sequences"),
    "short slots": (edit({"state_indices": lambda x: x[:2]}), "error", "state_indices", "expected [N] or [N, S]"),
    "activated gate": (activated(1.0), "warning", "raw_g", "looks already activated"),
    "activated gate, log2": (activated(1.4426950408889634), "warning", "raw_g", "in log2 units"),
    "raw gate as g": (renamed("raw_g", "g"), "error", "g", "a log-decay is at most 0"),
    "raw beta as beta": (renamed("raw_beta", "beta"), "error", "beta", "lies in [0, 1]"),
    "cumulative gate": (cumulative, "warning", "raw_g", "cumulative sum"),
    "activated beta": (edit({"raw_beta": torch.sigmoid}), "warning", "raw_beta", "after the sigmoid"),
    "half A_log": (edit({"A_log": lambda x: x.half()}), "warning", "A_log", "dtype torch.float16"),
    "half dt_bias": (edit({"dt_bias": lambda x: x.bfloat16()}), "warning", "dt_bias", "dtype torch.bfloat16"),
    "no raw_g": (edit(drop=["raw_g"]), "error", "raw_g", "is missing, expected [T, H, K]"),
    "unknown tensor": (lambda c: c.tensors.update(rawg=torch.ones(1)), "note", "rawg", "not a name of the capture format"),
}  # fmt: skip


@pytest.mark.parametrize("case", SICK)
def test_the_doctor_names_each_sickness(tmp_path, case):
    """Each fault alone is found, under its severity and tensor, from the file and not only from memory."""
    change, severity, tensor, words = SICK[case]
    c = healthy()
    change(c)
    findings = Capture.load(c.save(tmp_path / "a.safetensors")).check()
    hits = [f for f in findings.itertuples() if (f.severity, f.tensor) == (severity, tensor) and words in f.finding]
    assert len(hits) == 1, findings.to_string()
    assert hits[0].what_to_do
    order = ["error", "warning", "note"]
    assert list(findings.severity) == sorted(findings.severity, key=order.index)


def test_the_doctor_names_sequence_and_first_index_of_a_bad_output():
    c = healthy()
    c.tensors["o"][5, 1, 3] = NAN
    row = c.check().iloc[0]
    assert row["where"] == "first at [5, 1, 3], sequence 2 of length 70"


def test_the_doctor_on_hidden_states(tmp_path):
    c = Capture.load(hidden_file(tmp_path / "a.safetensors", shape=(3, 10, 16)))
    c.tensors["hidden_states"][4, 1, 2] = NAN
    c.tensors["hidden_states"][7] = 0
    findings = c.check().set_index("tensor")
    assert findings.loc["metadata layer_ids"].severity == "warning"
    assert findings.loc["metadata stream"].severity == "warning"
    states = " / ".join(findings.loc["hidden_states"].finding)
    assert "1 NaN" in states
    assert "1 of 10 rows are all zero" in states
    assert "transposed" in states


@pytest.mark.filterwarnings("ignore:Casting complex values")
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_doctor_never_raises_on_content(data):
    """Any tensor dropped, cut, flattened, unsqueezed or recast, any metadata dropped: findings, and BadInput alone from kda_call."""
    c = healthy(lengths=(1, 4))
    for name in data.draw(st.lists(st.sampled_from(sorted(c.tensors)), max_size=4)):
        x = c.tensors.get(name)
        if x is None:
            continue
        kind = data.draw(st.sampled_from(["drop", "cut", "empty", "flat", "scalar", "unsqueeze", "transpose", "recast", "garbage"]))
        if kind == "drop":
            del c.tensors[name]
            continue
        dtype = data.draw(st.sampled_from([torch.int8, torch.bool, torch.float16, torch.float64, torch.int64, torch.complex64]))
        new = {
            "cut": lambda x: x[:-1] if x.dim() else x,
            "empty": lambda x: x[:0] if x.dim() else x,
            "flat": lambda x: x.flatten(),
            "scalar": lambda x: x.flatten()[0] if x.numel() else x,
            "unsqueeze": lambda x: x[None],
            "transpose": lambda x: x.transpose(0, -1) if x.dim() else x,
            "recast": lambda x, dtype=dtype: x.to(dtype),
            "garbage": lambda x: (torch.randn(x.shape) * 1e9).to(x.dtype),
        }[kind]
        c.tensors[name] = new(x)
    for key in data.draw(st.lists(st.sampled_from(sorted(c.metadata)), max_size=3)):
        c.metadata.pop(key, None)
    assert set(c.check().severity) <= {"error", "warning", "note"}
    with contextlib.suppress(BadInput):
        c.kda_call()


def test_sequences_without_tokens_are_left_out(tmp_path):
    """An engine pads a decode batch for a graph with empty sequences on null slots; the call and its results drop them."""
    call = random_call((1, 1, 5), head_dim=64)
    state = torch.cat([call.initial_state, torch.zeros(2, 2, 64, 64)])
    tensors = Capture.from_call(call).tensors | {
        "cu_seqlens": torch.tensor([0, 1, 2, 7, 7, 7]), "initial_state": state, "final_state": state + 1,
        "has_initial_state": torch.tensor([1, 1, 0, 0, 0]).bool(), "state_indices": torch.tensor([3, 4, 5, -1, -1]),
    }  # fmt: skip
    capture = Capture.load(Capture(tensors, Capture.from_call(call).metadata).save(tmp_path / "padded.safetensors"))
    got = capture.kda_call()
    assert got.lengths.tolist() == [1, 1, 5]
    assert got.state_indices.tolist() == [3, 4, 5]
    assert torch.equal(got.initial_state, call.initial_state)
    assert capture.results()["final_state"].shape[0] == 3


def test_a_file_larger_than_memory_is_bad_input(tmp_path, monkeypatch):
    path = Capture({"x": torch.zeros(2)}, {"kind": "call"}).save(tmp_path / "a.safetensors")

    def full(*_, **__):
        raise MemoryError("Cannot allocate memory")

    monkeypatch.setattr("k3lab.capture.format.safe_open", full)
    with pytest.raises(BadInput, match="do not fit into memory"):
        Capture.load(path)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_slots_of_an_unsigned_type_are_looked_at(dtype):
    """torch has no comparison for them."""
    capture = Capture.from_call(random_call((1, 1), heads=1, head_dim=16), state_indices=torch.tensor([0, 3]).to(dtype))
    assert "null slot" in " ".join(capture.check()["finding"])
    assert capture.kda_call().state_indices.tolist() == [0, 3]
