# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · The drafter reads the wrong stream
#
# **Question.** Kimi-K3 passes two hidden-state streams from layer to layer that have the same shape and dtype. A drafter for speculative
# decoding is trained on one of them, at certain layers. vLLM PRs 50487 and 56434 found engines that feed it the other one: nothing
# raises, and acceptance drops. How far apart are the streams, what does the wrong one cost, does the layer matter as much, and how does
# one see it in a log?
#
# **Answer in four lines.**
# 1. Under Attention Residuals (AttnRes) a layer forwards the running *prefix*; what the next layer reads is a *mixture* of the committed
#    blocks and that prefix. At a tap after a layer an engine can take either. [1](#1-·-What-a-layer-forwards,-and-what-the-next-one-reads) [2](#2-·-Two-streams-at-every-tap)
# 2. It works both ways. A drafter trained on the mixture emits 4.52 tokens a round, fed the prefix 1.98. One trained on the prefix emits
#    4.14, fed the mixture 2.49. So the stream belongs to the checkpoint: neither one is the fix for every drafter.
#    [5](#5-·-Two-drafters,-two-streams,-three-offsets)
# 3. The layer belongs to it too. A layer off costs 0.4 to 1.3 tokens a round here, and in a published drafter it costs more than the
#    other stream does. [5](#5-·-Two-drafters,-two-streams,-three-offsets) [6](#6-·-What-others-published)
# 4. In a log it shows at position 0: the first draft fails where it should not. `python -m k3lab acceptance` reads the log,
#    `passport` says what the engine feeds and what the checkpoint expects. [7](#7-·-From-a-log) [8](#8-·-The-passport-of-a-drafter)
#
# The cells run on a CPU with a small trained model of the Kimi-K3 architecture and drafters trained for it. The counts of section 5 were
# made on an H200; a slice of them is counted again here. What this does and does not prove is said at the end.

# %%
import os

import pandas as pd
import torch
from IPython.display import Markdown, display

from k3lab import drafter_figures, figure_pack, figures, inputs, provenance
from k3lab.attn_res import attn_res
from k3lab.attn_res.reference import attn_res_reference
from k3lab.attn_res.streams import compare, layer_id, streams
from k3lab.capture import Capture
from k3lab.drafter import acceptance, counts, dflash, evaldelta, logs
from k3lab.drafter.passport import passport
from k3lab.drafter.published import published, published_streams
from k3lab.drafter.speculate import generate, speculate
from k3lab.errors import BadInput
from k3lab.kda.runtime import interpret_without_gpu
from k3lab.panels import drafter_panel
from k3lab.testing import error_budget
from k3lab.tiny import data, model

interpret_without_gpu()  # before a kernel is defined
torch.set_num_threads(1)  # small tensors: more threads wait for each other, longest on a busy machine
pd.set_option("display.max_colwidth", 120)
print(provenance.versions())

# %% [markdown]
# ## The input
#
# Set `K3LAB_LOG` to a log of your server (section 7) or `K3LAB_CAPTURE` to AttnRes captures of your own, a file or a folder (section 2),
# by a path from this folder or from the repository's, and run the notebook again. The assertions about the shipped ones are skipped then.

# %%
DATA = "../data"
SHIPPED = {"K3LAB_CAPTURE": f"{DATA}/captures/attn_res_taps.safetensors", "K3LAB_LOG": f"{DATA}/drafter_fed_prefix.log"}
capture_path, log_path = (inputs.chosen(variable, path) for variable, path in SHIPPED.items())
if os.path.isfile(capture_path) and Capture.load(capture_path).kind != "attn_res":
    print(os.path.basename(capture_path), "is no AttnRes capture (notebook 01 is for those of KDA): the shipped one is taken")
    capture_path = SHIPPED["K3LAB_CAPTURE"]
shipped, shipped_log = capture_path == SHIPPED["K3LAB_CAPTURE"], log_path == SHIPPED["K3LAB_LOG"]
if os.path.isfile(capture_path):
    capture, report = inputs.examined(capture_path)
    print(", ".join(f"{name} {list(x.shape)}" for name, x in sorted(capture.tensors.items())), "·", capture.metadata.get("dtype", ""))
else:
    print("captures:", os.path.basename(capture_path))
print("log:", os.path.basename(log_path))

# %%
if shipped:
    assert capture.metadata["layers"] == list(range(12))
    assert list(capture.tensors["prefix"].shape) == [12, 96, 256]
    assert not (report["severity"] == "error").any()

# %% [markdown]
# ## 1 · What a layer forwards, and what the next one reads
#
# The *prefix* is the running sum since the last commit. A layer whose index is a multiple of the block size first commits it to the
# *bank*. Engines keep the last MLP output aside as *pending* and add it where it is read. The next consumer reads a *mixture*: softmax
# weights over the committed blocks and the prefix, from a norm weight and a projection of the consumer's own. The tap after layer 4 of
# the tiny model, as it was recorded, with the result `o` that the model went on with:

