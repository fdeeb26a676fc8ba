"""Captures that were damaged or made up, through load, check, kda_call, results, and the commands check and nan."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hostile import CANARY, CAPTURES, SCALARS, VALUES, cases, command, garbled, json_files, mutated, own_errors, watch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from k3lab.capture import Capture, load_hidden_states
from k3lab.capture.format import METADATA, TENSORS

REAL = sorted(CAPTURES.glob("*.safetensors"))
DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip
SIDECAR = {"layer_ids": [2, 23, 47], "mode": "prefix_only", "engine": "vllm", "engine_version": "0.33.0", "model": "m", "tp_rank": 0}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Capture:
    """Three sequences of a real capture with what was recorded for them: a decode, a ragged prefill, a decode."""
    capture = Capture.load(CAPTURES / "mixed_split_layer8.safetensors")
    call, rows = capture.kda_call().select([0, 6, 1])
    got = capture.results()
    ids = torch.arange(call.q.shape[0], dtype=torch.int32)
    made = Capture.from_call(call, got["o"][rows], got["final_state"][[0, 6, 1]], token_ids=ids, stream="prefix")
    made.save(tmp_path_factory.mktemp("small") / "small.safetensors")
    return made


def look(path: Path, folder: Path) -> None:
    """Everything that reads a capture: the package's errors alone, and nothing at all from the doctor once a file has loaded."""
    with watch(folder):
        capture = None
        with own_errors():
            capture = Capture.load(path)
        if capture is None:
            return
        capture.check()
        for read in (capture.kda_call, capture.results):
            with own_errors():
                read()


def write(folder: Path, data: bytes, name: str = "a.safetensors") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("real", REAL, ids=[p.stem for p in REAL])
@cases(8)
@given(data=st.data())
def test_bytes_of_a_real_capture_damaged(tmp_path_factory, real, data):
    """Header and body, in both halves of the cases: header bytes are few, so that they are hit on purpose."""
    folder, whole = tmp_path_factory.getbasetemp(), real.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    edit = data.draw(st.sampled_from(["header", "header", "body", "length", "end", "both"]))
    if edit == "header":
        header = data.draw(garbled(whole[8:length]))
        whole = (struct.pack("<Q", len(header)) if data.draw(st.booleans()) else whole[:8]) + header + whole[length:]
    elif edit == "length":
        whole = struct.pack("<Q", data.draw(st.sampled_from([0, 1, 7, length, len(whole), 10**8, 2**63, 2**64 - 1]))) + whole[8:]
    elif edit == "end":
        whole = whole[: data.draw(st.integers(0, len(whole)))] + data.draw(st.binary(max_size=9))
    else:
        body = bytearray(whole)
        for at in data.draw(st.lists(st.integers(0 if edit == "both" else length, len(body) - 1), min_size=1, max_size=40)):
            body[at] ^= 1 << data.draw(st.integers(0, 7))
        whole = bytes(body)
    look(write(folder, whole), folder)


@cases(60)
@given(data=st.data())
def test_the_header_says_something_else(tmp_path_factory, small, data):
    """Types, shapes, offsets, names and metadata of the JSON header changed, lengths corrected so that the rest is read."""
    folder, whole = tmp_path_factory.getbasetemp(), small.path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    header = data.draw(mutated(json.loads(whole[8:length])))
    text = json.dumps(header).encode()
    if data.draw(st.integers(0, 9)) == 0 and b"," in text:
        text = text.replace(b",", b',"q":{"dtype":"F32","shape":[],"data_offsets":[0,4]},', 1)
    look(write(folder, struct.pack("<Q", len(text)) + text + whole[length:]), folder)


