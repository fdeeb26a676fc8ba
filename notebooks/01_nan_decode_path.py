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
# # 01 · NaN on the decode path
#
# **Question.** In a mixed batch of decodes and prefills, Kimi-K3 on ROCm returned garbage: repeated tokens, lost accuracy. vLLM
# PR 50649 found that decodes went through the *chunk* kernel of Kimi Delta Attention (KDA) as sequences of length 1 and came
# back NaN. Why does length 1 matter, which stage breaks, how far does it spread, and what does the fix close?
#
# **Answer in four lines.**
# 1. The chunk kernel works on tiles of 64 token rows. Rows past the end of a sequence are loaded masked, and a masked load
#    without a fill value is *undefined* in Triton. [2](#2-·-The-mixed-batch,-as-the-chunk-kernel-sees-it)
# 2. The arithmetic hides an undefined row as long as it is finite, because every such row meets a zero. `0 * NaN` is NaN.
#    [5](#5-·-Which-lengths-are-hit)
# 3. If the row is NaN, the first stage to break is `recompute_w_u` at length 1 and `inverse` at most other lengths; the state
#    of that sequence is lost for good. Its neighbours are untouched. [6](#6-·-Where-it-enters,-and-what-it-takes)
# 4. Splitting the batch saves the decodes. A prefill with a ragged last chunk stays exposed. Zero-filling the masked rows
#    closes both. [3](#3-·-The-replay,-by-both-routes)
#
# The cells run on a CPU, on activations of a small trained model of the Kimi-K3 architecture (trained on an H200; so were the
# chunk_all counts of section 8). Undefined rows are *set* to NaN. What that does and does not prove is said at the end.

# %%
import os

import pandas as pd
import torch
from IPython.display import Markdown, display

from k3lab import figure_pack, figures, inputs, nan_figures, nonfinite, provenance
from k3lab.capture import Capture
from k3lab.kda import stages
from k3lab.kda.layer import kda_layer_step, plan
from k3lab.panels import nan_panel
from k3lab.testing import error_budget, low_precision_reference
from k3lab.tiny import accuracy, data, model, serving

torch.set_num_threads(1)  # small tensors: more threads wait for each other, longest on a busy machine
print(provenance.versions())

# %% [markdown]
# ## The input
#
# Set `K3LAB_CAPTURE` to a file of your own (a path from this folder, or from the repository's) and run the notebook again;
# section 9 says how to take one from a server. The assertions about the shipped capture are skipped then.

# %%
DATA = "../data"
SHIPPED = f"{DATA}/captures/mixed_split_layer1.safetensors"
path = inputs.chosen("K3LAB_CAPTURE", SHIPPED)
shipped = path == SHIPPED
capture, report = inputs.examined(path)
call = capture.kda_call()
print("layer", call.layer, "· step", call.step, "· lengths:", call.lengths.tolist(), "· decodes first:", call.num_decodes)
print("q, k, v:", call.q.dtype, list(call.q.shape), "· state", list(call.state_vk().shape), call.state_vk().dtype)

# %%
if shipped:
    assert call.num_decodes == 5
    assert call.lengths.tolist() == [1, 1, 1, 1, 1, 1, 63, 64, 65, 200]
    assert not (report["severity"] == "error").any()

# %% [markdown]
# ## 1 · What was seen in serving
#
# Nothing raises. A request starts well, then its text turns into one token repeated to the end. That token is what `argmax`
# returns for a row of NaN logits: id 0 in vLLM, 163839 (the pad id) in SGLang. So a token stream alone is a first triage:

# %%
for ids in ([917, 26, 4401] + [0] * 40, [917, 26, 4401] + [163839] * 40, [917, 26, 4401] + [220] * 40):
    print(nonfinite.triage_tokens(ids)["text"])

# %% [markdown]
# The evaluation that the PR published (quoted, not measured here: gsm8k on MI355X, 128 requests at a time):

# %%
published = pd.read_csv(f"{DATA}/published/vllm_pr_50649_gsm8k.csv")
display(Markdown(figures.markdown_table(published)))

