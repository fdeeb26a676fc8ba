"""The speculative walk: the same output as plain decoding, counts that add up, state rolled back to the accepted token."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

from k3lab.drafter import speculate as walk
from k3lab.drafter.acceptance import check_counts
from k3lab.drafter.counts import KEYS, anchor_acceptance, load_prompts, walk_counts
from k3lab.drafter.dflash import DFlash, DFlashConfig, features, load
from k3lab.drafter.speculate import distribution, generate, pick, rejection_sample, speculate
from k3lab.errors import BadInput
from k3lab.testing import assert_within_budget
from k3lab.tiny import data, model, serving
from k3lab.tiny.batch import Batch, Cache, KdaStep, rollback

DATA = Path(__file__).resolve().parent.parent / "data"
WEIGHTS = DATA / "tiny_k3.safetensors"
TAPS, BLOCK, K = (1, 2), 8, 7  # with offsets -1, 0, +1 inside the five layers
LENGTHS = [1, 63, 64, 65, 20, 7]
pytestmark = pytest.mark.usefixtures("one_thread")
MAX_NEW = 26


@pytest.fixture(scope="module")
def net() -> model.TinyK3:
    """A small float64 model with every parameter moved far off its start, so that its greedy texts do not run into loops."""
    torch.manual_seed(0)
    m = model.TinyK3(model.SMALL).double().eval().requires_grad_(False)
    for p in m.parameters():
        p += 0.5 * p.abs().mean().clamp(min=0.2) * torch.randn_like(p)
    m.head.weight *= 3
    return m


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    gen = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=gen) for n in LENGTHS]


@pytest.fixture(scope="module")
def plain(net, prompts) -> list[list[int]]:
    """The greedy continuations, longer than any test asks for."""
    return generate(net, prompts, max_new=MAX_NEW + BLOCK)[0]


class Stub:
    """A drafter with given logits [B, k, VOCAB] of (context, last tokens, anchors); its context is the raw features."""

    def __init__(self, logits: Callable[[Tensor, list[int], list[int]], Tensor]):
        self.logits = logits
        self.config = SimpleNamespace(taps=TAPS, block=BLOCK, hidden=model.SMALL.shapes.hidden)

    def parameters(self):
        return iter(())

    def context(self, rows: Tensor) -> Tensor:
        return rows.flatten(-2)

    def __call__(self, target, context, last_tokens, anchors) -> Tensor:
        return self.logits(context, last_tokens[:, 0].tolist(), anchors[:, 0].tolist())[:, None].to(context.dtype)


def certain(ids: list[list[int]]) -> Tensor:
    return 50.0 * torch.nn.functional.one_hot(torch.tensor(ids), model.VOCAB).double()


def knowing(net, prompts, plain, stream="mixture", offset=0, wrong=lambda text, position: False) -> Stub:
    """Drafts what plain decoding gives, except where wrong(text, position). It tells the texts apart by its context, and fails unless
    that is exactly the teacher-forced features of the text's tokens below the anchor."""
    texts = [torch.cat([p, torch.tensor(c)]) for p, c in zip(prompts, plain, strict=True)]
    known = []
    for text in texts:
        collect = model.new_collect()
        net(text[None], collect)
        known.append(features(collect, TAPS, stream, offset)[0].flatten(-2))

    def logits(context, last, anchors) -> Tensor:
        ids = []
        for fed, token, a in zip(context, last, anchors, strict=True):
            off = [float((fed[:a] - k[:a]).abs().max()) if len(k) > a else float("inf") for k in known]
            i = off.index(min(off))
            assert off[i] < 1e-9, "features of other tokens, or from another layer or stream"
            assert token == texts[i][a]
            right = [*texts[i][a + 1 : a + BLOCK].tolist(), *[0] * K][:K]
            ids.append([(t + 1) % 256 if wrong(i, a + 1 + j) else t for j, t in enumerate(right)])
        return certain(ids)

    return Stub(logits)


