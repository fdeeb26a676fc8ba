"""The tiny Kimi-K3: the serving step against the teacher-forced forward, training from a seed, serving, and the data scripts."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from scripts import script

from k3lab.capture import Capture
from k3lab.errors import BadInput
from k3lab.kda.reference import recurrent_kda
from k3lab.testing import assert_within_budget, low_precision_reference
from k3lab.tiny import accuracy, data, model, serving
from k3lab.tiny.batch import Batch

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "data" / "tiny_k3.safetensors"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def net() -> model.TinyK3:
    """A small float64 model with every parameter moved off its start, so that no mixture is uniform and no norm is one."""
    torch.manual_seed(0)
    m = model.TinyK3(model.SMALL).double().requires_grad_(False)
    for p in m.parameters():
        p += 0.1 * p.abs().mean().clamp(min=0.2) * torch.randn_like(p)
    return m


def random_prompts(lengths: list[int], seed: int = 1) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=gen) for n in lengths]


def pieces(seqs: list[torch.Tensor], done: list[int], take: list[tuple[int, int]], num_decodes: int, **extra) -> Batch:
    """The next n tokens of some sequences, sequence i in slot i + 1; advances done."""
    tokens = torch.cat([seqs[i][done[i] : done[i] + n] for i, n in take])
    batch = Batch(tokens, [n for _, n in take], [i + 1 for i, _ in take], [done[i] for i, _ in take], num_decodes, **extra)
    for i, n in take:
        done[i] += n
    return batch


@pytest.mark.parametrize(("impl", "route"), [("reference", "split"), ("torch", "split"), ("torch", "chunk_all")])
def test_step_equals_teacher_forced_forward(net, impl, route):
    """Cut prefills, decodes and mixed steps give the logits of one forward over the whole sequence (float64)."""
    seqs = random_prompts([70, 130, 64, 1, 20])
    whole = [net(s[None])[0] for s in seqs]
    cache, done = net.new_cache(6, 130), [0] * 5
    for tensor in (x for part in (cache.conv, cache.recurrent, cache.keys, cache.values) for x in part if x is not None):
        tensor[1:] = float("nan")  # what a slot's last owner may leave
    steps = [([(0, 33), (1, 64)], 0), ([(0, 1), (2, 63), (1, 65)], 1), ([(0, 1), (1, 1), (2, 1), (3, 1), (4, 20)], 3), ([(0, 35)], 0)]
    for take, num_decodes in steps:
        got = net.step(pieces(seqs, done, take, num_decodes), cache, route, impl, all_rows=True).split([n for _, n in take])
        for (i, n), rows in zip(take, got, strict=True):
            torch.testing.assert_close(rows, whole[i][done[i] - n : done[i]], rtol=1e-9, atol=1e-9)


def test_step_streams_equal_forward_streams(net):
    """collect gives the same prefix and mixture streams by both forwards, and the mixture is its definition over bank and prefix."""
    (tokens,) = random_prompts([40])
    whole, packed = model.new_collect(), model.new_collect()
    net(tokens[None], collect=whole)
    net.step(Batch(tokens, [40], [1], [0]), net.new_cache(2, 40), collect=packed)
    for name in ("prefix", "mixture"):
        assert len(whole[name]) == net.config.shapes.num_layers
        for a, b in zip(whole[name], packed[name], strict=True):
            torch.testing.assert_close(b, a[0], rtol=1e-9, atol=1e-9)
    layer = 2  # commits the second block
    tap, consumer = whole["taps"][layer], net.layers[layer + 1].attn_res
    sources = torch.stack([*tap["bank"], tap["prefix"] + tap["pending"]], -2)
    normed = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + consumer.eps)
    weights = (normed @ (consumer.norm * consumer.proj)).softmax(-1)
    assert len(tap["bank"]) == 2
    torch.testing.assert_close(whole["mixture"][layer], (weights[..., None] * sources).sum(-2))


def test_null_slot_is_skipped_and_never_written(net):
    """A padding sequence in slot 0 changes nobody's logits and leaves slot 0 zero in every layer."""
    seqs = random_prompts([9, 70])
    alone = net.step(pieces(seqs, [0, 0], [(0, 9), (1, 70)], 0), net.new_cache(3, 80))
    cache = net.new_cache(3, 80)
    padded = Batch(torch.cat([seqs[0], torch.tensor([7, 7]), seqs[1]]), [9, 2, 70], [1, 0, 2], [0, 0, 0])
    seen = []
    got = net.step(padded, cache, hook=seen.append)
    torch.testing.assert_close(got[[0, 2]], alone, rtol=1e-9, atol=1e-9)
    for part in (cache.conv, cache.recurrent, cache.keys, cache.values):
        assert all(float(x[0].abs().max()) == 0 for x in part if x is not None)
        assert all(float(x[1].abs().max()) > 0 for x in part if x is not None)
    assert all(float(s.result.o[9:11].abs().max()) == 0 for s in seen)