# %% [markdown]
# ## 2 · The mixed batch, as the chunk kernel sees it
#
# A continuous-batching engine puts the decodes first and the prefills behind them, all packed along one token axis with
# `cu_seqlens`. The chunk kernel cuts every sequence into tiles of 64 rows. A decode is a tile with one row.

# %%
fig, tiles = nan_figures.tiles_figure(call)
figures.export(fig, tiles, "01_tiles")
fig

# %%
if shipped:
    assert (len(tiles), int((tiles["rows"] < 64).sum()), int((64 - tiles["rows"]).sum())) == (14, 9, 498)

# %% [markdown]
# ## 3 · The replay, by both routes
#
# `chunk_all` is the fault: every sequence through the chunk kernel. `split` is the fix: decodes to the recurrent kernel, the
# prefill tail to the chunk kernel with rebased `cu_seqlens`, outputs stitched back in order. (A capture with speculative rows
# takes `gather_split` in its place, section 7.)

# %%
fixed = "split" if call.spec_mask is None or not call.spec_mask.any() else "gather_split"
for route in ("chunk_all", fixed):
    print(f"{route:10s}", plan(call, route) if call.num_sequences <= 20 else [(k, len(s)) for k, s in plan(call, route)])

# %%
outcome = nan_figures.routes_frame(call, ("chunk_all", fixed))
fig = nan_figures.routes_figure(outcome, f"{os.path.basename(path)}, {call.num_sequences} sequences, {call.q.dtype}")
figures.export(fig, outcome, "01_routes")
fig

# %%
lost = outcome[outcome["first_stage"] != ""].groupby(["route", "padding"])["sequence"].agg(list).to_dict()
if shipped:
    assert lost["chunk_all", "nan"] == lost["chunk_all", "undefined"] == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert lost["split", "nan"] == lost["split", "undefined"] == [5, 6, 8, 9]
    assert ("chunk_all", "zero") not in lost
    assert ("split", "zero") not in lost
    assert (outcome["state_lost"] == (outcome["first_stage"] != "")).all()

# %% [markdown]
# In the shipped capture, with NaN in the masked rows, `chunk_all` loses nine of ten sequences; the one that lives is the prefill of exactly 64 tokens.
# `split` saves the five decodes and still loses the four prefills with a ragged last chunk, the one of a single token among
# them. With zeros in the masked rows both routes are finite. Every sequence that is hit loses its state too, so it never
# recovers.
#
# Finite is not yet right. Both routes with zero padding, and the decodes' own path, against the float64 recurrence:

# %%
truth = nonfinite.truth(call)
low = low_precision_reference(call, call.q.dtype)
rows = []
for route in ("chunk_all", fixed):
    result = kda_layer_step(call, route, padding="zero")
    for name, got in (("o", result.o), ("final_state", result.final_state)):
        sound = torch.isfinite(truth[name]).flatten(1).all(1)  # the inputs of another capture may hold NaN themselves
        if not sound.any():
            print(f"{route}: no row of {name} is finite in float64: the inputs of this capture are not finite")
            continue
        b = error_budget(name, got[sound], truth[name][sound], low[name][sound], call.q.dtype)
        rows.append({"route": route, "tensor": name, "max error": b.error, "budget": b.budget, "rms error": b.rms_error, "within": b.ok})
agreement = pd.DataFrame(rows)
assert not shipped or agreement["within"].all()
agreement

# %% [markdown]
# ## 4 · Observed, and exposed
#
# The same tools on a capture that already holds NaN (`mixed_chunk_all_nan_layer0`: recorded with the faulty route and masked
# rows set to NaN). What was *recorded* is kept apart from what *could* happen under NaN padding:

