"""Acceptance: identities of the ratios, intervals that cover, pairs, seeds, the guard against loops, published figures with their cards."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap

from k3lab.drafter import acceptance
from k3lab.drafter.acceptance import beside_low_repetition, compare, over_seeds, summarize, uniqueness
from k3lab.drafter.published import PUBLISHED, published, published_streams
from k3lab.errors import BadInput
from k3lab.provenance import sha256

KEYS = ["drafter", "seed", "stream", "offset"]


def row(accepted: list[int], k: int, **keys) -> dict:
    """A prompt's counts from the number of drafts accepted in each of its rounds."""
    n = np.asarray(accepted, dtype=int)
    counts = {"drafts": len(n), "drafted": k * len(n), "accepted": int(n.sum()), "emitted": int(n.sum()) + len(n)}
    return {**keys, **counts, **{f"accepted_{j}": int((n > j).sum()) for j in range(k)}}


def walk(rng: np.random.Generator, rate, prompts: int, rounds: int = 30, k: int = 3, **keys) -> pd.DataFrame:
    """Prompts whose drafts are accepted independently with a rate of the prompt's own, rate(prompt)."""
    hit = rng.random((prompts, rounds, k)) < np.array([rate(p) for p in range(prompts)])[:, None, None]
    accepted = hit.cumprod(-1).sum(-1)
    return pd.DataFrame([row(a, k, **keys, prompt=p) for p, a in enumerate(accepted)])


def value(summary: pd.DataFrame, metric: str, position: int | None = None, column: str = "value"):
    rows = summary[(summary["metric"] == metric) & (summary["position"].isna() if position is None else summary["position"] == position)]
    assert len(rows) == 1
    return rows[column].item()


def test_ratios_of_summed_counts_by_hand():
    """Prompts of unequal length: counts are summed before the division; a mean of prompt means would be 2.75."""
    counts = pd.DataFrame([row([3, 0, 1, 1], 3, prompt=0), row([3, 2], 3, prompt=1)])
    got = summarize(counts)
    assert value(got, "mean_emitted") == 16 / 6
    assert value(got, "mean_accepted") == 10 / 6
    assert value(got, "acceptance_rate") == 10 / 18
    assert [value(got, "survival", j) for j in range(3)] == [5 / 6, 3 / 6, 2 / 6]
    assert [value(got, "conditional", j) for j in range(3)] == [5 / 6, 3 / 5, 2 / 3]
    assert value(got, "survival", 0, "prompts") == 2
    assert value(got, "survival", 0, "drafts") == 6


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 7), max_size=12), min_size=1, max_size=6))
def test_identities(rounds):
    """Survival falls, is the product of the conditional rates, and 1 + its sum is the mean; intervals hold their value and order."""
    got = summarize(pd.DataFrame([row(r, 7, prompt=p) for p, r in enumerate(rounds)]), resamples=60)
    survival, conditional = (got[got["metric"] == m]["value"].to_numpy(float) for m in ("survival", "conditional"))
    if not any(rounds):
        assert got["value"].isna().all()
        return
    assert (np.diff(survival) <= 0).all()
    reached = ~np.isnan(conditional)
    np.testing.assert_allclose(survival[reached], np.cumprod(conditional[reached]))
    assert (survival[~reached] == 0).all()
    assert value(got, "mean_emitted") == pytest.approx(1 + survival.sum())
    assert value(got, "mean_accepted") == pytest.approx(survival.sum())
    known = got.dropna(subset=["low", "high"])
    assert (known["low"] <= known["high"]).all()
    means = [1 + np.mean(r) for r in rounds if r]
    if len(rounds) > 1 and not np.isnan(value(got, "mean_emitted", column="low")):
        assert min(means) - 1e-9 <= value(got, "mean_emitted", column="low")
        assert value(got, "mean_emitted", column="high") <= max(means) + 1e-9