# %%
tap = Capture.load(f"{DATA}/captures/attn_res_layer4.safetensors")
sources = {name: tap.tensors[name] for name in ("prefix", "score_norm", "score_proj", "bank", "pending")}
truth = attn_res(**sources, eps=tap.metadata["eps"], impl="reference", return_weights=True)
print("after layer", tap.metadata["layer"], "· bank", list(sources["bank"].shape), "· prefix and pending", list(sources["prefix"].shape))
print("mean weights:", ", ".join(f"{w:.2f}" for w in truth.weights.mean(0).tolist()), "for block 0, block 1 and the prefix")

# %% [markdown]
# Three results against the definition in float64: what was recorded, `attn_res` in torch, and the Triton kernel, for which the
# interpreter takes 8 of the 96 tokens. (The kernel runs natively on CUDA; the tests ran it on an H200. It was not run on an AMD card.)

# %%
few = {name: x[:, :8] if name == "bank" else x[:8] if x.dim() == 2 else x for name, x in sources.items()}
low = attn_res_reference(**sources, eps=tap.metadata["eps"], dtype=torch.float32).o
results = {
    "recorded": tap.tensors["o"],
    "torch": attn_res(**sources, eps=tap.metadata["eps"]).o,
    "triton": attn_res(**few, eps=tap.metadata["eps"], impl="triton").o,
}
rows = []
for name, o in results.items():
    b = error_budget(name, o, truth.o[: len(o)], low[: len(o)], torch.float32)
    rows.append({"result": name, "tokens": len(o), "max error": b.error, "budget": b.budget, "within": b.ok})
agreement = pd.DataFrame(rows)
assert agreement["within"].all()
agreement

# %% [markdown]
# ## 2 · Two streams at every tap
#
# At each tap the engine can hand out the prefix (with pending added) or the mixture. Where does the mixture look? 96 tokens of code,
# prose and arithmetic, all twelve taps, activations in bf16:

# %%
compared = compare(capture_path)
ran = f"{os.path.basename(capture_path)}, {compared['tokens'].iloc[0]} tokens, attn_res in torch, CPU"
fig, weights = drafter_figures.weights_figure(drafter_figures.weights_frame(compared), ran)
figures.export(fig, weights, "03_weights")
fig

# %%
if shipped:
    before_last = weights[weights["after layer"] < 11]
    assert before_last["block 0"].between(0.35, 0.72).all()
    assert (before_last["block 0"] > before_last["prefix"]).sum() == 9
    assert weights.set_index("after layer").loc[11, "prefix"] > 0.65

# %% [markdown]
# Block 0 is the embedding. In the shipped capture it has more weight than the prefix after nine of the first eleven layers; the output
# side, after the last layer, looks mostly at the prefix. So the two streams should differ:

# %%
about = capture.metadata if os.path.isfile(capture_path) else {}
block = about.get("attn_res_block") or 0
committing = range(0, about.get("num_layers", 0), block) if block else ()
fig, apart = drafter_figures.streams_figure(drafter_figures.streams_frame(compared), ran, committing)
figures.export(fig, apart, "03_streams")
fig

# %%
if shipped:
    cosine = apart.set_index("layer")["cosine"]
    assert sorted(cosine.nsmallest(3).index) == list(committing) == [0, 4, 8]
    assert (round(cosine.min(), 2), round(cosine.max(), 2)) == (0.46, 0.98)
    assert cosine.idxmax() == 11
    assert (apart["norm_ratio"] > 1).all()

# %% [markdown]
# In the shipped capture the cosine runs from 0.46 to 0.98. It is lowest just after the three layers that commit a block, when little is
# in the prefix.
#
# The edges. Layer ids count as vLLM's: id i is the state before layer i, so the tap after layer i has id i + 1.

# %%
taps = Capture.load(SHIPPED["K3LAB_CAPTURE"])
first, last = streams(taps, 0), streams(taps, 12)
print("id 0, the embedding: streams equal:", torch.equal(first.prefix, first.mixture))
print("blocks that the consumer reads:", {f"after layer {i}": streams(taps, layer_id(i)).weights.shape[1] - 1 for i in (2, 3, 4, 11)})
plain = streams(Capture(taps.tensors, taps.metadata | {"attn_res_block": 0}), 6)
print("a model without AttnRes: streams equal:", torch.equal(plain.prefix, plain.mixture))
try:
    streams(Capture(taps.tensors, taps.metadata | {"pp_layers": [0, 6]}), 6)
except BadInput as error:
    refused = str(error)
    print("end of a pipeline stage that is not the last:", refused)

# %%
assert torch.equal(first.prefix, first.mixture)
assert torch.equal(plain.prefix, plain.mixture)
assert [streams(taps, layer_id(i)).weights.shape[1] - 1 for i in (2, 3, 4, 11)] == [1, 1, 2, 3]
assert last.weights.shape[1] == 4
assert "on the next rank" in refused