def test_nan_kills_the_decodes_of_a_mixed_step_and_nothing_else(net):
    """chunk_all with NaN rows: every decode and every ragged prefill is lost, a full chunk is not; split keeps the decodes."""
    seqs = random_prompts([65, 65, 64, 30])
    for route, lost in (("chunk_all", [True, True, False, True]), ("split", [False, False, False, True])):
        cache, done = net.new_cache(5, 80), [0] * 4
        net.step(pieces(seqs, done, [(0, 64), (1, 64)], 0), cache, route, padding="nan")
        logits = net.step(pieces(seqs, done, [(0, 1), (1, 1), (2, 64), (3, 30)], 2), cache, route, padding="nan")
        assert logits.isnan().all(-1).tolist() == lost
        assert model.greedy(logits)[torch.tensor(lost)].unique().tolist() == [0]
        kda = net.kda_layers[0]
        assert cache.recurrent[kda][1:].isnan().flatten(1).any(1).tolist() == lost, "a state that holds NaN never recovers"


def test_a_tensor_of_draws_hits_the_workgroups_it_names(net):
    """padding as a function of the layer: only the sequence drawn at one layer and head is lost."""
    seqs = random_prompts([65, 65, 30])
    cache, done = net.new_cache(4, 80), [0] * 3
    net.step(pieces(seqs, done, [(0, 64), (1, 64)], 0), cache)
    last = net.kda_layers[-1]

    def draws(layer: int) -> torch.Tensor:
        hit = torch.zeros(3, net.config.shapes.num_heads, dtype=torch.bool)
        hit[1, 1] = layer == last
        return hit

    logits = net.step(pieces(seqs, done, [(0, 1), (1, 1), (2, 30)], 2), cache, "chunk_all", padding=draws)
    assert logits.isnan().all(-1).tolist() == [False, True, False]


def test_greedy_gives_zero_for_nan():
    """A row with one NaN logit gives id 0, an intact row its largest byte, never BOS or MASK."""
    logits = torch.zeros(2, model.VOCAB)
    logits[:, 65], logits[1, model.MASK] = 1.0, 9.0
    logits[0, 200] = float("nan")
    assert model.greedy(logits).tolist() == [0, 65]


@pytest.mark.parametrize("change", ["lengths", "slots", "max_len", "decodes"])
def test_batches_that_do_not_fit_are_refused(net, change):
    """Wrong lengths, shared slots, a full KV cache, a long decode: BadInput, and the cache is untouched."""
    cache = net.new_cache(3, 8)
    good = dict(tokens=torch.arange(4), lengths=[1, 3], slots=[1, 2], context=[2, 0], num_decodes=1)
    bad = {"lengths": {"lengths": [1, 2]}, "slots": {"slots": [1, 1]}, "max_len": {"context": [2, 6]}, "decodes": {"num_decodes": 2}}
    with pytest.raises(BadInput, match="batch"):
        net.step(Batch(**{**good, **bad[change]}), cache)
    assert all(float(x.abs().max()) == 0 for x in cache.recurrent if x is not None)


def served(net, prompts, **options) -> list[list[int]]:
    outputs, _ = serving.serve(net, prompts, max_new=6, stop=b"", **options)
    return [o.tokens for o in outputs]