def test_stop_inside_an_accepted_prefix_leaves_no_bonus():
    """A round cut by a stop string emits fewer than accepted + 1; the mean is then below 1 + the sum of survival."""
    cut = row([2, 1], 3, prompt=0) | {"emitted": 4}
    got = summarize(pd.DataFrame([cut]))
    assert value(got, "mean_emitted") == 2.0
    assert value(got, "mean_accepted") == 1.5


def test_interval_is_that_of_scipy():
    """The weighted product gives the percentile interval of scipy.stats.bootstrap, up to the noise of the resamples."""
    counts = walk(np.random.default_rng(3), lambda p: 0.4 + 0.4 * (p % 3 == 0), 64)
    emitted, drafts = (counts[c].to_numpy() for c in ("emitted", "drafts"))
    ours = summarize(counts, resamples=8000)
    theirs = bootstrap(
        (np.arange(64),), lambda i, axis: emitted[i].sum(axis) / drafts[i].sum(axis), n_resamples=8000, method="percentile",
        vectorized=True, rng=np.random.default_rng(0),
    )  # fmt: skip
    ends = [value(ours, "mean_emitted", column=c) for c in ("low", "high")]
    np.testing.assert_allclose(ends, theirs.confidence_interval, atol=0.1 * theirs.standard_error)


def test_interval_over_prompts_covers_where_one_over_tokens_does_not():
    """Prompts of unlike difficulty: 95% intervals over prompts cover the true rate about 95% of the time, binomial ones far less."""
    rng = np.random.default_rng(11)
    runs, prompts, rounds = 300, 48, 40
    rate = rng.beta(3, 2, (runs, prompts))  # mean 0.6
    accepted = rng.binomial(rounds, rate)
    counts = pd.DataFrame({"run": np.repeat(range(runs), prompts), "prompt": np.tile(range(prompts), runs), "drafts": rounds,
                           "drafted": rounds, "accepted": accepted.ravel(), "emitted": accepted.ravel() + rounds,
                           "accepted_0": accepted.ravel()})  # fmt: skip
    got = summarize(counts, ["run"], resamples=1000)
    got = got[got["metric"] == "survival"]
    over_prompts = ((got["low"] < 0.6) & (got["high"] > 0.6)).mean()
    p = accepted.sum(1) / (prompts * rounds)
    half = 1.96 * np.sqrt(p * (1 - p) / (prompts * rounds))
    over_tokens = (np.abs(p - 0.6) < half).mean()
    assert 0.91 <= over_prompts <= 0.98  # 0.95 within three standard errors of 300 runs
    assert over_tokens < 0.65


def test_same_seed_same_interval_whatever_else_is_in_the_frame():
    rng = np.random.default_rng(0)
    a, b = (walk(rng, lambda p: 0.5, 20, domain=d) for d in ("code", "prose"))
    both = summarize(pd.concat([a, b]), ["domain"], seed=5)
    pd.testing.assert_frame_equal(both[both["domain"] == "code"].drop(columns="domain"), summarize(a, seed=5))
    one, other = summarize(a, seed=5), summarize(a, seed=6)
    assert not one["low"].equals(other["low"])
    assert one["value"].equals(other["value"])


def test_prompts_are_numbered_within_a_domain_and_rows_of_one_are_summed():
    parts = [pd.DataFrame([row([1, 1], 2, domain=d, prompt=p) for p in range(3)]) for d in ("code", "prose")]
    counts = pd.concat([*parts, parts[0]], ignore_index=True)
    got = summarize(counts)
    assert value(got, "mean_emitted", column="prompts") == 6
    assert value(got, "mean_emitted", column="drafts") == 18


@pytest.mark.parametrize(
    "counts",
    [
        pd.DataFrame([row([3, 1], 3, prompt=0)]),
        pd.DataFrame([row([], 3, prompt=0), row([], 3, prompt=1)]),
        pd.DataFrame([row([3, 1], 3, source="log", line=n) for n in range(9)]),
    ],
    ids=["one prompt", "no drafts", "a log without prompts"],
)
def test_degenerate_groups_have_no_interval(counts):
    got = summarize(counts)
    assert got[["low", "high"]].isna().all(axis=None)
    assert got["value"].isna().all() == (counts["drafts"].sum() == 0)