# %% [markdown]
# ## 3 · Two drafters that differ in the stream alone
#
# DFlash drafters, 7 drafts in one parallel pass: a block of the last token and 7 masks attends to the target's features, taken after
# layers 1, 5 and 9 and fused, and to itself without a causal mask. One was trained on the mixture, one on the prefix: same recipe, same
# initial weights, batches and anchors. Three seeds of each were trained and counted on an H200; the weights of seed 0 are shipped
# (card: `data/drafters.md`).

# %%
net = model.load(f"{DATA}/tiny_k3.safetensors")
drafters = {s: dflash.load(f"{DATA}/drafter_{s}.safetensors", target=f"{DATA}/tiny_k3.safetensors") for s in ("mixture", "prefix")}
pd.DataFrame(
    {
        "trained on": d.origin.stream, "seed": d.origin.seed, "taps (after layer)": str(d.config.taps), "draft tokens a round": d.config.block - 1,
        "parameters": sum(p.numel() for p in d.parameters()),
    }
    for d in drafters.values()
)  # fmt: skip

# %%
assert {s: d.origin.stream for s, d in drafters.items()} == {"mixture": "mixture", "prefix": "prefix"}
assert drafters["mixture"].config == drafters["prefix"].config
assert drafters["mixture"].config.taps == (1, 5, 9)
assert drafters["mixture"].config.block - 1 == 7

# %% [markdown]
# ## 4 · The walk loses nothing
#
# A round drafts 7 tokens, one step of the target verifies them, those before the first that the target disagrees with are kept, and the
# target adds one token of its own, the bonus. The KDA state is rolled back to the last token kept. Greedy, the output must be plain
# decoding's token for token, whatever the drafter is fed; the wrong stream costs rounds, not text. Live, one prompt of each domain, both
# drafters on both streams, against plain decoding and against the shipped counts of the same prompts:

# %%
prompts = counts.load_prompts(f"{DATA}/drafter_prompts.safetensors")
stored = pd.read_csv(f"{DATA}/drafter_counts.csv")
pick = [prompts.domain.index(d) for d in ("code", "prose", "arithmetic")]
slice_ = prompts[pick]
questions = [x[: prompts.prompt_len] for x in slice_.tokens]
plain_text, _ = generate(net, questions, max_new=prompts.new_tokens)
walks = {
    (d, s): speculate(
        net, drafters[d], questions, max_new=prompts.new_tokens, stream=s, keys={"drafter": d, "seed": 0, "domain": slice_.domain}
    )
    for d in drafters
    for s in ("mixture", "prefix")
}
live = pd.concat([w.counts for w in walks.values()], ignore_index=True)
live["prompt"] = live["prompt"].map(dict(enumerate(pick)))
KEYS = list(counts.KEYS)
both = live.merge(stored, on=KEYS, suffixes=("", "_stored"))
numbers = [c for c in live.columns if c not in KEYS]
same_text = all(w.tokens == plain_text for w in walks.values())
same_counts = all((both[c] == both[f"{c}_stored"]).all() for c in numbers)
print(f"{len(walks) * len(pick)} walks of {prompts.new_tokens} tokens: text equal to plain decoding: {same_text}")
print(f"{len(both)} rows of {len(numbers)} counts: equal to the shipped ones, counted on an H200: {same_counts}")
display(
    live.pivot(index=["drafter", "stream"], columns="domain", values="drafts").rename_axis(columns="rounds")[
        ["code", "prose", "arithmetic"]
    ]
)

# %%
assert same_text
assert [x[prompts.prompt_len : prompts.prompt_len + prompts.new_tokens].tolist() for x in slice_.tokens] == plain_text
assert len(both) == len(live) == 12
assert same_counts

# %% [markdown]
# The arithmetic prompt by the mixture drafter, one segment a round: what it drafted and the target kept, then `·` and the target's own
# token. (The first token comes from the prompt.)


# %%
def rounds_text(walk, prompt: int, characters: int = 90) -> str:
    rounds, text = walk.rounds[walk.rounds["prompt"] == prompt], walk.tokens[prompt]
    at = rounds["anchor"].to_numpy() - prompts.prompt_len + 1  # of the first draft in the text
    parts = [f"{data.decode(text[a : a + n])}·{data.decode(text[a + n : a + n + 1])}" for a, n in zip(at, rounds["accepted"], strict=True)]
    return f"{data.decode(text[:1])}|{'|'.join(parts)}".replace("\n", "⏎")[:characters]


for stream in ("mixture", "prefix"):
    walk = walks["mixture", stream]
    print(f"fed {stream:8}{int(walk.counts['drafts'][2]):3} rounds  {rounds_text(walk, 2)}")

# %%
arithmetic = live[(live["drafter"] == "mixture") & (live["domain"] == "arithmetic")].set_index("stream")["drafts"]
assert arithmetic.to_dict() == {"mixture": 17, "prefix": 51}
assert prompts.new_tokens - 1 == 127

