"""The figures of notebook 03: titles and frames say what the input says, both survive half size and grey, wrong input is refused.

The frames here are made for the tests; no picture of them is kept.
"""

import numpy as np
import pandas as pd
import pytest

from k3lab import drafter_figures, figures
from k3lab.drafter import logs
from k3lab.drafter.acceptance import summarize
from k3lab.drafter.published import published, published_streams
from k3lab.errors import BadInput

KEYS = ["drafter", "seed", "stream", "offset"]
K = 7


def survivors(drafts: int, rate: float, k: int = K) -> dict:
    """Counts of one row with the given acceptance at every position, rounded down."""
    reached = [int(drafts * rate ** (j + 1)) for j in range(k)]
    counts = {"drafts": drafts, "drafted": k * drafts, "accepted": sum(reached), "emitted": sum(reached) + drafts}
    return counts | {f"accepted_{j}": n for j, n in enumerate(reached)}


def made(own: float, other: float, seeds: int = 2, domains: tuple = ("code", "prose")) -> pd.DataFrame:
    """Counts of two drafters on two streams at three offsets: rate `own` on the stream of training, less by 0.1 a layer off."""
    rng = np.random.default_rng(4)
    rows = []
    for drafter in ("mixture", "prefix"):
        for seed in range(seeds):
            for stream in ("mixture", "prefix"):
                for offset in (-1, 0, 1):
                    rate = (own if stream == drafter else other) - 0.1 * abs(offset) + 0.01 * seed
                    keys = {"drafter": drafter, "seed": seed, "stream": stream, "offset": offset}
                    for domain in domains:
                        sizes = rng.integers(20, 60, 12)
                        rows += [
                            keys | {"domain": domain, "prompt": p} | survivors(int(n), rate + 0.05 * (p % 2)) for p, n in enumerate(sizes)
                        ]
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def counts() -> pd.DataFrame:
    return made(0.8, 0.4)


@pytest.fixture(scope="module")
def overall(counts) -> pd.DataFrame:
    return summarize(counts, KEYS, resamples=400)


def title(fig) -> str:
    return " ".join(next(t.get_text() for t in fig.texts if t.get_gid() == "finding").split())


def subtitle(fig) -> str:
    return " ".join(next(t.get_text() for t in fig.texts if t.get_gid() == "ran").split())


def kept(fig, frame, folder) -> pd.DataFrame:
    """Exported, with nothing lost at half size or in grey; the table as read back."""
    assert figures.problems(fig) == []
    paths = {p.suffix: p for p in figures.export(fig, frame, "x", folder)}
    assert paths[".png"].stat().st_size > 1000
    return pd.read_csv(paths[".csv"])


def mean_of(overall, drafter, stream, offset=0, metric="mean_emitted") -> float:
    rows = overall[(overall["drafter"] == drafter) & (overall["stream"] == stream) & (overall["offset"] == offset)]
    return rows[rows["metric"] == metric]["value"].mean()


def test_heat_map_prints_each_seed_with_its_own_interval(overall, tmp_path):
    fig, frame = drafter_figures.heatmap_figure(overall, "what ran")
    assert len(kept(fig, frame, tmp_path)) == 2 * 2 * 2 * 3
    assert f"Mixture drafter: {mean_of(overall, 'mixture', 'mixture'):.2f} as trained" in title(fig)
    assert f"{mean_of(overall, 'prefix', 'mixture'):.2f} fed the other stream" in title(fig)
    texts = [t.get_text() for ax in fig.axes for t in ax.texts]
    for r in frame.itertuples():
        assert f"{r.mean:.2f}" in texts
        assert any(f"{r.value:.2f} ± {(r.high - r.low) / 2:.2f}" in t for t in texts)
    assert "a line per seed" in subtitle(fig)
    assert "bonus included" in subtitle(fig)


def test_heat_map_of_one_seed_and_of_a_reversed_result(tmp_path):
    """Drafters that do better on the other stream get a title that says so."""
    reversed_ = summarize(made(0.4, 0.8, seeds=1).assign(uniqueness=0.75), KEYS, resamples=200)
    fig, frame = drafter_figures.heatmap_figure(reversed_, "what ran")
    own, other = mean_of(reversed_, "mixture", "mixture"), mean_of(reversed_, "mixture", "prefix")
    assert own < other
    assert f"Mixture drafter: {own:.2f} as trained, {other:.2f} fed the other stream" in title(fig)
    assert "seed" not in subtitle(fig)
    assert "n-gram uniqueness of the output 0.75" in subtitle(fig)
    kept(fig, frame, tmp_path)