def test_rows_of_a_long_log_are_summed_without_resampling(monkeypatch):
    """A log of 50 MB has hundreds of thousands of rows: drawing weights for them would take minutes and mean nothing."""
    monkeypatch.setattr(acceptance.np.random, "default_rng", None)
    counts = pd.DataFrame([row([3, 1], 3, source="log", line=n) for n in range(20)])
    assert value(summarize(counts), "mean_emitted", column="drafts") == 40


def test_ratio_that_most_resamples_leave_undefined_has_no_interval():
    """Only one prompt of eight ever reaches position 1: its conditional rate there is undefined in a third of the resamples."""
    counts = pd.DataFrame([row([0, 0], 2, prompt=p) for p in range(7)] + [row([1, 2], 2, prompt=7)])
    got = summarize(counts)
    assert value(got, "conditional", 1) == 0.5
    assert np.isnan(value(got, "conditional", 1, "low"))
    assert value(got, "survival", 1, "low") == 0


def test_missing_counts_stay_missing():
    """SGLang prints no positions: their survival is unknown, not 0; a drafter of smaller k has no rows beyond it."""
    k3, k2 = (pd.DataFrame([row([k, 1], k, drafter=f"k{k}", prompt=p) for p in range(4)]) for k in (3, 2))
    got = summarize(pd.concat([k3, k2], ignore_index=True), ["drafter"])
    assert got[got["metric"] == "survival"].groupby("drafter")["position"].max().to_dict() == {"k3": 2, "k2": 1}
    k3.loc[2, "accepted_1"] = None
    got = summarize(k3)
    assert np.isnan(value(got, "survival", 1))
    assert value(got, "survival", 0) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"emitted": 0}, "emitted is less than accepted"),
        ({"emitted": 99}, "one bonus token a round"),
        ({"accepted_1": 9}, "accepted_1 exceeds accepted_0"),
        ({"accepted_0": 9}, "accepted_0 exceeds drafts"),
        ({"drafted": 1}, "accepted exceeds drafted"),
        ({"accepted_2": 0}, "the sum of accepted_j is not accepted"),
        ({"drafts": -1}, "drafts is negative"),
        ({"drafts": 2.5}, "no whole number"),
        ({"accepted": "many"}, "not a number"),
    ],
)
def test_rows_that_are_no_counts_are_refused(change, message):
    counts = pd.DataFrame([row([3, 1], 3, prompt=0), row([3, 1], 3, prompt=1) | change])
    with pytest.raises(BadInput, match=message):
        summarize(counts)


def test_frames_and_groups_that_cannot_be_summarized():
    counts = pd.DataFrame([row([3, 1], 3, prompt=p, stream=s, seed=0) for p in range(3) for s in ("prefix", "mixture")])
    for broken, by, message in (
        (counts.drop(columns="drafted"), [], "no column 'drafted'"),
        (counts.drop(columns="accepted_1"), [], "without a gap"),
        (counts.iloc[:0], [], "no rows"),
        (counts, ["domain"], "no column 'domain' to group by"),
        (counts, ["seed"], "holds stream prefix, mixture"),
        (counts.assign(seed=range(6)), ["stream"], "over_seeds pools them"),
    ):
        with pytest.raises(BadInput, match=message):
            summarize(broken, by)


@pytest.fixture(scope="module")
def arms() -> pd.DataFrame:
    """Two seeds of a drafter on two streams, the same 60 prompts of unlike difficulty."""
    rng = np.random.default_rng(2)
    hard = rng.uniform(-0.3, 0.1, 60)
    return pd.concat(
        [
            walk(rng, lambda p, base=base: base + hard[p], 60, drafter="mixture", seed=s, stream=stream, offset=0, domain="code")
            for s in (0, 1)
            for stream, base in (("mixture", 0.85), ("prefix", 0.5))
        ],
        ignore_index=True,
    )  # fmt: skip