# %% [markdown]
# 17 rounds against 51 for the same text, which takes plain decoding 127 steps. Sampled decoding keeps its distribution by rejection
# sampling in the same way; the tests check that, and the roll-back.
#
# Greedy text does not depend on the drafter, so one teacher-forced pass gives the accepted drafts at every position, and the walk is a
# walk over that table. All other counts were made like that. The same prompts, both drafters, all streams and offsets, counted here:

# %%
feeds = [(s, o) for s in ("mixture", "prefix") for o in (-1, 0, 1)] + [("zeros", 0)]
rows = []
for d, drafter in drafters.items():
    for (s, o), table in counts.prompt_counts(drafter, net, slice_, feeds).items():
        keys = {"drafter": d, "seed": 0, "stream": s, "offset": o, "domain": slice_.domain, "prompt": pick}
        rows.append(pd.DataFrame(keys | {c: x for c, x in table.items()}))
tabled = pd.concat(rows, ignore_index=True)
against = tabled.merge(stored, on=KEYS, suffixes=("", "_stored"))
print(f"{len(against)} rows, equal to the shipped ones: {all((against[c] == against[f'{c}_stored']).all() for c in numbers)}")
assert len(against) == len(tabled) == 2 * 7 * 3
assert all((against[c] == against[f"{c}_stored"]).all() for c in numbers)

# %% [markdown]
# ## 5 · Two drafters, two streams, three offsets
#
# 586 held-out prompts of 128 tokens (200 code, 186 prose, 200 arithmetic), 128 new tokens, greedy; three seeds of each drafter. A ratio
# is taken after summing counts, and intervals come from resampling prompts, since the tokens of one prompt resemble each other. *Offset*
# moves every tap by a layer.

# %%
stored = stored.merge(pd.read_csv(f"{DATA}/drafter_prompts.csv")[["prompt", "uniqueness"]], on="prompt")
by_seed = acceptance.summarize(stored, ["drafter", "seed", "stream", "offset"])
fig, cells = drafter_figures.heatmap_figure(by_seed, drafter_figures.COUNTED)
figures.export(fig, cells, "03_heatmap")
fig

# %%
mean = cells.drop_duplicates(["drafter", "stream", "offset"]).set_index(["drafter", "stream", "offset"])["mean"]
assert {k: round(mean[*k], 2) for k in [("mixture", "mixture", 0), ("mixture", "prefix", 0), ("prefix", "prefix", 0), ("prefix", "mixture", 0)]} == {
    ("mixture", "mixture", 0): 4.52, ("mixture", "prefix", 0): 1.98, ("prefix", "prefix", 0): 4.14, ("prefix", "mixture", 0): 2.49
}  # fmt: skip
layer_cost = [mean[s, s, 0] - mean[s, s, o] for s in ("mixture", "prefix") for o in (-1, 1)]
assert (round(min(layer_cost), 1), round(max(layer_cost), 1)) == (0.4, 1.3)
assert stored.groupby("domain")["prompt"].nunique().to_dict() == {"arithmetic": 200, "code": 200, "prose": 186}
for s in ("mixture", "prefix"):  # every cell as trained is above every other cell, for each seed
    own = cells[(cells["drafter"] == s) & (cells["stream"] == s) & (cells["offset"] == 0)]
    rest = cells[(cells["drafter"] == s) & ~((cells["stream"] == s) & (cells["offset"] == 0))]
    assert own["low"].min() > rest["high"].max()

# %% [markdown]
# By domain, seeds pooled, with 95% intervals over prompts. Fed zeros instead of features, a drafter knows the last token alone: that is
# the floor.

# %%
pooled = pd.concat(
    [
        acceptance.summarize(stored.drop(columns="seed"), ["drafter", "stream", "offset"]).assign(domain="all"),
        acceptance.summarize(stored.drop(columns="seed"), ["drafter", "stream", "offset", "domain"]),
    ]
)
means = pooled[pooled["metric"] == "mean_emitted"]
shown = means.assign(text=[f"{v:.2f} ({a:.2f}-{b:.2f})" for v, a, b in means[["value", "low", "high"]].to_numpy()])
shown = shown.rename(columns={"drafter": "trained on", "stream": "fed"})
display(shown.pivot(index=["trained on", "fed", "offset"], columns="domain", values="text")[["all", "code", "prose", "arithmetic"]])

# %%
value = means.set_index(["drafter", "stream", "offset", "domain"])["value"]
assert [round(value[d, "zeros", 0, "all"], 2) for d in ("mixture", "prefix")] == [1.25, 1.22]
for domain in ("code", "prose", "arithmetic"):
    for d, other in (("mixture", "prefix"), ("prefix", "mixture")):
        assert value[d, d, 0, domain] == max(value[d, s, o, domain] for s in ("mixture", "prefix") for o in (-1, 0, 1))
        assert value[d, other, 0, domain] < 0.8 * value[d, d, 0, domain]
        assert all(value[d, s, o, domain] > value[d, "zeros", 0, domain] for s in ("mixture", "prefix") for o in (-1, 0, 1))