def random_logits(width: float) -> Stub:
    """Knows nothing, fresh logits each round; BOS and MASK are its favourites, and must never be drafted."""
    gen = torch.Generator().manual_seed(0)

    def logits(context, last, anchors) -> Tensor:
        x = width * torch.randn(len(anchors), K, model.VOCAB, generator=gen, dtype=torch.float64)
        x[..., model.BOS :] = 99.0
        return x

    return Stub(logits)


def dflash(target: model.TinyK3) -> DFlash:
    torch.manual_seed(2)
    config = DFlashConfig(taps=TAPS, block=BLOCK, layers=2, heads=2, mlp_width=64, hidden=target.config.shapes.hidden)
    return DFlash(config).to(target.embed.weight.dtype).eval().requires_grad_(False)


def now_and_then(text: int, position: int) -> bool:
    return (7 * position + 3 * text) % (3 + text) == 0


DRAFTERS = {
    "oracle": lambda *known: knowing(*known),
    "always wrong": lambda *known: knowing(*known, wrong=lambda text, position: True),
    "wrong now and then": lambda *known: knowing(*known, wrong=now_and_then),
    "random": lambda *known: random_logits(5.0),
    "NaN": lambda *known: Stub(lambda context, last, anchors: torch.full((len(last), K, model.VOCAB), float("nan"))),
    "DFlash": lambda net, *rest: dflash(net),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_plain_decoding_token_for_token(net, prompts, plain, drafter):
    """Ragged prompts that end at different times, by stop and by length: the same tokens and reasons, whatever is drafted (float64)."""
    stop = bytes(plain[2][10:12])
    want = generate(net, prompts, max_new=MAX_NEW, stop=stop)
    assert set(want[1]) == {"stop", "length"}
    for max_seqs in (64, 4):
        drafted = DRAFTERS[drafter](net, prompts, plain)
        got = speculate(net, drafted, prompts, max_new=MAX_NEW, stop=stop, stream="mixture", max_seqs=max_seqs)
        assert (got.tokens, got.reasons) == want


@pytest.mark.parametrize("stream", ["prefix", "mixture"])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_drafter_is_fed_the_stream_and_layers_asked_for(net, prompts, plain, stream, offset):
    """Its context is that of a teacher-forced forward over the emitted tokens, after rejected drafts too (the stub asserts it)."""
    drafter = knowing(net, prompts, plain, stream, offset, now_and_then)
    got = speculate(net, drafter, prompts, max_new=MAX_NEW, stream=stream, offset=offset)
    assert got.counts.accepted.min() > 0


def test_plain_decoding_is_what_the_serving_loop_gives(net, prompts):
    """generate against the continuous-batching loop, stop strings included."""
    first = generate(net, prompts, max_new=MAX_NEW)[0]
    assert len({tuple(t) for t in first}) == len(first)
    assert min(len(set(t)) for t in first) > 10, "a model that repeats itself tests nothing"
    stop = bytes(first[3][7:9])
    tokens, reasons = generate(net, prompts, max_new=MAX_NEW, stop=stop, max_seqs=2)
    outputs, _ = serving.serve(net, prompts, max_new=MAX_NEW, stop=stop)
    assert tokens == [o.tokens for o in outputs]
    assert reasons == [o.reason for o in outputs]


@pytest.mark.parametrize("weights", ["small", "shipped"])
def test_float32_differs_only_at_a_near_tie(net, prompts, weights):
    """In float32, where the texts part, if at all, plain decoding had two bytes within its own rounding error of each other."""
    if weights == "small":
        truth, new = net, MAX_NEW
        low = model.TinyK3(model.SMALL).eval().requires_grad_(False)
        low.load_state_dict(net.state_dict())
        drafter = by_last_token(generate(net, prompts, max_new=MAX_NEW)[0])
    else:
        truth, low, new = model.load(WEIGHTS, dtype=torch.float64), model.load(WEIGHTS), 12
        prompts = [p.tokens for p in data.arithmetic_prompts(2, seed=5, max_shots=0)]
        torch.manual_seed(0)
        drafter = DFlash().eval().requires_grad_(False)
    plain = generate(low, prompts, max_new=new)[0]
    got = speculate(low, drafter, prompts, max_new=new, stream="prefix").tokens
    for prompt, a, b in zip(prompts, plain, got, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            text = torch.cat([prompt, torch.tensor(a[:at])])[None]
            x, true = low(text)[0, -1], truth(text)[0, -1]
            assert abs(float(true[a[at]] - true[b[at]])) <= 4 * float((x - true).abs().max())
    assert sum(a == b for a, b in zip(plain, got, strict=True)) >= len(prompts) - 1


def test_counts_of_known_drafters(net, prompts, plain):
    """Oracle: every round accepts all and adds a bonus; always wrong: one token a round. The token limit cuts tokens, not counts."""
    rounds = -(-(MAX_NEW - 1) // BLOCK)
    oracle = speculate(net, knowing(net, prompts, plain), prompts, max_new=MAX_NEW, stream="mixture").counts
    assert (oracle.drafts == rounds).all()
    assert (oracle.drafted == K * rounds).all()
    assert (oracle.accepted == K * rounds).all()
    assert (oracle.emitted == BLOCK * rounds).all()
    assert (oracle.filter(like="accepted_") == rounds).all(axis=None)
    wrong = speculate(net, DRAFTERS["always wrong"](net, prompts, plain), prompts, max_new=MAX_NEW, stream="mixture").counts
    assert (wrong.drafts == MAX_NEW - 1).all()
    assert (wrong.emitted == MAX_NEW - 1).all()
    assert (wrong.filter(like="accepted") == 0).all(axis=None)


def test_counts_are_those_of_the_teacher_forced_table(net, prompts, plain):
    """The walk against counts that never walk: accepted drafts of every anchor from one forward, then a table walk."""
    torch.manual_seed(3)
    drafter = dflash(net)
    for p in drafter.parameters():
        p += 0.3 * torch.randn_like(p)
    net.head.weight[65] *= 4  # both like one byte then, so that an untrained drafter is right now and then
    try:
        got = speculate(net, drafter, prompts, max_new=MAX_NEW, stream="prefix", offset=1)
        texts = generate(net, prompts, max_new=MAX_NEW + BLOCK)[0]
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            tokens, collect = torch.cat([prompt, torch.tensor(text)])[None], model.new_collect()
            net(tokens, collect)
            table = anchor_acceptance(drafter, net, tokens, len(prompt), MAX_NEW, features(collect, TAPS, "prefix", 1))
            for name, value in walk_counts(table, BLOCK).items():
                assert got.counts[name][i] == value[0], (i, name)
    finally:
        net.head.weight[65] /= 4
    assert got.counts.accepted.sum() > 0


def test_shipped_counts_are_what_the_walk_gives():
    """data/drafter_counts.csv, counted without walking on another device, against a walk of the shipped drafter on shipped prompts."""
    stored, drafter = load_prompts(DATA / "drafter_prompts.safetensors"), load(DATA / "drafter_mixture.safetensors", target=WEIGHTS)
    ids = [i for i, domain in enumerate(stored.domain) if domain == "arithmetic"][:2]
    texts = stored.tokens[ids].split([stored.prompt_len, stored.tokens.shape[1] - stored.prompt_len], 1)
    got = speculate(model.load(WEIGHTS), drafter, list(texts[0]), max_new=stored.new_tokens, stream="mixture")
    assert got.tokens == texts[1][:, : stored.new_tokens].tolist()
    frame = pd.read_csv(DATA / "drafter_counts.csv")
    key = (frame.drafter == "mixture") & (frame.seed == drafter.origin.seed) & (frame.stream == "mixture") & (frame.offset == 0)
    columns = got.counts.columns[3:].tolist()
    assert frame[key].set_index("prompt").loc[ids, columns].values.tolist() == got.counts[columns].values.tolist()


def test_counts_frame_has_the_one_schema(net, prompts, plain):
    """Key columns in order, whole numbers, the identities of acceptance.check_counts, rounds that sum to them, zeros without a round."""
    drafter = knowing(net, prompts, plain, wrong=now_and_then)
    keys = {"drafter": "mixture", "seed": 1, "domain": ["code", "prose"] * 3}
    got = speculate(net, drafter, prompts, max_new=MAX_NEW, stream="mixture", keys=keys)
    assert got.counts.columns.tolist() == [*KEYS, "drafts", "drafted", "accepted", "emitted", *(f"accepted_{j}" for j in range(K))]
    assert got.counts.domain.tolist() == keys["domain"]
    assert got.counts.prompt.tolist() == list(range(len(prompts)))
    check_counts(got.counts)
    assert (got.counts.drop(columns=["drafter", "stream", "domain"]).dtypes == np.int64).all()
    assert got.rounds.groupby("prompt").emitted.sum().tolist() == got.counts.emitted.tolist()
    assert (got.rounds.groupby("prompt").anchor.min() == LENGTHS).all()
    none = speculate(net, drafter, prompts, max_new=1, stream="mixture")
    assert [len(t) for t in none.tokens] == [1] * len(prompts)
    assert none.rounds.empty
    assert (none.counts.drop(columns=["stream", "offset", "prompt"]) == 0).all(axis=None)
    assert none.counts.accepted_0.dtype == np.int64


@pytest.mark.parametrize(
    ("ends_at", "max_new", "rounds", "accepted", "emitted", "reason"),
    [
        (1, 20, 0, 0, 0, "stop"),  # the prompt's own step gave it: no round at all
        (4, 20, 1, 3, 3, "stop"),  # inside the accepted prefix: what follows is not accepted, and no bonus
        (8, 20, 1, 7, 7, "stop"),  # by the last draft: no bonus
        (9, 20, 1, 7, 8, "stop"),  # by the bonus
        (10, 20, 2, 8, 9, "stop"),  # by the first draft of the second round
        (8, 5, 1, 7, 7, "length"),  # behind the token limit, in the same round: counts stop there, tokens are cut
        (17, 5, 1, 7, 8, "length"),
    ],
)
def test_stop_string_inside_a_round(net, prompts, plain, ends_at, max_new, rounds, accepted, emitted, reason):
    """Token ends_at (1-based) completes the stop string; token 1 comes from the prompt's step, a round of the oracle gives 8."""
    prompt, text = prompts[:1], plain[0]
    stop = bytes(text[ends_at - 1 : ends_at]) if ends_at == 1 else bytes(text[ends_at - 2 : ends_at])
    assert bytes(text).find(stop) + len(stop) == ends_at, "the stop string must not stand earlier"
    got = speculate(net, knowing(net, prompt, [text]), prompt, max_new=max_new, stop=stop, stream="mixture")
    assert got.counts[["drafts", "accepted", "emitted"]].iloc[0].tolist() == [rounds, accepted, emitted]
    assert got.counts.filter(like="accepted_").sum(axis=None) == accepted
    assert got.tokens == [text[: min(ends_at, max_new)]]
    assert got.reasons == [reason]
    assert (got.tokens, got.reasons) == generate(net, prompt, max_new=max_new, stop=stop)


def speculative_step(net, prompts, rows: Tensor, undo: bool, kept: Tensor) -> Cache:
    """A cache after the prompts, one speculative step over rows [N, 8], and the rollback to the first kept [N] of them."""
    slots = list(range(1, len(prompts) + 1))
    cache = net.new_cache(len(prompts) + 1, 100)
    net.step(Batch(torch.cat(prompts), LENGTHS, slots, [0] * len(prompts)), cache)
    steps: list[KdaStep] = []
    batch = Batch(rows.flatten(), [BLOCK] * len(slots), slots, LENGTHS, spec_mask=torch.ones(len(slots), dtype=torch.bool))
    net.step(batch, cache, "gather_split", hook=steps.append)
    if undo:
        rollback(cache, steps, kept)
    return cache


def plain_steps(net, prompts, rows: Tensor, kept: Tensor) -> Cache:
    """The same rows, the kept ones alone, one decode at a time."""
    slots = list(range(1, len(prompts) + 1))
    cache = net.new_cache(len(prompts) + 1, 100)
    net.step(Batch(torch.cat(prompts), LENGTHS, slots, [0] * len(prompts)), cache)
    for j in range(int(kept.max())):
        live = [i for i in range(len(slots)) if j < kept[i]]
        net.step(Batch(rows[live, j], [1] * len(live), [slots[i] for i in live], [LENGTHS[i] + j for i in live], len(live)), cache)
    return cache


def states(cache: Cache) -> dict[str, Tensor]:
    return {
        f"{name}, layer {i}": x
        for name, part in (("recurrent", cache.recurrent), ("conv", cache.conv))
        for i, x in enumerate(part)
        if x is not None
    }


KEPT = torch.tensor([1, 2, 3, 4, 7, 8])  # no draft accepted .. all of them; fewer rows than the conv state holds, and more


def test_rolled_back_state_is_that_of_decoding_the_kept_tokens(net, prompts):
    """Recurrent and conv state of every layer, float64; and in float32 within twice the error of plain float32 decoding."""
    rows = torch.randint(0, 256, (len(prompts), BLOCK), generator=torch.Generator().manual_seed(4))
    truth = states(plain_steps(net, prompts, rows, KEPT))
    got = states(speculative_step(net, prompts, rows, True, KEPT))
    for name, x in truth.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-9, msg=name)
        assert float(got[name][0].abs().max()) == 0, "the null slot"
    low_net = model.TinyK3(model.SMALL).eval().requires_grad_(False)
    low_net.load_state_dict(net.state_dict())
    low = states(plain_steps(low_net, prompts, rows, KEPT))
    for name, x in states(speculative_step(low_net, prompts, rows, True, KEPT)).items():
        assert_within_budget(name, x, truth[name], low[name], torch.float32)


def test_without_rollback_the_state_is_another(net, prompts):
    """The comparison above can fail: every sequence but the one that keeps all rows, in every layer."""
    rows = torch.randint(0, 256, (len(prompts), BLOCK), generator=torch.Generator().manual_seed(4))
    truth = states(plain_steps(net, prompts, rows, KEPT))
    for name, x in states(speculative_step(net, prompts, rows, False, KEPT)).items():
        off = (x - truth[name])[1:].flatten(1).abs().amax(1)
        assert (off > 1e-3).tolist() == [True] * 5 + [False], name


def by_last_token(plain) -> Stub:
    """Drafts what once followed the last token: often right, and never by a look at the context."""
    follow = {t[i]: t[i + 1 : i + BLOCK] for t in plain for i in range(len(t) - K)}
    return Stub(lambda context, last, anchors: certain([follow.get(x, [0] * K) for x in last]))


def test_the_unbroken_rollback_passes_where_mutants_fail(net, prompts, plain):
    """The drafter of the mutants below, with the real rollback: plain decoding's tokens, some drafts accepted and some not."""
    got = speculate(net, by_last_token(plain), prompts, max_new=MAX_NEW, stream="mixture")
    assert got.tokens == [t[:MAX_NEW] for t in plain]
    assert 0 < got.counts.accepted.sum() < got.counts.drafted.sum()


@pytest.mark.parametrize("mutant", ["none", "one row short", "recurrent only", "conv only"])
def test_a_wrong_rollback_changes_the_output(net, prompts, plain, monkeypatch, mutant):
    """Each half of the rollback is needed for lossless output."""

    def wrong(cache, steps, kept):
        before = cache.clone()
        rollback(cache, steps, (kept - 1).clamp(min=1) if mutant == "one row short" else kept)
        for i in range(len(cache.conv)):
            if mutant in ("none", "conv only"):
                cache.recurrent[i] = before.recurrent[i]
            if mutant in ("none", "recurrent only"):
                cache.conv[i] = before.conv[i]

    monkeypatch.setattr(walk, "rollback", wrong)
    got = speculate(net, by_last_token(plain), prompts, max_new=MAX_NEW, stream="mixture")
    assert got.tokens != [t[:MAX_NEW] for t in plain]


def test_rollback_refuses_what_it_has_no_state_for(net, prompts):
    """More rows than the step had, none at all, a plain step: BadInput, and the cache as it was."""
    cache, steps = net.new_cache(2, 100), []
    net.step(Batch(prompts[4], [20], [1], [0], spec_mask=torch.tensor([True])), cache, "gather_split", hook=steps.append)
    before = states(cache.clone())
    for kept in ([0], [21], [1, 1]):
        with pytest.raises(BadInput, match="kept"):
            rollback(cache, steps, torch.tensor(kept))
    plain: list[KdaStep] = []
    net.step(Batch(prompts[4], [20], [1], [0]), net.new_cache(2, 100), hook=plain.append)
    with pytest.raises(BadInput, match="speculative"):
        rollback(cache, plain, torch.tensor([3]))
    assert all(torch.equal(x, before[name]) for name, x in states(cache).items())


P = torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.1, 0.1, 0.1, 0.6], [0.0, 0.3, 0.3, 0.4, 0.0]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.5, 0.1, 0.1, 0.1], [0.4, 0.1, 0.1, 0.2, 0.2]], dtype=torch.float64)