def test_paired_difference_is_narrower_than_two_intervals(arms):
    a, b = {"stream": "prefix"}, {"stream": "mixture"}
    got = compare(arms, a, b, ["seed"])
    each = summarize(arms, KEYS)
    for s in (0, 1):
        mine, by = got[got["seed"] == s], each[each["seed"] == s].groupby("stream")
        va, vb = (value(by.get_group(x), "survival", 0) for x in ("prefix", "mixture"))
        assert value(mine, "survival", 0, "difference") == pytest.approx(vb - va)
        assert value(mine, "survival", 0, "ratio") == pytest.approx(vb / va)
        paired = value(mine, "survival", 0, "difference_high") - value(mine, "survival", 0, "difference_low")
        ends = [[value(by.get_group(x), "survival", 0, end) for end in ("low", "high")] for x in ("prefix", "mixture")]
        assert 0 < paired < 0.85 * np.hypot(*np.ptp(ends, axis=1))  # independent intervals would add in quadrature
        assert value(mine, "survival", 0, "difference_low") > 0
        assert value(mine, "survival", 0, "ratio_low") > 1


def test_pairs_are_matched_by_prompt_not_by_order(arms):
    one = arms[arms["seed"] == 0]
    shuffled = one.sample(frac=1, random_state=1)
    pair = ({"stream": "prefix"}, {"stream": "mixture"})
    left, right = compare(one, *pair), compare(shuffled, *pair)
    for c in ("difference", "ratio"):
        np.testing.assert_allclose(left[c], right[c])
    np.testing.assert_allclose(left["difference_low"], right["difference_low"], atol=0.02)
    same = compare(one, {"stream": "prefix"}, {"stream": "prefix"})
    assert (same[["difference", "difference_low", "difference_high"]].to_numpy() == 0).all()


def test_comparisons_that_have_no_pairs_are_refused(arms):
    pair = ({"stream": "prefix"}, {"stream": "mixture"})
    lone = arms[(arms["stream"] == "prefix") | (arms["prompt"] > 2)]
    for counts, a, b, by, message in (
        (lone, *pair, ["seed"], "3 prompts are in one selection only, the first domain code, prompt 0"),
        (arms, *pair, [], "holds seed 0, 1"),
        (arms, {"stream": "zeros"}, pair[1], ["seed"], "no row matches a"),
        (arms, {"layer": 3}, pair[1], ["seed"], "no column 'layer'"),
        (arms[(arms["seed"] == 0) | (arms["stream"] == "prefix")], *pair, ["seed"], "group seed 1 is in one selection only"),
        (arms.drop(columns=["prompt", "domain"]), *pair, ["seed"], "without prompts there are no pairs"),
    ):
        with pytest.raises(BadInput, match=message):
            compare(counts, a, b, by)


def test_seeds_are_pooled_as_seeds(arms):
    """The mean over seeds counts each seed once, shows each, and has no interval."""
    each = summarize(arms, KEYS)
    got = over_seeds(each)
    assert not {"low", "high", "seed"} & set(got.columns)
    mine = got[got["stream"] == "mixture"]
    values = [value(each[(each["seed"] == s) & (each["stream"] == "mixture")], "mean_emitted") for s in (0, 1)]
    assert [value(mine, "mean_emitted", column=f"seed {s}") for s in (0, 1)] == values
    assert value(mine, "mean_emitted") == pytest.approx(np.mean(values))
    assert value(mine, "mean_emitted", column="lowest") == min(values)
    assert value(mine, "mean_emitted", column="spread") == pytest.approx(np.std(values, ddof=1))
    assert value(mine, "survival", 2, "seeds") == 2
    assert np.isnan(value(over_seeds(each[each["seed"] == 0]).query("stream == 'prefix'"), "mean_emitted", column="spread"))
    ratio = over_seeds(compare(arms, {"stream": "prefix"}, {"stream": "mixture"}, ["seed"]), "ratio")
    assert value(ratio, "mean_emitted") > 1
    with pytest.raises(BadInput, match="no column 'seed'"):
        over_seeds(each.drop(columns="seed"))
    with pytest.raises(BadInput, match="no column 'difference'"):
        over_seeds(each, "difference")