# %% [markdown]
# The wrong stream is not noise: it stays above the floor of 1.25 and 1.22. It holds in every domain, most for arithmetic, which a fitting
# drafter nearly always gets right.
#
# Paired, on the same prompts, in tokens a round: what the setting of training gains over each of three faults.

# %%
rows = []
for d, other in (("mixture", "prefix"), ("prefix", "mixture")):
    own = {"drafter": d, "stream": d, "offset": 0}
    faults = {
        "over the other stream": {**own, "stream": other},
        "over a layer early": {**own, "offset": -1},
        "over a layer late": {**own, "offset": 1},
    }
    for fault, fed in faults.items():
        pair = acceptance.compare(stored, fed, own, ["seed"])
        pair = pair[pair["metric"] == "mean_emitted"]
        rows += [{"trained on": d, "gain": fault, **r} for r in pair.to_dict("records")]
paired = pd.DataFrame(rows)
paired["text"] = [f"{v:.2f} ({a:.2f}-{b:.2f})" for v, a, b in paired[["difference", "difference_low", "difference_high"]].to_numpy()]
display(paired.pivot(index=["trained on", "gain"], columns="seed", values="text"))

# %%
gain = paired.groupby(["trained on", "gain"])["difference"]
assert (paired["difference_low"] > 0.3).all()
assert [round(gain.mean()[d, "over the other stream"], 2) for d in ("mixture", "prefix")] == [2.54, 1.66]
assert round(gain.mean()["prefix", "over a layer early"], 2) == 1.29
assert round(gain.mean()["mixture", "over a layer early"], 2) == 0.42
assert gain.mean()["prefix", "over a layer early"] > 0.75 * gain.mean()["prefix", "over the other stream"]
assert [t - 1 for t in drafters["prefix"].config.taps] == [0, 4, 8]

# %% [markdown]
# For the prefix drafter the wrong stream costs 1.66 tokens a round and one layer early costs 1.29, more than three quarters of that; for
# the mixture drafter 2.54 and 0.42. One layer early is after layers 0, 4 and 8, which commit a block: there the prefix holds least
# (section 2). That fits; it was not tested on its own.
#
# Where in the block is it lost? *Survival*: the share of rounds that accept a position and all before it.

# %%
made = dict(figure_pack.make(["03_survival", "03_conditional"]))
fig, survival = made["03_survival"]
figures.export(fig, survival, "03_survival")
fig

# %%
at0 = by_seed[(by_seed["metric"] == "survival") & (by_seed["position"] == 0) & (by_seed["offset"] == 0)]
right = at0[at0["drafter"] == at0["stream"]]["value"]
wrong = at0[(at0["drafter"] != at0["stream"]) & (at0["stream"] != "zeros")]["value"]
print(
    f"position 0, three seeds of both drafters: as trained {right.min():.2f} to {right.max():.2f}, fed the other {wrong.min():.2f} to {wrong.max():.2f}"
)
assert [round(x, 2) for x in (right.min(), right.max(), wrong.min(), wrong.max())] == [0.78, 0.84, 0.47, 0.63]

# %% [markdown]
# At the first position already: 0.78 to 0.84 as trained, 0.47 to 0.63 fed the other stream. And behind accepted drafts, the
# *conditional* rate:

# %%
fig, conditional = made["03_conditional"]
figures.export(fig, conditional, "03_conditional")
fig

# %%
rate = conditional.set_index(["drafter", "stream", "position"])["value"].sort_index()
spans = [(rate[d, s][:n].min(), rate[d, s][:n].max()) for d, s, n in (("mixture", "prefix", 3), ("prefix", "mixture", 3))]
assert [[round(x, 2) for x in span] for span in spans] == [[0.46, 0.54], [0.57, 0.62]]
as_trained = pd.concat([rate["mixture", "mixture"], rate["prefix", "prefix"]])
assert [round(as_trained.min(), 2), round(as_trained.max(), 2)] == [0.78, 0.88]
assert all(rate[d, d][j] > rate[d, o][j] for d, o in (("mixture", "prefix"), ("prefix", "mixture")) for j in range(7))

# %% [markdown]
# As trained, each position keeps 0.78 to 0.88 of the one before. On the wrong stream the first three keep 0.46 to 0.54 (mixture drafter)
# and 0.57 to 0.62 (prefix drafter). The rise at the end is of the few rounds that get so far.
#
# **Is it an artefact of loops?** Greedy text of a small model loops, and a loop is easy to draft. *Uniqueness* is the share of distinct
# 16-grams in an output. The same means on outputs with 0.85 or more:

# %%
guard = acceptance.beside_low_repetition(stored[stored["offset"] == 0].drop(columns="seed"), ["drafter", "stream", "domain"])
guard = guard[(guard["metric"] == "mean_emitted") & (guard["stream"] != "zeros")]
kept = guard.pivot(index=["drafter", "stream"], columns=["domain", "subset"], values="value")
display(kept[["code", "prose", "arithmetic"]].round(2))
sizes = guard.drop_duplicates(["domain", "subset"]).pivot(index="domain", columns="subset", values="prompts").astype(int)
display(sizes.assign(uniqueness=stored.drop_duplicates("prompt").groupby("domain")["uniqueness"].mean().round(2)))