def changed_tensor(draw, x: torch.Tensor) -> torch.Tensor:
    how = draw(
        st.sampled_from(["dtype", "shape", "flatten", "batch", "cut", "grow", "empty", "scalar", "values", "integers", "swap", "zero"])
    )
    if how == "dtype":
        return x.to(draw(st.sampled_from(DTYPES)))
    if how == "shape" and x.dim():
        axis = draw(st.integers(0, x.dim() - 1))
        return x.movedim(axis, draw(st.integers(0, x.dim() - 1))).contiguous()
    if how == "flatten":
        return x.reshape(-1)
    if how == "batch":
        return x[None].repeat(draw(st.sampled_from([1, 1, 2])), *[1] * x.dim())
    if how == "cut" and x.dim() and len(x):
        return x[: draw(st.integers(0, len(x)))].clone()
    if how == "grow" and x.dim():
        return torch.cat([x, x])
    if how == "empty":
        return x.new_zeros(draw(st.sampled_from([(0,), (0, 1, 2), (3, 0, 4), (0, 0, 0, 0)])))
    if how == "scalar":
        return x.reshape(-1)[:1].reshape(()) if x.numel() else x.new_zeros(())
    if how == "integers":
        numbers = st.sampled_from([-(2**31), -5, -1, 0, 1, 2, 3, 64, 65, 2**31 - 1, 2**40, 2**62, -(2**63)])
        return torch.tensor(draw(st.lists(numbers, max_size=6)), dtype=torch.int64)
    if how == "values" and x.numel() and x.is_floating_point() and x.element_size() > 1:
        x = x.clone()
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38, -1e-30]))
        return x
    if how == "swap" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous()
    return torch.zeros_like(x)


class Changed(tuple):
    """(tensors, metadata), shown without the numbers."""

    def __repr__(self) -> str:
        return f"{ {n: (list(x.shape), x.dtype) for n, x in self[0].items()} } {self[1]}"


@st.composite
def altered(draw: st.DrawFn, small: Capture) -> Changed:
    """Tensors dropped, renamed, reshaped, recast and refilled; metadata values of any type under any key."""
    tensors, metadata = dict(small.tensors), dict(small.metadata)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(tensors) or ["q"]))
        how = draw(st.sampled_from(["drop", "rename", "change", "change", "change", "add", "meta", "meta", "forget"]))
        if how == "drop":
            tensors.pop(name, None)
        elif how == "rename" and tensors:
            other = draw(st.sampled_from(sorted({*TENSORS["kda"], *TENSORS["attn_res"], *TENSORS["hidden_states"], CANARY, "a\nb", ""})))
            tensors[other] = tensors.pop(name)
        elif how == "change" and name in tensors:
            tensors[name] = changed_tensor(draw, tensors[name])
        elif how == "add":
            extra = draw(
                st.sampled_from(["state_indices", "num_accepted_tokens", "spec_mask", "has_initial_state", "g", "beta", "token_states"])
            )
            tensors[extra] = changed_tensor(draw, tensors.get(name, torch.zeros(3)))
        elif how == "meta":
            metadata[draw(st.sampled_from([*METADATA, "kernel", "module", CANARY]))] = draw(st.one_of(SCALARS, VALUES))
        else:
            metadata.pop(draw(st.sampled_from([*METADATA])), None)
    return Changed((tensors, metadata))


def as_file(path: Path, tensors: dict, metadata: dict) -> Path:
    """As an engine of somebody else would write it: no check of ours, every metadata value as JSON or as it is."""
    texts = {}
    for key, value in metadata.items():
        text = value if isinstance(value, str) else json.dumps(value)
        texts[key] = text.encode("utf-8", "replace").decode()
    path.write_bytes(save({n: x.contiguous().clone() for n, x in tensors.items()}, texts))
    return path


@cases(100)
@given(data=st.data())
def test_tensors_and_metadata_that_do_not_fit(tmp_path_factory, small, data):
    folder = tmp_path_factory.getbasetemp()
    look(as_file(folder / "a.safetensors", *data.draw(altered(small))), folder)