def test_serving_does_not_depend_on_batching(net):
    """One request at a time, eight at a time, cut prefills, late arrivals: the same tokens; and both routes agree with zero padding."""
    prompts = random_prompts([5, 64, 65, 1, 100, 33, 63], seed=3)
    alone = served(net, prompts, max_seqs=1)
    assert len(alone) == 7
    assert all(len(t) == 6 for t in alone)
    assert served(net, prompts, max_seqs=8) == alone
    assert served(net, prompts, max_seqs=4, max_tokens=40, arrivals=[0, 0, 0, 2, 3, 9, 40]) == alone
    assert served(net, prompts, max_seqs=8, arrivals=list(range(7)), route="chunk_all") == alone


def test_serving_log_counts_what_happened(net):
    """The frame adds up: tokens, mixed steps, and exposures that match a count by hand, by route."""
    prompts = random_prompts([64, 70, 64], seed=4)
    outputs, frame = serving.serve(net, prompts, max_new=4, stop=b"", arrivals=[0, 0, 2], route="chunk_all")
    workgroups = len(net.kda_layers) * net.config.shapes.num_heads
    assert frame.tokens.sum() == sum(map(len, prompts)) + 3 * 3  # the last token of a request is never fed
    assert frame.mixed.tolist() == [False, False, True, False, False, False]
    assert frame.exposed_decodes.tolist() == [0, 0, 2 * workgroups, 0, 0, 0]
    assert frame.exposed_prefills.tolist() == [workgroups, 0, 0, 0, 0, 0]
    assert [o.exposed[-1] for o in outputs] == [workgroups, 2 * workgroups, 0]
    _, frame = serving.serve(net, prompts, max_new=4, stop=b"", arrivals=[0, 0, 2], route="split")
    assert frame.exposed_decodes.sum() == 0
    assert frame.exposed_prefills.sum() == workgroups


def test_nan_with_probability_p(net):
    """p = 0 is zero padding, p = 1 is NaN padding, draws repeat with their seed, and the poisoned count is a fair draw."""
    prompts = random_prompts([64] * 6 + [70] * 6, seed=5)
    options = dict(arrivals=[0] * 6 + [3] * 6, route="chunk_all")
    assert served(net, prompts, p=0.0, **options) == served(net, prompts, **options)
    assert served(net, prompts, p=1.0, **options) == served(net, prompts, padding="nan", **options)
    runs = [serving.serve(net, prompts, max_new=8, stop=b"", p=0.1, seed=s, **options) for s in (1, 1, 2)]
    assert [o.tokens for o in runs[0][0]] == [o.tokens for o in runs[1][0]]
    exposed = sum(int(f.exposed_decodes.sum() + f.exposed_prefills.sum()) for _, f in runs[1:])
    poisoned = sum(int(f.poisoned.sum()) for _, f in runs[1:])
    assert abs(poisoned - 0.1 * exposed) < 4 * (0.09 * exposed) ** 0.5
    assert all(set(o.tokens[-1:]) == {0} for o in runs[0][0] if o.poisoned), "a request that drew NaN ends in zeros"
    with pytest.raises(BadInput, match="padding"):
        serving.serve(net, prompts, p=0.1, padding="nan")


def test_problems_and_scoring():
    """Problems repeat with their seed, held-out ones are never trained on, and only the first stated answer counts."""

    def take(seed: int, held_out: bool) -> list[data.Problem]:
        stream = data.problems(seed, held_out)
        return [next(stream) for _ in range(300)]

    assert take(0, True) == take(0, True)
    assert not {p.question for p in take(0, True)} & {p.question for p in take(0, False)}
    for p in take(0, False):
        assert data.is_correct(p.text[len(p.prompt) :], p)
        for calculation in p.working.rstrip(".").split(". "):
            left, right = calculation.split(" has ")[-1].split(" = ")
            assert eval(left, {"__builtins__": {}}) == int(right), p
    p = data.Problem("q", "w", 42)
    assert data.is_correct(" The answer is 42.\n\n", p)
    assert not data.is_correct(" The answer is 41. The answer is 42.\n\n", p)
    assert not data.is_correct("\n\nThe answer is 42.", p)
    assert not data.is_correct([0] * 20, p)
    assert data.decode(data.encode("naïve")) == "naïve"