def test_heat_map_with_missing_cells(overall, tmp_path):
    part = overall[~((overall["stream"] == "prefix") & (overall["offset"] == 1))]
    fig, frame = drafter_figures.heatmap_figure(part, "what ran")
    assert "–" in [t.get_text() for t in fig.axes[0].texts]
    kept(fig, frame, tmp_path)


def test_published_table_stands_beside_ours_without_the_bonus(overall, tmp_path):
    fig, frame = drafter_figures.published_streams_figure(overall, published_streams(), "what ran")
    table = kept(fig, frame, tmp_path)
    theirs = table[table["panel"] == "published EAGLE3"].set_index(["stream", "offset"])
    assert theirs.loc[("prefix", 1), "trained"]
    assert theirs["value"].to_dict()[("mixture", 1)] == 0.486
    assert theirs["share"].to_dict()[("mixture", 1)] == pytest.approx(0.486 / 0.936)
    ours = table[table["panel"] == "trained on mixture"].set_index(["stream", "offset"])
    assert ours.loc[("mixture", 0), "value"] == pytest.approx(mean_of(overall, "mixture", "mixture") - 1)
    wrong = table[~table["trained"] & (table["offset"] == np.where(table["panel"] == "published EAGLE3", 1, 0))]["share"]
    assert f"the other stream keeps {wrong.min():.0%} to {wrong.max():.0%}" in title(fig)
    assert "no interval given" in subtitle(fig)


def test_survival_curves_overall_and_by_domain(counts, overall, tmp_path):
    fig, frame = drafter_figures.survival_figure(overall, "what ran")
    kept(fig, frame, tmp_path)
    assert len(fig.axes) == 2
    assert set(frame["offset"]) == {0}
    assert len(frame) == 2 * 2 * 2 * K
    bands = [c for c in fig.axes[0].collections]
    assert len(bands) == 4  # two streams, two seeds
    by_domain = summarize(counts, [*KEYS, "domain"], resamples=100)
    fig, frame = drafter_figures.survival_figure(by_domain, "what ran", "conditional", offset=1)
    kept(fig, frame, tmp_path)
    assert len(fig.axes) == 4
    behind = frame[(frame["position"] > 0) & (frame["drafter"] == "prefix") & (frame["stream"] == "prefix")]["value"]
    assert title(fig).startswith("A draft behind accepted ones is accepted")
    assert f"{behind.min():.2f} to {behind.max():.2f} fed prefix" in title(fig).split("prefix drafter")[1]


def test_subsets_are_not_drawn_over_each_other(overall):
    both = pd.concat([overall.assign(subset=s) for s in ("all", "low repetition")])
    with pytest.raises(BadInput, match="select one domain or subset"):
        drafter_figures.heatmap_figure(both, "x")
    with pytest.raises(BadInput, match="select one subset"):
        drafter_figures.survival_figure(both, "x")


