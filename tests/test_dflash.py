"""The DFlash drafter, its counts along a known continuation, and the script that trains it."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scripts
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k3lab.drafter import counts, dflash
from k3lab.errors import BadInput
from k3lab.tiny import data, model

ROOT = Path(__file__).resolve().parent.parent
CONFIG = dflash.DFlashConfig(taps=(1, 2, 3), block=8, layers=2, heads=2, mlp_width=64, hidden=64)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def script():
    return scripts.script("train_drafters")


@pytest.fixture(scope="module")
def target() -> model.TinyK3:
    torch.manual_seed(0)
    return model.TinyK3(model.SMALL).double().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafter() -> dflash.DFlash:
    """With norms moved off one, so that a norm left out would show."""
    torch.manual_seed(1)
    m = dflash.DFlash(CONFIG).double().requires_grad_(False)
    for p in m.parameters():
        p += 0.1 * torch.randn_like(p)
    return m


@pytest.fixture(scope="module")
def seen(target) -> tuple[torch.Tensor, dict]:
    """Tokens [3, 40] and what a teacher-forced forward collects on them."""
    tokens = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(2))
    collect = model.new_collect()
    target(tokens, collect)
    return tokens, collect


def logits_at(target, drafter, tokens, feed, anchors) -> torch.Tensor:
    return drafter(target, drafter.context(feed), tokens.gather(1, anchors), anchors)


def reference_logits(target, drafter, last_token: int, feed: torch.Tensor) -> torch.Tensor:
    """Logits [block - 1, VOCAB] of one block behind feed [a, taps, hidden], by the equations, head by head and row by row."""
    c, a = drafter.config, len(feed)
    d = c.hidden // c.heads

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + dflash.NORM_EPS).sqrt() * weight

    def rotated(x, position):
        pair = torch.complex(x[: d // 2], x[d // 2 :])
        angle = position * dflash.ROPE_BASE ** (-torch.arange(d // 2, dtype=torch.float64) * 2 / d)
        y = pair * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([y.real, y.imag])

    context = norm(feed.flatten(1) @ drafter.fuse.weight.T, drafter.context_norm.weight)
    ids = torch.tensor([last_token] + [model.MASK] * (c.block - 1))
    x = target.embed.weight[ids] + drafter.row
    for layer in drafter.layers:
        n = norm(x, layer.attn_norm.weight)
        k, v = (torch.cat([context, n]) @ layer.kv.weight.T).chunk(2, -1)
        q = n @ layer.q.weight.T
        o = torch.zeros_like(x)
        for h in range(c.heads):
            part = slice(h * d, (h + 1) * d)
            keys = torch.stack([rotated(k[t, part], t) for t in range(a + c.block)])
            for j in range(c.block):
                p = (keys @ rotated(q[j, part], a + j) / d**0.5).softmax(0)
                o[j, part] = p @ v[:, part]
        x = x + o @ layer.out.weight.T
        x = x + layer.mlp(norm(x, layer.mlp_norm.weight))
    return norm(x, drafter.out_norm.weight)[1:] @ target.head.weight.T


@pytest.mark.parametrize("anchor", [0, 1, 17, 40])
def test_a_block_follows_the_equations(target, drafter, seen, anchor):
    feed = dflash.features(seen[1], CONFIG.taps, "mixture")[:1]
    got = drafter(target, drafter.context(feed), torch.tensor([[7]]), torch.tensor([[anchor]]))[0, 0]
    torch.testing.assert_close(got, reference_logits(target, drafter, 7, feed[0, :anchor]), rtol=1e-11, atol=1e-11)


def test_blocks_drafted_together_equal_blocks_drafted_alone(target, drafter, seen):
    """No anchor sees another's block, and a context cut at the anchor gives the same."""
    tokens, collect = seen
    feed = dflash.features(collect, CONFIG.taps, "prefix")
    anchors = torch.tensor([[3, 39, 12, 12], [1, 2, 3, 4], [38, 20, 0, 7]])
    together = logits_at(target, drafter, tokens, feed, anchors)
    for b in range(3):
        for i, a in enumerate(anchors[b].tolist()):
            alone = logits_at(target, drafter, tokens[b : b + 1], feed[b : b + 1], torch.tensor([[a]]))
            cut = drafter(target, drafter.context(feed[b : b + 1, :a]), tokens[b : b + 1, a : a + 1], torch.tensor([[a]]))
            torch.testing.assert_close(together[b, i], alone[0, 0], rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(together[b, i], cut[0, 0], rtol=1e-11, atol=1e-11)


def test_features_from_the_anchor_on_do_not_leak(target, drafter, seen):
    tokens, collect = seen
    feed = dflash.features(collect, CONFIG.taps, "mixture")
    anchors = torch.tensor([[20]] * 3)
    before = logits_at(target, drafter, tokens, feed, anchors)
    for first, same in ((20, True), (19, False)):
        changed = feed.clone()
        changed[:, first:] = 100 * torch.randn(changed[:, first:].shape, dtype=changed.dtype, generator=torch.Generator().manual_seed(3))
        assert torch.equal(logits_at(target, drafter, tokens, changed, anchors), before) == same


def test_a_block_is_not_causal(target, drafter, seen):
    """The last row of a block reaches the first draft's logits."""
    tokens, collect = seen
    feed = dflash.features(collect, CONFIG.taps, "mixture")
    anchors = torch.tensor([[20]] * 3)
    before = logits_at(target, drafter, tokens, feed, anchors)
    row = drafter.row.clone()
    try:
        drafter.row[-1] += 1
        assert not torch.allclose(logits_at(target, drafter, tokens, feed, anchors)[:, :, 0], before[:, :, 0])
    finally:
        drafter.row.copy_(row)


def test_features_are_the_layers_at_tap_plus_offset(seen):
    tokens, collect = seen
    for stream in dflash.STREAMS:
        for offset in (-1, 0, 1):
            got = dflash.features(collect, (1, 3), stream, offset)
            assert got.shape == (*tokens.shape, 2, 64)
            assert torch.equal(got[:, :, 0], collect[stream][1 + offset])
            assert torch.equal(got[:, :, 1], collect[stream][3 + offset])
    assert not dflash.features(collect, (1, 3), "zeros").any()


@pytest.mark.parametrize(("stream", "taps", "offset"), [("prefix", (0, 2), -1), ("mixture", (1, 4), 1), ("mean", (1,), 0)])
def test_features_refuses_what_is_not_there(seen, stream, taps, offset):
    """Layer -1 is not the last layer, and there is nothing after it."""
    with pytest.raises(BadInput, match=r"outside 0\.\.4|not one of"):
        dflash.features(seen[1], taps, stream, offset)


@pytest.mark.parametrize("bad", [{"taps": (5, 1)}, {"taps": ()}, {"taps": (-1, 2)}, {"block": 1}, {"layers": 0}, {"heads": 3}])
def test_a_config_that_cannot_be_built_is_refused(bad):
    with pytest.raises(BadInput, match="drafter config"):
        replace(CONFIG, **bad)


def test_another_width_is_refused(target, drafter, seen):
    with pytest.raises(BadInput, match="taps, hidden"):
        drafter.context(torch.zeros(1, 4, 2, 64, dtype=torch.float64))
    wide = dflash.DFlash(replace(CONFIG, hidden=128)).double()
    with pytest.raises(BadInput, match="hidden size 64"):
        wide(target, torch.zeros(1, 4, 128).double(), torch.zeros(1, 1).long(), torch.ones(1, 1).long())


def saved(tmp_path: Path, drafter: dflash.DFlash) -> tuple[Path, Path]:
    """A drafter's file and its target's."""
    torch.manual_seed(5)
    model.save(model.TinyK3(model.SMALL), tmp_path / "target.safetensors")
    drafter.origin = dflash.Origin("prefix", 3, dflash.sha256(tmp_path / "target.safetensors"))
    dflash.save(drafter, tmp_path / "drafter.safetensors")
    return tmp_path / "drafter.safetensors", tmp_path / "target.safetensors"


def test_save_and_load_round_trip(tmp_path, drafter):
    path, target_path = saved(tmp_path, drafter)
    back = dflash.load(path, dtype=torch.float64, target=target_path)
    assert back.config == CONFIG
    assert back.origin == drafter.origin
    for name, x in drafter.state_dict().items():
        assert torch.equal(back.state_dict()[name], x.bfloat16().double())
    assert not any(p.requires_grad for p in back.parameters())
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["drafter.safetensors", "target.safetensors"]


def test_load_refuses_what_is_not_ours(tmp_path, drafter):
    path, target_path = saved(tmp_path, drafter)
    other = tmp_path / "other.safetensors"
    model.save(model.TinyK3(model.SMALL), other)
    with pytest.raises(BadInput, match="trained on the target with sha256"):
        dflash.load(path, target=other)
    with pytest.raises(BadInput, match="metadata format is 'k3lab-tiny-k3-1'"):
        dflash.load(target_path)
    with pytest.raises(BadInput, match="not a readable safetensors"):
        dflash.load(tmp_path / "absent.safetensors")
    (tmp_path / "text").write_text("not tensors")
    with pytest.raises(BadInput, match="not a readable safetensors"):
        dflash.load(tmp_path / "text")
    meta = {"format": dflash.FORMAT, "stream": "prefix", "seed": "0", "target_sha256": "0"}
    sizes = json.dumps({"taps": [1, 2], "layers": 2, "heads": 2, "hidden": 64, "mlp_width": 64})
    for change, why in (({}, "missing or malformed"), ({"config": "{"}, "missing or malformed"), ({"config": "[]"}, "missing or malformed"),
                        ({"config": sizes, "stream": "mean"}, "not one of"), ({"config": sizes}, "do not fit")):  # fmt: skip
        save_file(load_file(path), tmp_path / "odd", metadata=meta | change)
        with pytest.raises(BadInput, match=why):
            dflash.load(tmp_path / "odd")
    drafter.origin = None
    with pytest.raises(BadInput, match="no origin"):
        dflash.save(drafter, path)


def test_the_walk_over_a_table_made_by_hand():
    """Rounds jump by accepted + 1; entries between are not read; the last round counts in full though the limit falls in it."""
    table = torch.tensor([[2, 7, 7, 0, 1, 3, 7, 7], [0] * 8, [7] * 8])
    got = counts.walk_counts(table, block=8)
    # prompt 0: anchors 0 (2), 3 (0), 4 (1), 6 (7)
    assert got["drafts"].tolist() == [4, 8, 1]
    assert got["drafted"].tolist() == [28, 56, 7]
    assert got["accepted"].tolist() == [10, 0, 7]
    assert got["emitted"].tolist() == [14, 8, 8]
    assert [got[f"accepted_{j}"].tolist() for j in range(7)] == [[3, 0, 1], [2, 0, 1]] + [[1, 0, 1]] * 5
    assert list(got) == ["drafts", "drafted", "accepted", "emitted", *(f"accepted_{j}" for j in range(7))]
    with pytest.raises(BadInput, match=r"0 \.\. 2"):
        counts.walk_counts(table, block=3)


def test_count_identities_on_random_tables():
    table = torch.randint(0, 5, (50, 61), generator=torch.Generator().manual_seed(4))
    got = counts.walk_counts(table, block=5)
    assert (sum(got[f"accepted_{j}"] for j in range(4)) == got["accepted"]).all()
    assert (got["emitted"] == got["accepted"] + got["drafts"]).all()
    assert all((got[f"accepted_{j}"] >= got[f"accepted_{j + 1}"]).all() for j in range(3))
    assert (got["emitted"] >= 61).all()  # the walk went to the end
    assert (got["emitted"] < 61 + 5).all()


def test_acceptance_at_an_anchor_is_the_agreeing_head_of_the_draft(target, drafter, seen):
    """On text of which each block's first drafts are made to agree; and one token short of the last block is refused."""
    tokens, collect = seen
    feed = dflash.features(collect, CONFIG.taps, "mixture")
    for prompt_len, new, agree in ((20, 2, 7), (20, 2, 3), (11, 2, 0)):
        a = torch.full((3, 1), prompt_len)
        text = tokens.clone()
        drafts = model.greedy(logits_at(target, drafter, tokens, feed, a))[:, 0]
        text[:, prompt_len + 1 : prompt_len + 8] = drafts
        if agree < 7:
            text[:, prompt_len + 1 + agree] = (text[:, prompt_len + 1 + agree] + 1) % 256
        got = counts.anchor_acceptance(drafter, target, text, prompt_len, new, feed)
        assert got.tolist() == [[agree]] * 3
    assert counts.anchor_acceptance(drafter, target, tokens, 20, 14, feed).shape == (3, 13)
    with pytest.raises(BadInput, match="need 41"):
        counts.anchor_acceptance(drafter, target, tokens, 20, 15, feed)


def test_continuations_are_the_targets_own(script, target):
    """The serving loop of the script against the teacher-forced argmax, in float64, in batches that do not divide the prompts."""
    prompts = torch.randint(0, 256, (5, 7), generator=torch.Generator().manual_seed(6))
    got = script.continuations(target, prompts, 6, 2, "test")
    assert torch.equal(got[:, :7], prompts)
    assert torch.equal(model.greedy(target(got))[:, 6:-1], got[:, 7:])


def test_held_out_prompts_do_not_overlap_and_ask(script):
    recipe = replace(script.RECIPES["small"], prompts=6)
    corpus = data.build_corpus(recipe.problems, recipe.max_code_bytes)
    tokens, domain = script.held_out_prompts(corpus, recipe, torch.Generator().manual_seed(0))
    assert [domain.count(d) for d in data.DOMAINS] == [6, 6, 6]
    assert tokens.shape == (18, recipe.prompt_len)
    for d in data.DOMAINS:
        stream = bytes(x if x < 256 else 0 for x in corpus.held_out[d].tolist())
        mine = [bytes(x if x < 256 else 0 for x in t.tolist()) for t, of in zip(tokens, domain, strict=True) if of == d]
        assert all(t in stream for t in mine)
        assert len(set(mine)) == 6
        assert d != "arithmetic" or all(t.endswith(script.ASKED) for t in mine)


def test_the_two_drafters_of_a_seed_start_alike_and_a_seed_repeats(script, target, tmp_path):
    """Trained twice from one seed: the same weights bit for bit; the two streams part, and so do two seeds."""
    recipe = replace(script.RECIPES["small"], steps=3)
    corpus = data.build_corpus(recipe.problems, recipe.max_code_bytes)
    own = torch.randint(0, 256, (10, recipe.window), generator=torch.Generator().manual_seed(7))
    net = model.TinyK3(model.SMALL).eval().requires_grad_(False)
    recipe = replace(recipe, drafter=replace(recipe.drafter, hidden=64))
    first, again, other = (script.train(net, corpus, own, recipe, seed)[0] for seed in (1, 1, 2))
    for stream in dflash.STREAMS:
        assert all(torch.equal(x, again[stream].state_dict()[n]) for n, x in first[stream].state_dict().items())
        assert not torch.equal(first[stream].row, other[stream].row)
    assert not torch.equal(first["mixture"].fuse.weight, first["prefix"].fuse.weight)
    start = script.train(net, corpus, own, replace(recipe, rate=0.0), 1)[0]
    assert all(torch.equal(x, start["prefix"].state_dict()[n]) for n, x in start["mixture"].state_dict().items())


def test_training_loss_weighs_positions(script, target, drafter, seen):
    """The loss of one anchor by hand, and no gradient into the target."""
    tokens, collect = seen
    anchors = torch.tensor([[30], [5], [12]])
    feed = dflash.features(collect, CONFIG.taps, "mixture")
    logp = logits_at(target, drafter, tokens, feed, anchors).log_softmax(-1)
    w = np.exp(-np.arange(7) / 4)
    want = -sum(w[j] * float(logp[b, 0, j, tokens[b, a + 1 + j]]) for b, a in enumerate((30, 5, 12)) for j in range(7)) / w.sum() / 3
    got = script.training_loss(target, {"mixture": drafter}, tokens, anchors, 4.0)["mixture"]
    assert float(got) == pytest.approx(want, rel=1e-5)  # the loss is taken in float32


def test_the_script_writes_what_it_says(script, tmp_path):
    """A run of three steps: files, schema, hashes of the record, prompts that give the same counts again."""
    torch.manual_seed(8)
    target_path = tmp_path / "small.safetensors"
    model.save(model.TinyK3(model.SMALL), target_path)
    out = tmp_path / "out"
    recipe = replace(script.RECIPES["small"], steps=3, prompts=3, own_texts=6)
    record = script.run(recipe, "small", "cpu", [4, 5], target_path, out)
    names = {"drafter_mixture.safetensors", "drafter_prefix.safetensors", "drafter_counts.csv", "drafter_counts.md", "drafter_prompts.csv"}
    assert {p.name for p in out.iterdir()} == names | {"drafter_prompts.safetensors", "drafters.json", "drafters.md"}
    assert json.loads((out / "drafters.json").read_text())["sha256"] == record["sha256"]
    for name, want in record["sha256"].items():
        path = out / (name if "." in name else f"drafter_{name}.safetensors")
        assert dflash.sha256(path) == want
        assert want in (out / "drafters.md").read_text() + (out / "drafter_counts.md").read_text()
    with open(out / "drafter_counts.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == 2 * 2 * 7 * 9
    assert {r["seed"] for r in rows} == {"4", "5"}
    prompts = counts.load_prompts(out / "drafter_prompts.safetensors")
    some = [0, 4, 8]
    for name in dflash.STREAMS:
        drafter = dflash.load(out / f"drafter_{name}.safetensors", target=target_path)
        assert drafter.origin.seed == 4
        live = counts.prompt_counts(drafter, model.load(target_path), prompts[some], [("mixture", 1)])["mixture", 1]
        stored = {int(r["prompt"]): r for r in rows if [r[k] for k in counts.KEYS[:4]] == [name, "4", "mixture", "1"]}
        assert [int(stored[i]["emitted"]) for i in some] == live["emitted"].tolist()
        assert [stored[i]["domain"] for i in some] == list(data.DOMAINS)
    with pytest.raises(BadInput, match="metadata format"):
        counts.load_prompts(target_path)


def test_a_target_too_shallow_for_the_taps_is_refused(script, tmp_path):
    model.save(model.TinyK3(model.SMALL), tmp_path / "small.safetensors")
    with pytest.raises(BadInput, match="5 layers, but taps"):
        script.run(script.RECIPES["full"], "full", "cpu", [0], tmp_path / "small.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "value"), [("mlp_width", 2**40), ("layers", 10**9), ("block", 2**40), ("heads", "2")])
def test_a_drafter_larger_than_its_file_is_refused_before_it_takes_memory(tmp_path, drafter, key, value):
    path, _ = saved(tmp_path, drafter)
    with safe_open(path, framework="pt") as f:
        about = f.metadata()
    about["config"] = json.dumps(json.loads(about["config"]) | {key: value})
    save_file(load_file(path), tmp_path / "odd", metadata=about)
    with pytest.raises(BadInput, match=r"fit|malformed"):
        dflash.load(tmp_path / "odd")


@pytest.mark.parametrize(
    "change", [{"prompt_len": -1}, {"new_tokens": "3"}, {"domain": ["code"]}, {"prompt_len": 10**9}, {"domain": [1, 2]}]
)
def test_prompts_whose_sizes_do_not_fit_are_refused(tmp_path, change):
    sizes = {"prompt_len": 2, "new_tokens": 3, "domain": ["code", "text"]} | change
    about = {"format": counts.PROMPTS_FORMAT, "prompts": json.dumps(sizes)}
    save_file({"tokens": torch.zeros(2, 8, dtype=torch.int16)}, tmp_path / "p", metadata=about)
    with pytest.raises(BadInput, match="not a readable file of prompts"):
        counts.load_prompts(tmp_path / "p")