@pytest.mark.parametrize("tokens", [[1, 2] * 40, b"ab" * 40, "ab" * 40, np.array([7, 8] * 40)])
def test_uniqueness_of_a_loop(tokens):
    assert uniqueness(tokens) == 2 / 65


def test_uniqueness_ends():
    assert uniqueness(range(100)) == 1.0
    assert uniqueness(range(16)) == 1.0
    assert np.isnan(uniqueness(range(15)))
    assert uniqueness([5] * 10, n=1) == 0.1
    with pytest.raises(BadInput, match="shape"):
        uniqueness([[1, 2], [3, 4]])
    with pytest.raises(BadInput, match="n = 0"):
        uniqueness([1], n=0)


def test_loops_inflate_the_mean_and_the_subset_shows_it():
    rows = [row([7, 7, 7], 7, prompt=p, domain="code") | {"uniqueness": 0.1} for p in range(3)]
    rows += [row([2, 1, 0], 7, prompt=p, domain="code") | {"uniqueness": 0.95} for p in range(3, 8)]
    rows += [row([7], 7, prompt=0, domain="prose") | {"uniqueness": 0.2}]
    got = beside_low_repetition(pd.DataFrame(rows), ["domain"])
    code = got[got["domain"] == "code"].groupby("subset")
    assert value(code.get_group("low repetition"), "mean_emitted") == 2.0
    assert value(code.get_group("low repetition"), "mean_emitted", column="prompts") == 5
    assert value(code.get_group("all"), "mean_emitted") == pytest.approx((3 * 24 + 5 * 6) / 24)
    assert value(code.get_group("all"), "mean_emitted", column="uniqueness") == pytest.approx((3 * 0.1 + 5 * 0.95) / 8)
    lost = got[(got["domain"] == "prose") & (got["subset"] == "low repetition")]
    assert value(lost, "mean_emitted", column="prompts") == 0
    assert lost["value"].isna().all()
    with pytest.raises(BadInput, match="uniqueness"):
        beside_low_repetition(pd.DataFrame(rows).drop(columns="uniqueness"))


def test_batches_of_weights_give_what_one_batch_gives(monkeypatch, arms):
    """Weights are drawn in batches to bound memory; the numbers do not depend on the size of a batch."""
    whole = summarize(arms, KEYS, resamples=300)
    monkeypatch.setattr(acceptance, "_BATCH", 60 * 7)
    pd.testing.assert_frame_equal(summarize(arms, KEYS, resamples=300), whole)


# ---------------------------------------------------------------- published figures


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.csv")), ids=lambda p: p.name)
def test_published_tables_have_cards(path):
    card = path.with_suffix(".md").read_text()
    assert "source" in card
    if path.name != "vllm_pr_50649_gsm8k.csv":  # its card has no digest
        assert sha256(path) in card


def test_published_figures_as_published():
    """Values and conventions of the source, some per kind."""
    one = {
        ("Inferact/Kimi-K3-DSpark-Block5", "GSM8K", "mean_emitted"): 4.581,
        ("Inferact/Kimi-K3-DSpark-Block5", "aggregate of the above", "acceptance_rate"): 0.4610,
        ("Inferact/Kimi-K3.1-Pro-DSpark-preview", "SPEED-Bench low entropy", "mean_emitted"): 2.930,
        ("LithosAI/Kimi-K3.1-Pro-DSpark", "10 public sets", "mean_emitted"): 3.448,
        ("modal-labs/Kimi-K3-DFlash", "GSM8K", "mean_emitted"): 6.49,
        ("lightseekorg/kimi-k3-eagle3-mla", "50K random tokens, chat", "mean_emitted"): 1.94,
    }
    for (drafter, dataset, metric), expected in one.items():
        assert published(drafter, dataset, metric)["value"].item() == expected
    everything = published()
    assert everything["source"].notna().all()
    assert (everything[everything["drafter"] == "RadixArk/Kimi-K3-DSpark"]["stream"] == "disputed").all()
    assert (published("LithosAI/Kimi-K3.1-Pro-DSpark")["includes_bonus"] == "unknown").all()
    rtx = published("modal-labs/Kimi-K3-DFlash", metric="acceptance_rate")
    assert (rtx["stream"].item(), rtx["fed"].item(), rtx["value"].item(), rtx["value_high"].item()) == ("mixture", "prefix", 0.310, 0.311)