# %%
quiet = guard[guard["subset"] == "low repetition"].set_index(["drafter", "stream", "domain"])["value"]
for domain in ("code", "prose", "arithmetic"):
    assert quiet["mixture", "mixture", domain] > 1.6 * quiet["mixture", "prefix", domain]
    assert quiet["prefix", "prefix", domain] > 1.2 * quiet["prefix", "mixture", domain]
pair = kept.stack("domain", future_stack=True)
assert round((pair["all"] - pair["low repetition"]).abs().max(), 2) == 0.25
assert sizes["low repetition"].to_dict() == {"arithmetic": 200, "code": 89, "prose": 106}

# %% [markdown]
# It is not: on the 89 code and 106 prose outputs that do not loop, the means move by 0.25 at most and the order stays. (Arithmetic does
# not loop at all.) What follows:
#
# - The stream belongs to the checkpoint. Each drafter is best on its own, and the loss is large both ways.
# - So does the layer. An id that is off by one (engines count "before" or "after" a layer) can cost nearly as much as the wrong stream,
#   and in the published drafter of section 6 it costs more.
# - Nothing here says that the mixture is the fix for every drafter. For this target and recipe the mixture drafter emits more in all
#   three seeds; that is a statement about these six drafters.
#
# ### Move it yourself
#
# Drafter, stream, offset and domain with their intervals, and a log beside them. First the pictures for two settings; where a front end
# is attached (JupyterLab, VS Code) a panel follows, with a box and a file picker for a log.

# %%
panel = drafter_panel.load(f"{DATA}/drafter_counts.csv")
discussed = [
    {"drafter": "mixture", "stream": "prefix", "offset": 0, "log": log_path},
    {"drafter": "prefix", "stream": "prefix", "offset": -1, "domain": "arithmetic"},
]
drafter_panel.show(panel, discussed)

# %%
drawn = [drafter_panel.draw(panel, **{k: v for k, v in d.items() if k != "log"})[1] for d in discussed]
for d, frame in zip(discussed, drawn, strict=True):
    at = frame[(frame["stream"] == d["stream"]) & (frame["offset"] == d["offset"]) & (frame["metric"] == "mean_emitted")]
    assert at["value"].item() == value[d["drafter"], d["stream"], d["offset"], d.get("domain", "all")]

# %% [markdown]
# ## 6 · What others published
#
# One published table changes nothing but stream and layer ids: an EAGLE3 drafter of Kimi-K3, fed both streams at three offsets,
# teacher-forced on 64 chats (`data/published/eagle3_streams.md`). It was trained on the prefix; its ids were given one too low, so that
# offset +1 is the trained layer. Beside our two, in the same form and without the bonus token:

# %%
fig, table = drafter_figures.published_streams_figure(by_seed, published_streams(), drafter_figures.COUNTED)
figures.export(fig, table, "03_published_streams")
fig

# %%
theirs = table[table["panel"] == drafter_figures.PUBLISHED_PANEL].set_index(["stream", "offset"])
assert (theirs.loc[("prefix", 1), "value"], theirs.loc[("prefix", 0), "value"], theirs.loc[("mixture", 1), "value"]) == (
    0.936,
    0.075,
    0.486,
)
assert [round(theirs.loc[k, "share"], 2) for k in (("prefix", 0), ("mixture", 1))] == [0.08, 0.52]
cards = published()
lengths = cards[(cards["metric"] == "mean_emitted") & (cards["includes_bonus"] == "yes")]
assert (len(cards), cards["drafter"].nunique(), len(lengths)) == (110, 10, 61)

# %% [markdown]
# There the other stream keeps 52% of the accepted drafts and a layer early keeps 8%: the offset costs more than the stream. No interval
# was published, and it is one drafter.
#
# Acceptance of published drafters is in `data/published/drafter_acceptance.csv`, 110 figures of 10 drafters with a source each, 61 of
# them mean lengths with the bonus token. What they expect, as far as it is known (the figure of section 7 lays a log over them):

# %%
expects = cards.groupby(["drafter", "stream"], sort=False).agg(figures=("value", "size"), fed=("fed", lambda x: ", ".join(sorted(set(x)))))
display(expects.reset_index().rename(columns={"stream": "expects"}))

# %% [markdown]
# ## 7 · From a log
#
# A server that logs its speculative decoding says all of this, in lines that are easy to misread: each is an interval, so means must not
# be averaged; the rates per position are survival, so 1 + their sum is the mean with the bonus token, and vLLM 0.8.5 left the bonus
# out. `logs.read` takes logs of vLLM, SGLang and ATOM, Prometheus scrapes, JSON and benchmark reports, as files or as pasted lines.
#
# The shipped log is *not* from a server. It is our own counts of the mixture drafter fed the prefix (seed 0), 60 prompts to a line, in
# the form that vLLM prints; no time was measured, so its throughputs are 0.00, and its last line is cut on purpose
# (`data/drafter_logs.md`). Its first two lines, pasted:

