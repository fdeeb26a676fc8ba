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
# # 00 · Start here
#
# Three faults of Kimi-K3 in serving engines, each in one picture. None of them raises an error. Words are explained in the
# [glossary](GLOSSARY.md), results to act on are listed in the [findings](FINDINGS.md).

# %%
import pandas as pd
from IPython.display import Markdown, display

from k3lab import figure_pack, figures, inputs, provenance
from k3lab.drafter import logs

print(provenance.versions())

# %% [markdown]
# ## The input
#
# The pictures are of the shipped data. Set `K3LAB_CAPTURE` or `K3LAB_LOG` to a file of yours and run this again: it is looked at here, and
# the notebook to open is named.

# %%
capture_path, log_path = inputs.chosen("K3LAB_CAPTURE"), inputs.chosen("K3LAB_LOG")
if capture_path:
    capture, _ = inputs.examined(capture_path)
    print(
        "open:",
        {"kda": "01 (or 02 for its gate)", "attn_res": "03"}.get(capture.kind, f"none: kind {capture.kind} is for the command line"),
    )
if log_path:
    found = logs.read(log_path)
    print("log:", found.diagnosis.text if found.recognised else "no acceptance figures in it; if it is autotuning output, open 02")
if not capture_path and not log_path:
    print("K3LAB_CAPTURE and K3LAB_LOG are not set")

# %% [markdown]
# ## 1 · Decodes come back NaN
#
# Decodes of a mixed batch went through the KDA chunk kernel as sequences of length 1 (vLLM PR 50649). The kernel works on tiles of 64
# rows; what the 63 rows without a token hold is undefined. Set to NaN, they reach the result at every length but multiples of 64.

# %%
made = dict(figure_pack.make(["00_nan", "00_race", "00_drafter"]))
fig, lengths = made["00_nan"]
figures.export(fig, lengths, "00_nan")
fig

# %%
clean = lengths[(lengths["padding"] == "nan") & (lengths["first_stage"] == "")]["length"].tolist()
assert clean == [64, 128]

# %% [markdown]
# Measured on this CPU, with the torch stages and NaN set on purpose. Next: [01, NaN on the decode path](01_nan_decode_path.ipynb).
#
# ## 2 · A config that timing may pick is racy
#
# `recompute_w_u_fwd_kernel` with `num_stages=4` silently gives values of about 1e38 on gfx950 (same PR). Read from compiled code,
# without an AMD card: the wait before the reads waits for too little.

# %%
fig, card = made["00_race"]
figures.export(fig, card, "00_race")
fig

# %%
assert set(card[card["verdict"] == "race"]["config"]) == {"w2s3", "w2s4", "w4s3", "w4s4", "w8s4"}

# %% [markdown]
# Cross-compiled and analysed on a CPU. Next: [02, the racy autotune config](02_racy_autotune_config.ipynb).
#
# ## 3 · The drafter reads the wrong stream
#
# A drafter trained on one hidden-state stream and fed another of the same shape (vLLM PRs 50487, 56434). Acceptance drops, and
# nothing else tells.

# %%
fig, cells = made["00_drafter"]
figures.export(fig, cells, "00_drafter")
fig

# %%
mean = cells.groupby(["drafter", "stream", "offset"])["value"].mean()
own = [mean[s, s, 0] for s in ("mixture", "prefix")]
other = [mean["mixture", "prefix", 0], mean["prefix", "mixture", 0]]
print("fed what it was trained on:", [f"{x:.2f}" for x in own], "· fed the other stream:", [f"{x:.2f}" for x in other])
assert min(own) > 1.5 * max(other)

# %% [markdown]
# Next: [03, drafter acceptance](03_drafter_acceptance.ipynb).
#
# ## What to open next

# %%
display(
    Markdown(
        figures.markdown_table(
            pd.DataFrame(
                [
                    ("garbage or repeated tokens under load", "01", "`python -m k3lab check` and `nan` on a capture"),
                    ("values of 1e38, results that change between runs", "02", "`python -m k3lab lint` on the Triton cache, then `races`"),
                    ("speculative decoding slower than its card says", "03", "`python -m k3lab acceptance` on the log, then `passport`"),
                    ("a number changed between two evaluations", "03", "`python -m k3lab evaldelta`"),
                ],
                columns=["you see", "notebook", "or from a shell"],
            )
        )
    )
)