def test_published_rows_agree_with_themselves():
    """1 + sum of survival = mean, accepted / drafted = (mean - 1) / k, and no mean above k + 1, wherever both are published."""
    rows = published()
    means = rows[(rows["metric"] == "mean_emitted") & (rows["includes_bonus"] == "yes")]
    assert (means["value"].ge(1) & ~(means["value"] > (means["k"] + 1).astype(float))).all()
    checked = 0
    for (_, _, k), part in rows.groupby(["drafter", "dataset", "k"]):
        by = part.set_index("metric")["value"]
        if "survival" in by.index and "value_high" in part and part["value_high"].isna().all():
            assert 1 + by[["survival"]].sum() == pytest.approx(by["mean_emitted"], abs=0.005 * k + 0.0005)
            checked += 1
        if "acceptance_rate" in by.index and "mean_emitted" in by.index:
            assert by["acceptance_rate"] == pytest.approx((by["mean_emitted"] - 1) / k, abs=2e-3)
            checked += 1
    assert checked >= 15


def test_published_streams_table():
    table = published_streams()
    means = table[table["metric"] == "mean_accepted"].set_index(["fed", "offset"])["value"]
    assert means.to_dict() == {("prefix", 0): 0.075, ("prefix", -1): 0.119, ("mixture", 0): 0.161, ("mixture", -1): 0.239,
                               ("mixture", 1): 0.486, ("prefix", 1): 0.936}  # fmt: skip
    assert set(table["includes_bonus"]) == {"no"}
    assert table.set_index("offset")["vllm_ids"].to_dict() == {0: "48 68 88", -1: "47 67 87", 1: "49 69 89"}


def test_published_refuses_names_and_files_it_does_not_know(tmp_path):
    with pytest.raises(BadInput, match=r"no drafter 'nobody/nothing'.*RadixArk"):
        published("nobody/nothing")
    with pytest.raises(BadInput, match="no dataset 'HumanEval' among these rows"):
        published("modal-labs/Kimi-K3-DFlash", "HumanEval")
    with pytest.raises(BadInput, match="clone of the repository"):
        published(path=tmp_path / "none.csv")
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="no column 'drafter'"):
        published(path=tmp_path / "x.csv")
    text = (PUBLISHED / "drafter_acceptance.csv").read_text().replace(",disputed,", ",maybe,", 1)
    (tmp_path / "y.csv").write_text(text)
    with pytest.raises(BadInput, match="'stream' holds 'maybe'"):
        published(path=tmp_path / "y.csv")


def test_cards_are_listed():
    assert "published/*.csv" in (Path(PUBLISHED).parent / "README.md").read_text()


def test_a_published_table_with_another_type_in_a_column_of_counts_is_refused(tmp_path):
    text = (PUBLISHED / "drafter_acceptance.csv").read_text().splitlines()
    row = text[1].split(",")
    row[3] = "0.5"
    (tmp_path / "x.csv").write_text("\n".join([text[0], ",".join(row)]))
    with pytest.raises(BadInput, match="not a table of published figures"):
        published(path=tmp_path / "x.csv")


@pytest.mark.parametrize("name", ["accepted_\u0661", "accepted_01", f"accepted_{'9' * 5000}"])
def test_a_column_that_only_looks_like_a_position_is_none(name):
    """Digits of another script, or with a zero before them, name no column accepted_j."""
    counts = pd.DataFrame({"drafts": [2], "drafted": [2], "accepted": [1], "emitted": [3], "accepted_0": [1], name: [1]})
    assert acceptance.positions(counts) == 1
    acceptance.check_counts(counts)