# %%
sick = Capture.load(f"{DATA}/captures/mixed_chunk_all_nan_layer0.safetensors")
seen = nonfinite.investigate(sick)
print("lengths: ", sick.kda_call().lengths.tolist())
print(
    "observed: not finite in sequences", seen["observed"]["nonfinite_sequences"], "· away from float64:", seen["observed"]["away_sequences"]
)
print("observed first:", {k: seen["first"][k] for k in ("tensor", "sequence", "row", "head", "channel", "value")})
print("finite rows against float64: relative error", f"{seen['relative_error']:.1e}")
for route, e in seen["exposed"].items():
    print(f"exposed by {route}: sequences", e["sequences"])
assert seen["observed"]["nonfinite_sequences"] == [0, 1, 2, 3, 4, 5, 7]
assert seen["observed"]["away_sequences"] == []
assert seen["exposed"]["split"]["sequences"] == [5, 7]

# %% [markdown]
# ## 5 · Which lengths are hit
#
# One sequence at a time, every length from 1 to 130, coloured by the first stage that is not finite. Only length % 64 matters.
# torch has no undefined value, so its "undefined" is NaN too; on a GPU what an undefined row holds depends on the compiled
# code (notebook 02 reads it from gfx950 assembly).

# %%
lengths = nonfinite.length_map(range(1, 131))
fig = nan_figures.length_map_figure(lengths)
figures.export(fig, lengths, "01_length_map")
fig

# %%
nan = lengths[lengths["padding"] == "nan"].set_index("length")["first_stage"]
assert (lengths[lengths["padding"] == "zero"]["first_stage"] == "").all()
assert nan[nan == ""].index.tolist() == [64, 128]
assert nan[:64][nan[:64] == "recompute_w_u"].index.tolist() == [1, 2, 16, 32, 48]
assert all(nan[n] == nan[n + 64] for n in range(1, 67))

# %% [markdown]
# Lengths 1, 2, 16, 32 and 48 go first in `recompute_w_u`. The others go one stage earlier, in `inverse`: forward substitution
# on a 16-row block multiplies by the whole block, masked rows included, as soon as a block has 3 to 15 rows, and the merge of
# the blocks does so when a later block is cut. At 1 or 2 rows, or at a whole number of blocks, `inverse` has nothing to do
# with a masked row.
#
# ## 6 · Where it enters, and what it takes
#
# A shortest sequence (in the shipped capture the decode in sequence 0), stage by stage. A column is a tensor, a row a row of its 64-row tile.


# %%
fig = None
if nan_figures.chunked(call, "chunk_all"):
    shortest = nan_figures.chunked(call, "chunk_all")[0]
    first_decode = nan_figures.provenance_frame(call, "chunk_all", "nan", shortest)
    ran = f"{os.path.basename(path)}, route chunk_all, padding nan"
    fig = nan_figures.provenance_figure(first_decode, shortest, int(call.lengths[shortest]), ran)
    figures.export(fig, first_decode, "01_provenance_decode")
else:
    print("no sequence of this capture goes through the chunk kernel")
fig

# %% [markdown]
# And the longest prefill, by the *fixed* route: in the shipped capture its last tile has 8 rows.

# %%
fig = None
if nan_figures.chunked(call, fixed):
    longest = nan_figures.chunked(call, fixed)[-1]
    prefill = nan_figures.provenance_frame(call, fixed, "nan", longest)
    ran = f"{os.path.basename(path)}, route {fixed}, padding nan"
    fig = nan_figures.provenance_figure(prefill, longest, int(call.lengths[longest]), ran)
    figures.export(fig, prefill, "01_provenance_prefill")
else:
    print(f"no sequence of this capture goes through the chunk kernel by {fixed}: it has no prefill")
fig

# %% [markdown]
# In words, from the same replay, and what each sequence lost first:

# %%
trace = nonfinite.trace(call, kda_layer_step(call, "chunk_all", padding="nan"))
print(trace)
display(trace.stages.drop_duplicates("sequence").reset_index(drop=True))

# %%
if shipped:
    bad = first_decode[first_decode["value"] == "not finite"]["tensor"].unique().tolist()
    assert bad == ["w", "u", "v_new", "final_state", "o"]
    taken = prefill[prefill["value"] == "not finite"]["tensor"].unique().tolist()
    assert taken == ["A", "w", "u", "v_new", "final_state", "o"]
    assert (trace.first.stage, trace.first.sequence, trace.first.length) == ("inverse", 6, 63)
    assert trace.neighbours_finite == [7]
    assert trace.state_lost == trace.nonfinite_sequences == [0, 1, 2, 3, 4, 5, 6, 8, 9]

