"""The prefix and mixture streams at a tap: every edge of the layer ids, on the tiny model's own streams and on made-up captures."""

import dataclasses
from pathlib import Path

import pytest
import torch

from k3lab.attn_res.streams import compare, layer_id, streams, taps_of
from k3lab.capture import Capture
from k3lab.errors import BadInput
from k3lab.tiny import model

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
LAYERS, BLOCK = 7, 3  # layers 0, 3, 6 commit; the last block has one layer


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    shapes = dataclasses.replace(model.SMALL.shapes, num_layers=LAYERS, attn_res_block=BLOCK)
    net = model.TinyK3(dataclasses.replace(model.SMALL, shapes=shapes)).double().eval()
    for m in net.modules():
        if isinstance(m, model.AttnRes):
            m.proj.data.normal_(std=0.2)
            m.norm.data.uniform_(0.5, 1.5)
    return net


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def taps(net, tokens):
    return taps_of(net, tokens)


def edited(capture, drop=(), tensors=None, **metadata):
    """A copy with some tensors or metadata (None: the key) taken out or replaced."""
    x = {n: v for n, v in capture.tensors.items() if n not in drop} | (tensors or {})
    return Capture(x, {k: v for k, v in {**capture.metadata, **metadata}.items() if v is not None})


def one_tap(taps, tap, **metadata):
    """The capture of one tap, as an engine's recorder would write it: the bank it reads, its own weights."""
    x = {n: taps.tensors[n][tap] for n in ("prefix", "pending", "score_norm", "score_proj")}
    blocks = -(-layer_id(tap) // BLOCK)
    about = {k: v for k, v in taps.metadata.items() if k not in ("layers", "attn_res_block", "num_layers")}
    return Capture(x | {"bank": taps.tensors["bank"][:blocks]}, {**about, "layer": tap, **metadata})


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_every_layer_id_gives_the_streams_of_the_model(net, tokens, taps, impl):
    """Ids 1 to num_layers are the model's own streams, committing layers, short last block and output side included (float64)."""
    collect = model.new_collect()
    net(tokens, collect=collect)
    for i in range(1, LAYERS + 1):
        s = streams(taps, i, impl=impl)
        torch.testing.assert_close(s.prefix, collect["prefix"][i - 1].flatten(0, 1), rtol=0, atol=0)
        torch.testing.assert_close(s.mixture, collect["mixture"][i - 1].flatten(0, 1), rtol=1e-10, atol=1e-12)
        assert s.layer == i
        assert s.weights.shape == (40, -(-i // BLOCK) + 1), "blocks 0 .. ceil(i / block) - 1, and the prefix"
        torch.testing.assert_close(s.weights.sum(-1), torch.ones(40))
        assert not torch.allclose(s.prefix, s.mixture)


def test_layer_id_0_is_the_embedding_and_both_streams_are_equal(net, tokens, taps):
    s = streams(taps, 0)
    assert torch.equal(s.prefix, net.embed(tokens).flatten(0, 1))
    assert torch.equal(s.mixture, s.prefix)
    assert torch.equal(s.weights, torch.ones(40, 1))


def test_the_offset_is_added_to_the_id(taps):
    assert torch.equal(streams(taps, 4, offset=-1).mixture, streams(taps, 3).mixture)
    assert torch.equal(streams(taps, 1, offset=-1).prefix, streams(taps, 0).prefix)
    with pytest.raises(BadInput, match="id 8 does not exist"):
        streams(taps, LAYERS, offset=1)


@pytest.mark.parametrize("tap", [0, 2, 3, 6])
def test_a_capture_of_one_tap(taps, tap):
    """The tap it holds is the default; the bank's length is the number of valid blocks where the metadata gives no block size."""
    s, whole = streams(one_tap(taps, tap)), streams(taps, layer_id(tap))
    assert s.layer == tap + 1
    assert torch.equal(s.mixture, whole.mixture)
    assert torch.equal(streams(one_tap(taps, tap), 0).prefix, taps.tensors["bank"][0])


def test_captures_by_layer_in_a_folder_or_a_list(taps, tmp_path):
    for tap in (1, 4):
        one_tap(taps, tap, num_layers=LAYERS).save(tmp_path / f"tap{tap}.safetensors")
    Capture({"x": torch.zeros(1)}, {"kind": "call"}).save(tmp_path / "other.safetensors")
    for given in (tmp_path, str(tmp_path), [tmp_path / "tap1.safetensors", one_tap(taps, 4)]):
        assert torch.equal(streams(given, 5).mixture, streams(taps, 5).mixture)
        assert compare(given)["layer"].tolist() == [0, 2, 5]
        with pytest.raises(BadInput, match=r"after layer 2.*ids 0, 2, 5"):
            streams(given, 3)
        with pytest.raises(BadInput, match="name a layer id, one of 0, 2, 5"):
            streams(given)


def test_the_bank_an_engine_keeps_and_stale_blocks(taps):
    """[T, blocks, hidden] is turned; a block that the consumer does not read may hold anything."""
    bank = taps.tensors["bank"].clone()
    bank[2] = float("nan")
    stale = edited(taps, tensors={"bank": bank.transpose(0, 1).contiguous()})
    for i in (0, 1, 3, 4, 6):
        assert torch.equal(streams(stale, i).mixture, streams(taps, i).mixture)
    assert streams(stale, 7).mixture.isnan().all(), "id 7 reads block 2, which layer 6 committed"


def test_the_end_of_a_pipeline_stage_is_refused_unless_it_is_the_last(taps):
    first = edited(taps, layers=[0, 1, 2, 3], pp_layers=[0, 4], tensors={n: taps.tensors[n][:4] for n in PER_TAP})
    assert torch.equal(streams(first, 3).mixture, streams(taps, 3).mixture)
    with pytest.raises(BadInput, match="ends a pipeline stage"):
        streams(first, 4)
    assert compare(first)["layer"].tolist() == [0, 1, 2, 3]
    last = edited(taps, layers=[4, 5, 6], pp_layers=[4, 7], tensors={n: taps.tensors[n][4:] for n in PER_TAP})
    assert torch.equal(streams(last, 7).mixture, streams(taps, 7).mixture)
    both = [first, last]
    assert compare(both)["layer"].tolist() == [0, 1, 2, 3, 5, 6, 7]


PER_TAP = ("prefix", "pending", "score_norm", "score_proj")


def test_a_model_without_attn_res_has_one_stream(taps):
    plain = edited(taps, drop=("bank", "score_norm", "score_proj"), tensors={"embedding": torch.ones(40, 64)}, attn_res_block=0)
    for i in range(LAYERS + 1):
        s = streams(plain, i)
        assert torch.equal(s.prefix, s.mixture)
        assert torch.equal(s.weights, torch.ones(40, 1))
    assert torch.equal(streams(plain, 4).prefix, taps.tensors["prefix"][3] + taps.tensors["pending"][3])
    df = compare(plain)
    assert df["cosine"].sub(1).abs().max() < 1e-12
    assert df["blocks"].eq(0).all()


def test_the_prefix_of_a_bfloat16_capture_is_rounded_before_it_is_mixed(net, tokens):
    half = taps_of(net, tokens, dtype=torch.bfloat16)
    s = streams(half, 5, impl="reference")
    added = (half.tensors["prefix"][4].double() + half.tensors["pending"][4].double()).bfloat16()
    assert torch.equal(s.prefix, added)
    assert s.mixture.dtype == torch.bfloat16
    done = {"prefix": torch.stack([added] * LAYERS), **{n: half.tensors[n] for n in ("bank", "score_norm", "score_proj")}}
    again = streams(Capture(done, half.metadata | {"absent": ["pending"]}), 5, impl="reference")
    assert torch.equal(again.mixture, s.mixture)


def test_taps_of_keeps_the_last_tokens_of_each_row(net, tokens, taps):
    tail = taps_of(net, tokens, last=3)
    rows = [17, 18, 19, 37, 38, 39]
    for name, x in tail.tensors.items():
        full = taps.tensors[name]
        expected = full if name.startswith("score") else full[rows] if name == "token_ids" else full[:, rows]
        assert torch.equal(x, expected), name


def test_compare_measures_both_streams(taps):
    """Cosine, norm ratio and mean weights, by hand on one layer; the embedding is equal to itself."""
    df = compare(taps).set_index("layer")
    assert df.index.tolist() == list(range(LAYERS + 1))
    assert df.loc[0, ["cosine", "norm_ratio", "weight_prefix"]].tolist() == pytest.approx([1, 1, 1])
    s = streams(taps, 5)
    a, b = s.prefix.double(), s.mixture.double()
    cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    assert df.loc[5, "cosine"] == pytest.approx(float(cosine.mean()))
    assert df.loc[5, "cosine_p05"] == pytest.approx(float(cosine.quantile(0.05)))
    assert df.loc[5, "norm_ratio"] == pytest.approx(float((a.norm(dim=-1) / b.norm(dim=-1)).mean()))
    weights = df.filter(like="weight_")
    assert weights.loc[5].tolist()[:2] == pytest.approx(s.weights.mean(0).tolist()[:2])
    assert weights.isna().loc[5].tolist() == [False, False, True, False]
    assert weights.sum(axis=1).tolist() == pytest.approx([1] * (LAYERS + 1))


def test_the_captures_in_data():
    """The shipped taps: the streams part most right after a block is committed, and the recorded mixture is met."""
    df = compare(CAPTURES / "attn_res_taps.safetensors").set_index("layer")
    assert df.index.tolist() == list(range(13))
    for committed in (1, 5, 9):  # after layers 0, 4, 8
        assert df.loc[committed, "cosine"] < df.loc[committed + 1, "cosine"]
    c = Capture.load(CAPTURES / "attn_res_layer4.safetensors")
    torch.testing.assert_close(streams(c).mixture, c.tensors["o"], rtol=1e-5, atol=1e-5)


BAD = {
    "kind": (lambda c: edited(c, kind="call"), 1, "need captures of kind 'attn_res'"),
    "no layer": (lambda c: edited(c, layers=None), 1, "metadata layer: is missing"),
    "no prefix": (lambda c: edited(c, drop=("prefix",)), 1, "prefix: is missing"),
    "number of taps": (lambda c: edited(c, layers=[0, 1]), 1, r"expected \[2, T, hidden\]"),
    "below 0": (lambda c: c, -1, "id -1 does not exist"),
    "after the last": (lambda c: c, LAYERS + 1, "id 8 does not exist"),
    "no pending": (lambda c: edited(c, drop=("pending",)), 1, "pending: is missing"),
    "no bank": (lambda c: edited(c, drop=("bank",)), 1, "bank: is missing"),
    "no embedding": (lambda c: edited(c, drop=("bank",)), 0, "id 0 is the embedding"),
    "short bank": (lambda c: edited(c, tensors={"bank": c.tensors["bank"][:2]}), 7, "num_blocks: 3, but the bank holds 2"),
    "no eps": (lambda c: edited(c, eps=None), 1, "metadata eps: is missing"),
    "no weights": (lambda c: edited(c, drop=("score_proj",)), 1, "consumer's weights"),
    "bank shape": (lambda c: edited(c, tensors={"bank": c.tensors["bank"][:, :3]}), 1, "bank: shape"),
    "stage": (lambda c: edited(c, pp_layers=[0, 4]), 5, "cannot hold a tap after layer"),
    "stage without layers": (lambda c: edited(c, pp_layers=[0, 7], num_layers=None), 1, "layers of the whole model"),
    "twice": (lambda c: [c, c], 1, "give the captures of one step"),
    "two models": (lambda c: [one_tap(c, 1, num_layers=7), one_tap(c, 2, num_layers=8)], 2, "models with 7 and 8 layers"),
    "none": (lambda c: [], 1, "no captures"),
    "impl": (lambda c: c, 1, "impl"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_captures_say_what_is_wrong(taps, name):
    make, layer, words = BAD[name]
    with pytest.raises(BadInput, match=words):
        streams(make(taps), layer, impl="none" if name == "impl" else "torch")


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(BadInput, match=f"{tmp_path}.*none of the 0 captures"):
        streams(tmp_path, 1)