def uncorrected(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The classic mistake: after a rejection the bonus is drawn from p itself."""
    accepted, _ = rejection_sample(p, q, drafts, u)
    return accepted, pick(p[torch.arange(len(p)), accepted], u[:, -1])


def greedy_acceptance(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Another: a draft is accepted with probability p(x), without the division by q(x)."""
    return rejection_sample(p, torch.ones_like(q), drafts, u)


@pytest.mark.parametrize(("sampler", "fair"), [(rejection_sample, True), (uncorrected, False), (greedy_acceptance, False)])
def test_rejection_sampler_leaves_the_targets_distribution(sampler, fair):
    """Chi-square of each emitted token against p over 5 ids and 2 drafts, 100,000 rounds at a fixed seed; biased samplers fail it."""
    n = 100_000
    u = torch.rand(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = Q.expand(n, -1, -1)
    drafts = pick(q, u[:, :2])
    accepted, bonus = sampler(P.expand(n, -1, -1), q, drafts, u[:, 2:])
    emitted = torch.cat([drafts, bonus[:, None]], 1).scatter(1, accepted[:, None], bonus[:, None])
    # token j is emitted by the rounds that accepted the j before it, and must then be distributed as p_j
    p_values = []
    for j in range(3):
        seen = torch.bincount(emitted[accepted >= j, j], minlength=5).double()
        possible = P[j] > 0
        off = bool(seen[~possible].any())
        p_values.append(0.0 if off else chisquare(seen[possible], P[j][possible] * seen.sum()).pvalue)
    assert (min(p_values) > 1e-3) == fair, p_values
    if fair:
        rate = float((accepted > 0).double().mean())
        expected = float(torch.minimum(P[0], Q[0]).sum())
        assert abs(rate - expected) < 4 * (expected * (1 - expected) / n) ** 0.5


@given(st.lists(st.sampled_from([0.0, 5e-324, 1e-300, 0.1, 1.0, 3.0]), min_size=1, max_size=6), st.floats(0, 1, exclude_max=True))
def test_pick_never_gives_an_id_of_weight_zero(weights, u):
    """Any weights with a positive sum, any u in [0, 1), its largest value below 1 included."""
    if sum(weights) == 0:
        weights[0] = 1.0
    for v in (u, 0.0, 1 - 2**-53):
        i = int(pick(torch.tensor(weights, dtype=torch.float64), torch.tensor(v, dtype=torch.float64)))
        assert weights[i] > 0


def test_equal_disjoint_and_certain_distributions():
    """p = q accepts everything; disjoint ones accept nothing and emit from p; one-hot ones decide as greedy decoding does."""
    u = torch.full((1, 3), 1 - 2**-53, dtype=torch.float64)
    same = P[None, [0, 1, 2]]
    assert rejection_sample(same, same[:, :2], torch.tensor([[2, 4]]), u)[0].tolist() == [2]
    hot = torch.eye(5, dtype=torch.float64)
    for drafts, accepted, bonus in (([3, 1], 2, 4), ([3, 0], 1, 1), ([0, 1], 0, 3)):
        m, b = rejection_sample(hot[None, [3, 1, 4]], hot[None, drafts], torch.tensor([drafts]), 0 * u)
        assert (m.item(), b.item()) == (accepted, bonus)


def test_distribution_over_bytes():
    """Softmax at a temperature, without BOS and MASK; one-hot at temperature 0, for NaN (id 0) and +inf; nearly 0 is greedy."""
    x = torch.randn(4, model.VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, model.BOS :] = 50.0
    torch.testing.assert_close(distribution(x, 0.7), (x[:, :256] / 0.7).softmax(-1))
    x[1, model.MASK], x[2, 7], x[3] = float("nan"), float("inf"), -float("inf")
    best = [int(x[0, :256].argmax()), 0, 7, 0]
    for temperature in (0.0, 1e-300):
        assert distribution(x, temperature).argmax(-1).tolist() == best
        assert distribution(x, temperature).amax(-1).tolist() == [1.0] * 4
    assert distribution(x, 1.0)[1:].argmax(-1).tolist() == best[1:]


def second_token_law(net, prompt: Tensor, temperature: float) -> Tensor:
    """P(second token) exactly: every first byte, through the model, by its probability."""
    first = distribution(net(prompt[None])[:, -1], temperature)[0]
    pairs = torch.cat([prompt.expand(256, -1), torch.arange(256)[:, None]], 1)
    return first @ distribution(net(pairs)[:, -1], temperature)


def merged(counts: Tensor, expected: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Ids in order of expected counts, the rare ones together, as the chi-square test asks for (5 or more in a bin)."""
    order = expected.argsort(descending=True)
    common = order[expected[order] >= 5]
    rest = order[len(common) :]
    return tuple(np.append(x[common].numpy(), float(x[rest].sum())) for x in (counts.double(), expected))


@pytest.mark.parametrize(("sampler", "fair"), [(rejection_sample, True), (uncorrected, False)])
def test_sampled_output_has_the_distribution_of_plain_decoding(net, monkeypatch, sampler, fair):
    """600 copies of a prompt: the second token against its exact law, the third against plain decoding; a biased sampler fails."""
    monkeypatch.setattr(walk, "rejection_sample", sampler)
    prompt, n, temperature = torch.tensor([model.BOS, 65]), 600, 0.6
    law = second_token_law(net, prompt, temperature)
    # right about what is likely, wrong by how much, and always in favour of the same bytes
    tilt = 1.3 * torch.randn(model.VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fixed = (torch.nn.functional.pad(law, (0, 2)) + 1e-6).log() + tilt
    drafter = Stub(lambda context, last, anchors: fixed.expand(len(anchors), K, -1))
    options = dict(max_new=3 if fair else 2, temperature=temperature, max_seqs=300)
    got = speculate(net, drafter, [prompt] * n, stream="mixture", seed=1, **options)
    counts = [torch.bincount(torch.tensor([t[i] for t in got.tokens]), minlength=256) for i in range(options["max_new"])]
    p_second = chisquare(*merged(counts[1], n * law)).pvalue
    assert (p_second > 1e-3) == fair, p_second
    second = got.rounds[got.rounds.anchor == len(prompt)]
    assert 0.1 < (second.accepted > 0).mean() < 0.9, "both branches of the rule must be taken"
    if fair:
        plain = generate(net, [prompt] * n, seed=2, **options)[0]
        third = torch.bincount(torch.tensor([t[2] for t in plain]), minlength=256)
        assert chi2_contingency(merged(counts[2], third.double())).pvalue > 1e-3


def test_a_prompts_draws_are_its_own(net, prompts):
    """Sampled tokens depend on seed and place in the list, not on who shares the step; another seed gives others."""
    options = dict(max_new=8, temperature=1.0)
    for decode in (
        lambda **o: generate(net, prompts, **options, **o)[0],
        lambda **o: speculate(net, dflash(net), prompts, stream="prefix", **options, **o).tokens,
    ):
        together = decode(max_seqs=64)
        assert decode(max_seqs=1) == together
        assert decode(seed=1) != together


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_the_stream_of_zeros_that_plain_decoding_gives(net, prompts, temperature):
    """A byte whose embedding is NaN: zeros for the prompt that holds it; and drafts of it, rejected, leave no trace in the others."""
    bad = 200
    fed = [p.where(p != bad, torch.tensor(0)) for p in prompts]
    fed[1] = torch.cat([fed[1], torch.tensor([bad, 3])])
    kept = net.embed.weight[bad].clone()
    drafter = Stub(lambda context, last, anchors: certain([[bad if j % 2 == a % 2 else 7 for j in range(K)] for a in anchors]))
    try:
        net.embed.weight[bad] = float("nan")
        want = generate(net, fed, max_new=12, temperature=temperature)
        got = speculate(net, drafter, fed, max_new=12, temperature=temperature, stream="mixture")
    finally:
        net.embed.weight[bad] = kept
    assert got.tokens[1] == want[0][1] == [0] * 12
    if temperature == 0:
        assert not any(bad in t for t in want[0])
        assert (got.tokens, got.reasons) == want


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": [torch.tensor([1]), torch.tensor([], dtype=torch.long)]}, "prompts: number 1"),
        ({"prompts": [torch.tensor([[1, 2]])]}, "prompts: number 0"),
        ({"prompts": [torch.tensor([1.0])]}, "prompts: number 0"),
        ({"prompts": ["text"]}, "prompts: number 0 is str"),
        ({"prompts": [torch.tensor([300])]}, "outside 0..257"),
        ({"max_new": 0}, "max_new"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"stream": "aux"}, "stream"),
        ({"offset": -2}, "taps"),
        ({"offset": 3}, "taps"),
        ({"keys": {"engine": "x"}}, "keys"),
        ({"drafter": DFlash(DFlashConfig(taps=TAPS, hidden=32, heads=2))}, "hidden size 32"),
        ({"drafter": DFlash(DFlashConfig(taps=TAPS, hidden=64, heads=2))}, "float32"),
    ],
)
def test_bad_input_is_one_clear_error(net, change, named):
    good = dict(drafter=random_logits(1.0), prompts=[torch.tensor([1, 2])], max_new=2, stream="mixture")
    options = {**good, **change}
    with pytest.raises(BadInput, match=named):
        speculate(net, **options)
    if set(change) & {"prompts", "max_new", "temperature", "seed", "max_seqs"}:
        with pytest.raises(BadInput, match=named):
            generate(net, **{k: v for k, v in options.items() if k not in ("drafter", "stream")})