# %% [markdown]
# **Is one stage to blame?** NaN in the masked rows of one stage at a time, zeros in all others, and the reverse. Sequences
# whose output or state is lost:

# %%
one = {s: nonfinite.trace(call, kda_layer_step(call, "chunk_all", padding={s: "nan"})).nonfinite_sequences for s in stages.STAGES}
rest = {
    s: nonfinite.trace(call, kda_layer_step(call, "chunk_all", padding={t: "nan" for t in stages.STAGES if t != s})).nonfinite_sequences
    for s in stages.STAGES
}
blame = pd.DataFrame({"NaN in this stage alone": pd.Series(one).map(len), "zero in this stage alone": pd.Series(rest).map(len)})
blame.index.name = "stage"
blame

# %%
if shipped:
    assert blame["NaN in this stage alone"].to_dict() == {
        "gate_cumsum": 0, "intra": 0, "inverse": 2, "recompute_w_u": 9, "state": 9, "output": 9,
    }  # fmt: skip
    assert (blame["zero in this stage alone"] == 9).all()

# %% [markdown]
# In the shipped capture three stages each suffice to lose all nine sequences, and `inverse` loses two; filling any one stage with zeros saves
# nothing while the others stay undefined. `gate_cumsum` and `intra` are safe by construction: a cumulative sum runs forward,
# and the causal mask there is a *select*. (A multiply by the mask would not be: `0 * NaN`.)
#
# ### Move it yourself
#
# Any batch cut from the capture, any stage. First the pictures for three settings: five decodes and a prefill of 200 tokens, by
# `chunk_all`, the tensor `u` of one head, as a map of its rows and channels; the same around the first value that is not finite; and
# the same batch by `split`. Where a front end is attached (JupyterLab, VS Code) a panel follows them: number of decodes, prefill length,
# route, padding, stage, head, and a window of rows and channels to zoom into. A batch is cut from this notebook's input, so on your
# capture it is yours.

# %%
discussed = [
    {"decodes": 5, "prefill": 200, "route": "chunk_all", "padding": "nan", "tensor": "u"},
    {"decodes": 5, "prefill": 200, "route": "chunk_all", "padding": "nan", "tensor": "u", "zoom": "first"},
    {"decodes": 5, "prefill": 200, "route": "split", "padding": "nan", "tensor": "u"},
]
nan_panel.show(call, os.path.basename(path), discussed)

# %%
if shipped:
    by_chunk, _, by_split = (nan_panel.draw(call, **values)[1] for values in discussed)
    assert by_chunk["rows_not_finite"].tolist() == [1, 1, 1, 1, 1, 8]
    assert by_chunk[["first_row", "first_channel"]].to_numpy().tolist() == [[0, 0]] * 5 + [[192, 0]]
    assert by_split["kernel"].tolist() == ["recurrent"] * 5 + ["chunk"]
    assert by_split["rows_not_finite"].tolist() == [0, 0, 0, 0, 0, 8]

# %% [markdown]
# The decodes lose their one row, and the prefill the 8 rows of its last tile, which starts at row 192. By `split` the decodes have no
# `u` at all, as the recurrent kernel has no such stage; the 8 rows of the prefill stay lost.
#
# ## 7 · A batch the fix cannot cut
#
# With speculative decoding the rows of one batch are interleaved: speculative rows between plain ones. A cut at `num_decodes`
# does not apply. The faulty route sends the plain length-1 rows to the chunk kernel, with no real prefill needed; the third
# route gathers rows first, then splits.