def test_prompts_are_ragged_and_held_out():
    """Prompts start at BOS, ask different held-out problems, and their lengths spread over the chunk."""
    prompts = data.arithmetic_prompts(64, seed=7)
    assert len({p.problem.question for p in prompts}) == 64
    assert all(p.problem.held_out and int(p.tokens[0]) == model.BOS and data.decode(p.tokens).endswith("\nAnswer:") for p in prompts)
    assert len({len(p.tokens) % 64 for p in prompts}) > 20


@pytest.mark.slow
def test_training_repeats_from_its_seed_and_writes_a_card(tmp_path):
    """The same seed gives the same weights bit for bit on a CPU, another seed others; the card shows the record's numbers."""
    train = script("train_tiny_k3")
    recipe = dataclasses.replace(
        train.RECIPES["small"], steps=6, batch=4, window=64, problems=500, max_code_bytes=200_000, eval_windows=2, eval_problems=1
    )
    records = [train.run(recipe, "small", "cpu", seed, tmp_path / name) for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    a, b, c = (model.load(tmp_path / n / "tiny_k3.safetensors").state_dict() for n in "abc")
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])
    curve = [v for _, v in records[0]["training"]["loss_curve_nats"]]
    assert curve == [v for _, v in records[1]["training"]["loss_curve_nats"]]
    assert curve[-1] < curve[0]
    record = json.loads((tmp_path / "a" / "tiny_k3.json").read_text())
    card = (tmp_path / "a" / "tiny_k3.md").read_text()
    assert record["sha256"] in card
    assert f"{record['gates'][0]['akk_norm_max']:.2f}" in card


def test_shipped_weights_card_and_record_agree():
    """data/tiny_k3.* belong together, and the model answers held-out problems when served in mixed batches."""
    train = script("train_tiny_k3")
    record = json.loads(WEIGHTS.with_suffix(".json").read_text())
    assert train.sha256(WEIGHTS) == record["sha256"]
    assert record["exact_match"]["rate"] > 0.9
    prompts = data.arithmetic_prompts(6, seed=11, max_shots=1)
    outputs, frame = serving.serve(model.load(WEIGHTS), [p.tokens for p in prompts], max_seqs=4, arrivals=[0, 0, 1, 2, 20, 21])
    assert frame.mixed.any()
    assert sum(data.is_correct(o.tokens, p.problem) for o, p in zip(outputs, prompts, strict=True)) >= 5


def test_loading_what_is_not_a_model(tmp_path):
    """A text file, a capture, a missing file: BadInput that names the file."""
    (tmp_path / "x.safetensors").write_text("no tensors here")
    Capture({"q": torch.zeros(1)}, {"kind": "call"}).save(tmp_path / "y.safetensors")
    for name in ("x", "y", "missing"):
        with pytest.raises(BadInput, match=f"{name}.safetensors"):
            model.load(tmp_path / f"{name}.safetensors")