# %%
pasted = """
Kimi-K3 aux hidden capture: layers=(2, 6, 10) mode=prefix_only (VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=0)
SpecDecoding metrics: Mean acceptance length: 2.01, Accepted throughput: 0.00 tokens/s, Drafted throughput: 0.00 tokens/s, \
Accepted: 3869 tokens, Drafted: 26824 tokens, Per-position acceptance rate: 0.499, 0.239, 0.133, 0.068, 0.035, 0.020, 0.016, \
Avg Draft acceptance rate: 14.4%
"""
two_lines = logs.read(pasted)
print(f"mean emitted {two_lines.totals.mean_emitted:.2f} in {two_lines.totals.drafts} rounds, stream by the log: {two_lines.mode}")
with open(SHIPPED["K3LAB_LOG"], encoding="utf-8") as f:
    assert pasted.strip().splitlines() == [next(f).strip(), next(f).strip()]
assert (two_lines.mode, two_lines.totals.accepted, two_lines.totals.drafts) == ("prefix", 3869, 26824 // 7)

# %% [markdown]
# And the whole log, yours where `K3LAB_LOG` names one:

# %%
report = logs.read(log_path)
t = report.totals
if t is not None and t.mean_emitted is not None:
    print(
        f"mean emitted {t.mean_emitted:.3f} · drafts {t.drafts} · drafted {t.drafted} · accepted {t.accepted} · stream by the log: {report.mode}"
    )
if t is not None and t.survival:
    print("survival", ", ".join(f"{x:.3f}" for x in t.survival), "· 1 + sum", f"{1 + sum(t.survival):.3f}")
for d in report.diagnoses:
    display(Markdown(f"> {d.text}"))
for u in report.unread:
    print(f"lines {u.lines}, records {u.records}, about other things {u.ordinary}, like acceptance and not understood {u.spec_like}")
    for number, text, why in u.first:
        print(f"  line {number}: {why + ': ' if why else ''}{text[:100]}")

# %%
if shipped_log:
    own = stored[(stored["drafter"] == "mixture") & (stored["seed"] == 0) & (stored["stream"] == "prefix") & (stored["offset"] == 0)]
    assert (t.drafts, t.drafted, t.accepted) == tuple(own[["drafts", "drafted", "accepted"]].sum())
    kept_at = own[[f"accepted_{j}" for j in range(7)]].sum() / own["drafts"].sum()
    assert (abs(kept_at - t.survival) < 0.0005).all()
    assert report.mode == "prefix"
    assert report.diagnosis.kind == "collapse at position 0"
    assert [(u.spec_like, u.first[0][0]) for u in report.unread] == [(1, 12)]

# %% [markdown]
# The number of rounds is not printed; it is worked back from rounded rates. For the shipped log rounds, drafted and accepted come out
# exactly as counted, and survival to the three digits that are printed.

# %%
fig = None
if report.recognised and len(report.counted):
    fig, seen = drafter_figures.log_figure(report.counted, os.path.basename(log_path))
    figures.export(fig, seen, "03_log")
else:
    print("no acceptance figure in this log")
fig

# %%
fig = None
if t is not None and t.mean_emitted is not None and t.mean_emitted >= 1:
    fig, overlay = drafter_figures.overlay_figure(cards, t.mean_emitted, os.path.basename(log_path), t.survival or None)
    figures.export(fig, overlay, "03_overlay")
else:
    print("no mean length in this log")
fig

# %%
if shipped_log:
    assert seen.loc[seen["metric"] == "survival", "value"].tolist() == t.survival
    assert (lengths["value"] < t.mean_emitted).sum() == 2

# %% [markdown]
# The same drafter on its own stream, after the flag is set: `mode=attn_res_stream` in the first line, and the diagnosis changes.

# %%
mended = logs.read(f"{DATA}/drafter_fed_mixture.log")
print(f"mean emitted {mended.totals.mean_emitted:.3f} · position 0 {mended.totals.survival[0]:.3f} · stream by the log: {mended.mode}")
display(Markdown(f"> {mended.diagnosis.text}"))
assert (mended.mode, mended.diagnosis.kind, mended.finding) == ("mixture", "healthy", False)
assert f"{mended.totals.mean_emitted:.2f}" == "4.56"

# %% [markdown]
# ## 8 · The passport of a drafter
#
# What does the engine feed, and what does the checkpoint expect? `passport` holds them against each other, each statement with its
# source. It is a table of what was read in public, no measurement; what it does not know it calls unknown. For the ids in the
# config.json of `modal-labs/Kimi-K3-DFlash`, documented to expect the mixture, by engine, platform and switch:

# %%
config = {
    "architectures": ["DFlashDraftModel"],
    "dflash_config": {"target_layer_ids": [19, 37, 54, 66, 78, 90]},
    "target_hidden_size": 7168,
}
FLAG = "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"
asked = [
    ("vllm", "0.33.0", "cuda", {FLAG: "0"}),
    ("vllm", "0.33.0", "cuda", {FLAG: "1"}),
    ("vllm", "0.33.0", "rocm", {FLAG: "1"}),
    ("sglang", "0.5.23", "cuda", {}),
]
found = [passport(config, *q, checkpoint="modal-labs/Kimi-K3-DFlash") for q in asked]
rows = [
    {
        "engine": f"{e} {v}",
        "platform": p,
        "flag": env.get(FLAG, ""),
        "fed": r.fed["stream"],
        "expected": r.expected["stream"],
        "verdict": r.verdict,
    }
    for (e, v, p, env), r in zip(asked, found, strict=True)
]
display(pd.DataFrame(rows))
print("warning:", found[2].warnings[0])
display(found[2].statements)

# %%
assert [r.verdict for r in found] == ["mismatch", "match", "mismatch", "match"]
assert "silent no-op" in found[2].warnings[0]
disputed = passport({"model_type": "dspark", "target_layer_ids": [7, 23, 51, 67, 83]}, "vllm", "0.33.0", "cuda", {FLAG: "0"})
assert (disputed.verdict, disputed.expected["stream"]) == ("cannot tell", "disputed")

# %% [markdown]
# On ROCm the switch changes nothing in the versions read (vLLM PR 56434). For `RadixArk/Kimi-K3-DSpark` the sources disagree on what the
# checkpoint expects; the passport says so, and the answer is a comparison on your own prompts, as in section 5.
#
# ## 9 · Is the difference between two evaluations real?
#
# A faulty stream costs speed alone, as the walk is lossless. Where answers change by more than near ties (an engine may round the step
# that verifies and the step of plain decoding differently), something else is wrong. Two lm_eval tables of vLLM PR 50649 (notebook 01),
# before and with the PR: `evaldelta` finds the number of questions from the printed standard errors.

# %%
table = f"{DATA}/published/vllm_pr_50649_gsm8k.csv"
delta = evaldelta.compare(evaldelta.read_table(f"{table}:before"), evaldelta.read_table(f"{table}:PR"))
columns = [
    "filter",
    "n_shot",
    "before",
    "after",
    "change",
    "change_low",
    "change_high",
    "z",
    "wrong_before",
    "wrong_after",
    "n_before",
    "verdict",
]
display(delta.rows[columns].round(4))
for note in delta.notes:
    print("-", note)

# %%
row = delta.rows.set_index("filter").loc["flexible-extract"]
assert (row["wrong_before"], row["wrong_after"], row["n_before"], row["verdict"]) == (145, 41, 1319, "better")
assert row["z"] > 7.5
assert row["change_low"] > 0.05

# %% [markdown]
# 145 wrong answers of 1319 before, 41 with the PR: far beyond chance. The two filters score the same answers and are not independent.
#
# ## 10 · On your own server
#
# ```bash
# python -m k3lab acceptance server.log before.prom after.prom --json
# python -m k3lab passport config.json --engine vllm --version 0.33.0 --platform rocm --env VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1 --log server.log
# python -m k3lab evaldelta before.txt after.txt
# python -m k3lab figures 03_log 03_overlay --log server.log --out out
# K3LAB_LOG=server.log make run NOTEBOOKS=03    # this notebook on it, figures and tables in out/
# ```
#
# For the streams of your own model: captures of kind `attn_res`, one per tap (README, "Take a capture from vLLM"), then
# `K3LAB_CAPTURE=captures/ make run NOTEBOOKS=03`.
#
# ## What is evidence here, and what is not
#
# | statement | evidence |
# |---|---|
# | prefix and mixture differ, most after a commit | tiny model, 96 tokens, this CPU; no activation of Kimi-K3 itself was at hand |
# | the kernel computes the mixture | float64 reference, the recorded result, the interpreter here; tests: an H200 and fla-core |
# | the walk is lossless | 12 live walks here; tests: greedy and sampled, stop strings, roll-back |
# | the wrong stream or layer costs acceptance, both ways | six drafters, 586 prompts, counted on an H200; a slice counted again here, equal to the last count |
# | it is the direction of the fault, not its size at Kimi-K3 | **the sizes do not carry over**: one tiny target, one recipe, one kind of drafter, greedy |
# | the published drafter loses more by a layer than by the stream | quoted; 64 chats, no interval |
# | what an engine feeds, what a checkpoint expects | public sources as read, each named; not measured |
# | a low position 0 in a log means a wrong stream | **not by itself**: a drafter that is weak on the text looks the same. It says where to look |
# | acceptance on ROCm | **not measured.** Nothing ran on an AMD card |
#
# **What would change our mind:** a drafter of Kimi-K3 that accepts as much on the stream it was not trained on, on the same prompts and at
# the right layer; or counts of a server whose log names one stream while its features are the other.