# %%
spec = Capture.load(f"{DATA}/captures/speculative_interleaved.safetensors").kda_call()
print("lengths:    ", spec.lengths.tolist())
print("speculative:", spec.spec_mask.int().tolist())
for route in ("chunk_all", "gather_split"):
    for padding in ("nan", "zero"):
        result = kda_layer_step(spec, route, padding=padding)
        print(f"{route:12s} padding {padding:4s} lost: {nonfinite.trace(spec, result).nonfinite_sequences}")

# %%
plain_single = [n for n, (k, s) in enumerate(zip(spec.lengths.tolist(), spec.spec_mask.tolist(), strict=True)) if k == 1 and not s]
ragged = [n for n, (k, s) in enumerate(zip(spec.lengths.tolist(), spec.spec_mask.tolist(), strict=True)) if k % 64 and not s]
assert plain_single
assert nonfinite.trace(spec, kda_layer_step(spec, "chunk_all", padding="nan")).nonfinite_sequences == ragged
saved = nonfinite.trace(spec, kda_layer_step(spec, "gather_split", padding="nan")).nonfinite_sequences
assert saved == [n for n in ragged if n not in plain_single]
for route in ("chunk_all", "gather_split"):
    assert nonfinite.trace(spec, kda_layer_step(spec, route, padding="zero")).finite

# %% [markdown]
# ## 8 · What the model then says
#
# The tiny Kimi-K3 (11.8M parameters, byte vocabulary, trained on code, prose and arithmetic word problems; card in
# `data/tiny_k3.md`) serves held-out arithmetic problems, several at a time. First a live slice of twelve problems, greedy. The
# undefined rows of a workgroup (sequence, head, layer, launch) are NaN with probability p, and zero otherwise.

# %%
net = model.load(f"{DATA}/tiny_k3.safetensors")
problems = data.arithmetic_prompts(12, seed=7)
settings = dict(max_seqs=6, arrivals=serving.poisson_arrivals(12, 0.25, 7), max_new=64)
served, rows = {}, []
for route in ("chunk_all", "split"):
    for p in (0.0, 0.005, 1.0):
        outputs, steps = serving.serve(net, [x.tokens for x in problems], route=route, p=p, **settings)
        correct = sum(data.is_correct(o.tokens, x.problem) for o, x in zip(outputs, problems, strict=True))
        served[route, p] = outputs
        rows.append(
            {"route": route, "p": p, "correct": correct, "of": len(problems), "mixed steps": int(steps["mixed"].sum()), "steps": len(steps)}
        )
live = pd.DataFrame(rows)
live

# %% [markdown]
# One request of that slice, by both routes at p = 0.005: it starts well, then its state is lost and every byte is id 0.

# %%
broken = [n for n, o in enumerate(served["chunk_all", 0.005]) if nonfinite.triage_tokens(o.tokens)["suspicious"]]
one_request = next(n for n in broken if nonfinite.triage_tokens(served["chunk_all", 0.005][n].tokens)["start"] > 3)
print("question :", repr(data.decode(problems[one_request].tokens.tolist())[-90:]))
for (route, p), outputs in served.items():
    if p == 0.005:
        print(f"{route:9s}:", repr(data.decode(outputs[one_request].tokens))[:110])
        print("          ", nonfinite.triage_tokens(outputs[one_request].tokens)["text"])

# %%
count = live.set_index(["route", "p"])["correct"]
assert count["chunk_all", 0.0] == count["split", 0.0] == 12
assert count["chunk_all", 1.0] == count["split", 1.0] == 0
assert count["split", 0.005] > count["chunk_all", 0.005]
assert data.is_correct(served["split", 0.005][one_request].tokens, problems[one_request].problem)
assert nonfinite.triage_tokens(served["chunk_all", 0.005][one_request].tokens)["engine"] == "vLLM"
assert [o.tokens for o in served["chunk_all", 0.0]] == [o.tokens for o in served["split", 0.0]]