@pytest.mark.slow
def test_capture_script_on_a_small_model(tmp_path, monkeypatch):
    """make_captures writes loadable captures whose recorded o is within the bf16 budget of the float64 recurrence, NaN where it says so."""
    make = script("make_captures")
    torch.manual_seed(1)
    small = model.TinyK3(dataclasses.replace(model.SMALL, shapes=dataclasses.replace(model.SMALL.shapes, num_layers=7, full_attn_every=4)))
    model.save(small, tmp_path / "w.safetensors")
    monkeypatch.setattr("sys.argv", ["make_captures", "--weights", str(tmp_path / "w.safetensors"), "--out", str(tmp_path / "c")])
    make.main()
    found = {p.stem: Capture.load(p) for p in (tmp_path / "c").glob("*.safetensors")}
    assert {c.kind for c in found.values()} == {"kda", "attn_res"}
    assert all((tmp_path / "c" / f"{name}.md").is_file() for name in found)
    for name, c in found.items():
        if c.kind != "kda":
            continue
        call, o = c.kda_call(), c.results()["o"]
        good = torch.isfinite(o.float()).flatten(1).all(1)
        hit = torch.zeros_like(good)
        if "nan" in name:
            cu = call.cu_seqlens.tolist()
            for a, b in itertools.pairwise(cu):
                hit[a:b] = (b - a) % 64 != 0
        assert torch.equal(good, ~hit), name
        truth, low = recurrent_kda(call)["o"], low_precision_reference(call, torch.bfloat16)["o"]
        assert_within_budget(name, o[good], truth[good], low[good], torch.bfloat16)
    mixed = next(c for n, c in found.items() if n.startswith("mixed_split"))
    assert mixed.tensors["cu_seqlens"].diff().tolist() == [1] * 5 + [1, 63, 64, 65, 200]
    assert int(mixed.tensors["state_indices"].min()) > 0
    assert found["mixed_128_decodes"].tensors["cu_seqlens"].diff().tolist() == [1] * 128 + [100]
    accepted = found["speculative_interleaved"].tensors["num_accepted_tokens"]
    assert int(accepted.min()) >= 1
    assert accepted[[1, 3, 4]].tolist() == [1, 1, 1]


def test_accuracy_expectation():
    """The expectation beside a measured count is the clean run's correct requests, thinned by (1 - p)^exposures."""
    measure = script("measure_accuracy")
    rows = [{"route": "split", "seed": 0, "p": p, "requests": [[1, 2], [1, 0], [0, 5]]} for p in (0.0, 0.5)]
    assert [r["expected_correct"] for r in measure.with_expectation(rows)] == [2.0, 1.25]
    tokens = list(b" 1 + 1 = 2. The answer is 2.\n\n")
    assert measure.answered_at(tokens, list(range(len(tokens)))) == tokens.index(ord("\n")) - 1
    assert measure.answered_at([0, 0, 0], [3, 4, 9]) == 9


@pytest.mark.parametrize(("wrong", "named"), [({"p": 1.5}, "p"), ({"p": float("nan")}, "p"), ({"max_new": 0}, "max_new")])
def test_serve_refuses_what_it_cannot_do(wrong, named):
    with pytest.raises(BadInput, match=rf"^{named}:"):
        serving.serve(model.TinyK3(model.SMALL), [torch.tensor([1, 2])], **wrong)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [({"hidden": 2**20}, "more elements than the file"), ({"num_layers": 10**9}, "layers of"), ({"head_dim": -1}, "do not fit"),
     ({"num_heads": "2"}, "do not fit"), ({"full_attn_every": 0}, "do not fit"), ({"colour": 1}, "do not fit")],
)  # fmt: skip
def test_a_configuration_that_is_not_the_files_is_refused_before_it_takes_memory(tmp_path, sizes, why):
    config = json.loads(model.SMALL.to_json())
    config["shapes"] |= sizes
    net = model.TinyK3(model.SMALL)
    tensors = {name: x.contiguous() for name, x in net.state_dict().items()}
    save_file(tensors, tmp_path / "w.safetensors", {"format": model.FORMAT, "config": json.dumps(config)})
    with pytest.raises(BadInput, match=why):
        model.load(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "change",
    [{"correct": 5, "total": 4}, {"total": 0}, {"correct": {}}, {"p": "x"}, {"p": 2}, {"route": []}, {"expected_correct": None},
     {"exposures_per_request": {"median": "many"}}, {"correct": -1}, {"total": 10**400}],
)  # fmt: skip
def test_an_accuracy_record_with_impossible_counts_is_refused(tmp_path, change):
    record = json.loads((ROOT / "data" / "accuracy.json").read_text())
    record["rows"][0] |= change
    (tmp_path / "a.json").write_text(json.dumps(record))
    with pytest.raises(BadInput, match="not an accuracy record"):
        accuracy.load(tmp_path / "a.json")