@cases(40)
@given(data=st.data())
def test_check_and_nan_from_the_command_line(tmp_path_factory, small, data):
    """Status 0, 1 or 2, one line on stderr for 2, and both files of --out or none."""
    folder = tmp_path_factory.mktemp("run")
    path = as_file(folder / "a.safetensors", *data.draw(altered(small)))
    args = data.draw(
        st.sampled_from(
            [["check"], ["check", "--json"], ["nan"], ["nan", "--json"], ["nan", "--route", "chunk_all", "--padding", "nan"],
             ["nan", "--route", "split", "--impl", "reference", "--json"], ["nan", "--route", "gather_split", "--dtype", "float16"]]
        )
    )  # fmt: skip
    command(folder, [args[0], path, *args[1:]], out=True)
    assert sorted(p.name for p in folder.iterdir() if p.name != "out") == ["a.safetensors"], "something was left behind"


@cases(40)
@given(data=st.data())
def test_hidden_states_and_their_side_file(tmp_path_factory, data):
    """Any shapes and types of the two tensors; a side file that was changed, cut or is none."""
    folder = tmp_path_factory.getbasetemp()
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=4)
    dtype = st.sampled_from(DTYPES)
    good = {"hidden_states": torch.randn(5, 3, 8).bfloat16(), "token_ids": torch.arange(5)}
    tensors = {}
    for name, x in good.items():
        odd = data.draw(st.integers(0, 2)) == 0
        tensors[name] = torch.ones(data.draw(sizes)).to(data.draw(dtype)) if odd else x
    if data.draw(st.integers(0, 9)) == 0:
        tensors.pop(data.draw(st.sampled_from(sorted(tensors))))
    path, side = folder / "h.safetensors", folder / "h.json"
    save_file(tensors, path)
    side.write_bytes(data.draw(json_files(SIDECAR)))
    with watch(folder):
        for read in (load_hidden_states, Capture.load):
            with own_errors():
                read(path).check()
    command(folder, ["check", path, "--json"])


def test_names_and_metadata_of_a_capture_start_nothing(tmp_path, monkeypatch):
    """A module of the name that a capture carries lies in the folder: it is never imported, whatever reads the file."""
    (tmp_path / f"{CANARY}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    reduce = json.dumps({"__reduce__": ["os.system", "true"], "py/object": f"{CANARY}.C"})
    metadata = {
        "kind": "kda",
        "format_version": "1",
        "model": f"{CANARY}:main",
        "kernel": f"{CANARY}:f",
        "engine": reduce,
        "module": CANARY,
    }
    path = tmp_path / "a.safetensors"
    path.write_bytes(save({"q": torch.zeros(2), CANARY: torch.zeros(2), f"arg.{CANARY}": torch.zeros(1)}, metadata))
    for args in (["check", path], ["nan", path], ["nan", path, "--route", "split"]):
        assert command(tmp_path, args)[0] in (1, 2)
    from k3lab.races.cli import _captured

    with watch(tmp_path), own_errors():
        _captured(str(path))


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.npz", "a.pkl"])
def test_a_pickle_is_refused_unread(tmp_path, name):
    """Whatever its name: refused by its first bytes, and pickle.find_class is never asked for anything."""
    path = tmp_path / name
    if name == "a.pkl":
        path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    else:
        torch.save({"q": torch.zeros(2)}, path)
    for args in (["check", path], ["nan", path]):
        status, _, err = command(tmp_path, args)
        assert status == 2
        assert "pickle" in err
    assert not (tmp_path / "ran").exists()


@cases(20)
@given(key=st.sampled_from(sorted(METADATA)), value=VALUES)
def test_what_save_takes_load_gives_back(tmp_path_factory, key, value):
    """Metadata of any JSON value: refused with the package's error, or the same after a round trip."""
    folder = tmp_path_factory.getbasetemp()
    capture = Capture({"x": torch.zeros(2)}, {"kind": "call", key: value})
    saved = None
    with watch(folder), own_errors():
        saved = capture.save(folder / "b.safetensors")
    assert not list(folder.glob(".*tmp")), "a temporary file is left"
    if saved:
        with watch(folder):
            again = Capture.load(saved).metadata[key]
        assert repr(again) == repr(capture.metadata[key])
        with safe_open(saved, framework="pt") as f:
            assert f.metadata()[key]