# %% [markdown]
# If undefined rows were *always* NaN (p = 1), hardly anybody could be served by either route: a prompt ends in a ragged chunk unless
# its length is a multiple of 64. The
# PR lost some accuracy, not all, so the rows were bad only sometimes. Let p be the chance that the undefined rows of one
# workgroup are NaN. By `chunk_all` a request is exposed at its own ragged prefill and at every mixed step it decodes in; by `split` only at its prefill.
#
# Counts below: exact match on held-out problems, 128 requests at a time, each (route, p) served for real; made by
# `data/measure_accuracy.py`, card in `data/accuracy.md`. The line through the points is measured; "expected" in the table is
# the mean of (1 - p)^exposures over requests, from exposure counts alone.

# %%
fig, acc = dict(figure_pack.make(["01_accuracy"]))["01_accuracy"]
display(acc[["series", "p", "correct", "total", "rate", "low", "high", "expected"]])

# %%
figures.export(fig, acc, "01_accuracy")
fig

# %%
drop = published[(published["n_shot"] == 5) & (published["filter"] == "flexible-extract")].set_index("run")["exact_match"]
ratio = drop["before"] / drop["PR"]
p_drop = accuracy.p_of_ratio(acc, "chunk_all", ratio)
clean = acc[(acc["p"] == 0) & (acc["padding"] != accuracy.NEVER)].set_index("route")
zero = acc[acc["padding"] == accuracy.NEVER].set_index("route")
print(f"ratio in the PR {drop['before']} / {drop['PR']} = {ratio:.4f}; chunk_all loses that share at p = {p_drop:.1e} here")
print("median exposed workgroups per request:", clean["exposures"].to_dict())
assert (zero["rate"] > 0.98).all()
assert clean.loc["chunk_all", "exposures"] > 20 * clean.loc["split", "exposures"]
worst = accuracy.disagreement(acc)
print(f"measured against expected, all {len(acc)} points: smallest p-value {worst:.2f} after Bonferroni")
assert worst > 0.05, "a measured rate is away from what its exposure counts predict"

# %% [markdown]
# **Read it with care.** The mark says: *if* every lost answer came from NaN in undefined rows, and *if* a gsm8k request at
# 128-way concurrency were exposed as often as a request here, the published drop would need p at the mark. A gsm8k answer is
# longer and Kimi-K3 has 69 KDA layers of 96 heads, so its exposure is far larger and the p that explains the drop far smaller.
# And the PR changed two things at once, the routing of decodes and the autotune configs (notebook 02), so its drop is not the
# routing's alone. What carries over is the shape: by the chunk route exposure grows with every decoded token, by the split
# route it does not, and zero padding is flat.
#
# ## 9 · On your own capture
#
# ```bash
# python -m k3lab check my_capture.safetensors            # what is wrong with the file, before anything runs
# python -m k3lab nan my_capture.safetensors              # observed, apart from exposed
# python -m k3lab nan my_capture.safetensors --route split --padding zero --json
# K3LAB_CAPTURE=my_capture.safetensors make run NOTEBOOKS=01    # this notebook on it, figures and tables in out/
# ```
#
# To take one from a running vLLM, wrap the KDA functions in the module that calls them; README, "Take a capture from vLLM".
#
# ## What is evidence here, and what is not
#
# | statement | evidence |
# |---|---|
# | which stage breaks first at which length, if masked rows are NaN | the torch stages, on this CPU, against float64; the Triton kernels give the same map (tests: interpreter and H200) |
# | NaN stays in its sequence and takes its state | the same |
# | the split route saves decodes, not ragged prefills; zero padding closes both | the same |
# | masked rows *can* be anything | Triton's language: `tl.load(ptr, mask=m)` without `other` |
# | masked rows *were* NaN on the failing server | **not shown here.** Nothing ran on an AMD card. Notebook 02 reads compiled gfx950 code: on one copy path the rows stay what an earlier workgroup left in LDS, on the others they are zero |
# | on NVIDIA the fault does not show | H200, Triton 3.6.0: masked lanes are zero-filled there |
# | accuracy against p | served for real by the tiny model, with p *set*, not observed |
#
# **What would change our mind:** a capture from the failing server whose recorded `o` is finite for length-1 sequences by the
# chunk route, or gfx950 code of that build in which no masked row reaches a dot product uninitialised.