@pytest.mark.parametrize(("layers", "block"), [(12, 4), (93, 12)])
def test_weights_of_every_layer_fill_the_bar(layers, block, tmp_path):
    rng = np.random.default_rng(0)
    rows = [dict(enumerate(rng.dirichlet(np.ones(n // block + 2)))) for n in range(layers)]
    weights = pd.DataFrame([{**{f"block {i}": w[i] for i in range(len(w) - 1)}, "prefix": w[len(w) - 1]} for w in rows])
    weights = weights[[*sorted(c for c in weights if c != "prefix"), "prefix"]].rename_axis("layer")
    fig, frame = drafter_figures.weights_figure(weights, "what ran")
    assert len(kept(fig, frame, tmp_path)) == layers
    assert f"running prefix, {weights['prefix'].min():.0%} to {weights['prefix'].max():.0%}" in title(fig)
    tops = {round(p.get_y() + p.get_height(), 6) for p in fig.axes[0].containers[-1].patches}
    assert tops == {1.0}
    assert len({(c.patches[0].get_facecolor(), c.patches[0].get_hatch()) for c in fig.axes[0].containers}) == weights.shape[1]


def test_weights_that_do_not_sum_to_one_are_refused():
    weights = pd.DataFrame({"block 0": [0.5, 0.5], "prefix": [0.5, 0.4]}, index=pd.Index([3, 4], name="layer"))
    with pytest.raises(BadInput, match=r"of layer 4 sum to 0.9"):
        drafter_figures.weights_figure(weights, "x")
    with pytest.raises(BadInput, match="negative"):
        drafter_figures.weights_figure(pd.DataFrame({"block 0": [1.5], "prefix": [-0.5]}), "x")
    with pytest.raises(BadInput, match="10 sources"):
        drafter_figures.weights_figure(pd.DataFrame(np.full((1, 10), 0.1), columns=[f"block {i}" for i in range(10)]), "x")


def test_cosine_by_layer_marks_commits_and_says_where_it_is_lowest(tmp_path):
    frame = pd.DataFrame({"layer": range(8), "cosine": [0.5, 0.7, 0.8, 0.9, 0.4, 0.6, 0.7, 0.95], "norm_ratio": np.linspace(1, 2, 8)})
    for name in ("cosine", "norm_ratio"):
        frame[f"{name}_low"], frame[f"{name}_high"] = frame[name] - 0.05, frame[name] + 0.05
    fig, table = drafter_figures.streams_figure(frame, "what ran", committing=(0, 4))
    kept(fig, table, tmp_path)
    assert "most after layer 4 (cosine 0.40) and least after layer 7 (0.95)" in title(fig)
    assert "mean cosine 0.45 after a layer that commits, 0.78 after the others" in title(fig)
    for ax in fig.axes:
        assert sorted(line.get_xdata()[0] for line in ax.lines if len(set(line.get_xdata())) == 1) == [0, 4]
    fig, table = drafter_figures.streams_figure(frame[["layer", "cosine", "norm_ratio"]], "no bands, no commits")
    assert "commits" not in title(fig)
    kept(fig, table, tmp_path)


def test_overlay_counts_only_lengths_that_include_the_bonus(tmp_path):
    rows = published()
    usable = rows[(rows["metric"] == "mean_emitted") & (rows["includes_bonus"] == "yes")]
    fig, frame = drafter_figures.overlay_figure(rows, 3.0, "a log", [0.7, 0.5, 0.3], label="my log")
    table = kept(fig, frame, tmp_path)
    assert f"my log: 3.00 tokens a round, above {(usable['value'] < 3).sum()} of {len(usable)}" in title(fig)
    assert table[table["drafter"] == "my log"]["value"].tolist() == [3.0, 0.7, 0.5, 0.3]
    assert set(table[table["metric"] == "mean_emitted"]["includes_bonus"]) == {"yes"}
    fig, frame = drafter_figures.overlay_figure(published(dataset="GSM8K"), 3.0, "a log")
    assert len(fig.axes) == 1
    kept(fig, frame, tmp_path)
    with pytest.raises(BadInput, match="expected 1 or more"):
        drafter_figures.overlay_figure(rows, 0.4, "x")


@pytest.mark.parametrize("k", [3, 15])
def test_log_sums_counts_and_checks_them(k, tmp_path):
    """Intervals of unequal size: the mean is that of the sums, and 1 + sum of survival agrees with it."""
    log = pd.DataFrame([{"source": "x", "line": n} | survivors(d, r, k) for n, (d, r) in enumerate([(10, 0.9), (1000, 0.5), (500, 0.6)])])
    fig, frame = drafter_figures.log_figure(log, "what ran")
    table = kept(fig, frame, tmp_path)
    mean = log["emitted"].sum() / log["drafts"].sum()
    assert title(fig) == f"{mean:.2f} tokens a round over 1,510 draft rounds; 1 + sum of survival = {mean:.2f} agrees"
    assert table[table["metric"] == "survival"]["value"].sum() == pytest.approx(mean - 1)
    assert table[table["metric"] == "mean_emitted"]["value"].tolist() == pytest.approx((log["emitted"] / log["drafts"]).tolist())
    fig, _ = drafter_figures.log_figure(log.assign(emitted=log["accepted"] + log["drafts"] // 2), "x")
    assert "does not agree" in title(fig)


def test_log_without_positions_or_without_drafts(tmp_path):
    log = pd.DataFrame([{"source": "x"} | survivors(40, 0.5) for _ in range(3)])
    bare = log[["source", "drafts", "drafted", "accepted", "emitted"]]
    fig, frame = drafter_figures.log_figure(bare, "what ran")
    assert "sum of survival" not in title(fig)
    kept(fig, frame, tmp_path)
    idle = pd.concat([bare, bare.iloc[:1].assign(drafts=0, drafted=0, accepted=0, emitted=0)])
    fig, frame = drafter_figures.log_figure(idle, "an idle interval")
    assert frame["value"].isna().sum() == 1
    kept(fig, frame, tmp_path)
    with pytest.raises(BadInput, match="no draft round"):
        drafter_figures.log_figure(idle.iloc[3:], "x")


def test_log_of_some_positions_checks_no_sum():
    """A bench report cut after position 0 of 7: one bar, and nothing said about a sum."""
    cut = {"drafts": [100], "drafted": [700], "accepted": [250], "emitted": [350], "accepted_0": [76]}
    assert "1 + sum" not in title(drafter_figures.log_figure(pd.DataFrame(cut | {"k": [7]}), "what ran")[0])
    assert "does not agree" in title(drafter_figures.log_figure(pd.DataFrame(cut), "what ran")[0])


def test_log_as_the_reader_returns_it(tmp_path):
    """vLLM's counts are summed; SGLang's means, printed without counts, are drawn and not summed."""
    vllm = (
        "INFO 05-01 14:24:50 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.37, Accepted throughput: 8.90 tokens/s, "
        "Drafted throughput: 19.50 tokens/s, Accepted: 89 tokens, Drafted: 195 tokens, Per-position acceptance rate: 0.800, 0.385, 0.185, "
        "Avg Draft acceptance rate: 45.6%\n"
    )
    sglang = (
        "Decode batch, #running-req: 8, #token: 100, token usage: 0.10, accept len: 3.56, accept rate: 0.37, cuda graph: True, "
        "gen throughput (token/s): 129.00, #queue-req: 0\n"
    )
    for name, text in (("mixed", vllm + sglang), ("sglang", sglang)):
        (tmp_path / f"{name}.log").write_text(text)
    fig, frame = drafter_figures.log_figure(logs.read(tmp_path / "mixed.log").counted, "what ran")
    kept(fig, frame, tmp_path)
    assert title(fig) == "2.37 tokens a round over 65 draft rounds; 1 + sum of survival = 2.37 agrees"
    assert "1 of 2 intervals" in subtitle(fig)
    assert frame[frame["metric"] == "mean_emitted"]["value"].tolist() == pytest.approx([154 / 65, 3.56])
    fig, frame = drafter_figures.log_figure(logs.read(tmp_path / "sglang.log").counted, "what ran")
    kept(fig, frame, tmp_path)
    assert "Mean lengths as printed: 3.56" in title(fig)


@pytest.mark.parametrize(
    ("draw", "frame", "message"),
    [
        (drafter_figures.heatmap_figure, pd.DataFrame({"drafter": ["a"]}), "heat map: no column 'stream'"),
        (drafter_figures.survival_figure, pd.DataFrame({"drafter": ["a"]}), "survival: no column 'stream'"),
        (drafter_figures.streams_figure, pd.DataFrame({"layer": [0]}), "streams: no column 'cosine'"),
        (drafter_figures.streams_figure, pd.DataFrame({"layer": [], "cosine": [], "norm_ratio": []}), "streams: no rows"),
        (drafter_figures.weights_figure, pd.DataFrame(), "weights: no rows"),
        (drafter_figures.log_figure, pd.DataFrame({"drafts": [1]}), "log: no column 'drafted'"),
    ],
)
def test_frames_of_another_kind_are_refused(draw, frame, message):
    with pytest.raises(BadInput, match=message):
        draw(frame, "x")


def test_a_comparison_of_streams_is_drawn_as_taps_after_layers():
    """Layer ids of attn_res.streams are one higher than the layer that the tap is after; the embedding has no tap."""
    compared = pd.DataFrame({
        "layer": [0, 1, 2], "tokens": 4, "blocks": [0, 1, 1], "cosine": [1.0, 0.5, 0.75], "cosine_p05": 0.1, "cosine_p50": 0.5,
        "cosine_p95": 0.9, "norm_ratio": [1.0, 2.0, 3.0], "weight_0": [np.nan, 0.75, 0.25], "weight_prefix": [1.0, 0.25, 0.75],
    })  # fmt: skip
    weights = drafter_figures.weights_frame(compared)
    assert weights.index.tolist() == [0, 1]
    assert weights.columns.tolist() == ["block 0", "prefix"]
    assert drafter_figures.weights_figure(weights, "what ran")[1]["block 0"].tolist() == [0.75, 0.25]
    streams = drafter_figures.streams_frame(compared)
    assert streams[["layer", "cosine", "norm_ratio"]].to_numpy().tolist() == [[0, 0.5, 2.0], [1, 0.75, 3.0]]
    assert "after layer 0 (cosine 0.50)" in title(drafter_figures.streams_figure(streams, "what ran")[0])
