"""Make data/drafter_fed_prefix.log, data/drafter_fed_mixture.log and their card: our own counts in the form of vLLM's log lines.

    python data/make_drafter_logs.py            a second, no GPU; no server ran

Counts are those of drafter_counts.csv for the drafter that was trained on the mixture, seed 0, at offset 0: fed the prefix in one log
and the mixture in the other. The prompts come in one shuffled order, so many to an interval. A line is what vLLM 0.10.2 to 0.33
prints for such an interval (vllm/v1/spec_decode/metrics.py, SpecDecodingLogging), without a time before it; where no time has passed
it prints throughputs of 0.00, and no time was measured here. The last line of the first log is cut in two, as a pasted log's often is.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from k3lab import __version__
from k3lab.drafter import dflash
from k3lab.drafter.acceptance import positions
from k3lab.provenance import sha256
from k3lab.tiny.cards import write_text

HERE = Path(__file__).parent
DRAFTER, SEED, PER_INTERVAL = "mixture", 0, 60
MODES = {"prefix": ("prefix_only", 0), "mixture": ("attn_res_stream", 1)}


def metrics_line(counts: pd.DataFrame) -> str:
    """vLLM's line for the summed counts of an interval."""
    n = counts.sum()
    rates = ", ".join(f"{n[f'accepted_{j}'] / n['drafts']:.3f}" for j in range(positions(counts)))
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + n['accepted'] / n['drafts']:.2f}, Accepted throughput: 0.00 tokens/s, "
        f"Drafted throughput: 0.00 tokens/s, Accepted: {n['accepted']} tokens, Drafted: {n['drafted']} tokens, "
        f"Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {100 * n['accepted'] / n['drafted']:.1f}%"
    )


def log(counts: pd.DataFrame, stream: str, taps: tuple[int, ...]) -> str:
    """The log of one stream: what the drafter is fed, in vLLM's layer ids (tap + 1), then a line per interval."""
    mode, flag = MODES[stream]
    layers = ", ".join(str(t + 1) for t in taps)
    lines = [f"Kimi-K3 aux hidden capture: layers=({layers}) mode={mode} (VLLM_KIMI_K3_AUX_ATTN_RES_STREAM={flag})"]
    numbers = counts.set_index("prompt").drop(columns=["drafter", "seed", "stream", "offset", "domain"])
    order = np.random.default_rng(0).permutation(np.sort(numbers.index))
    lines += [metrics_line(numbers.loc[order[i : i + PER_INTERVAL]]) for i in range(0, len(order), PER_INTERVAL)]
    return "\n".join(lines) + "\n"


def main() -> None:
    counts = pd.read_csv(HERE / "drafter_counts.csv")
    counts = counts[(counts["drafter"] == DRAFTER) & (counts["seed"] == SEED) & (counts["offset"] == 0)]
    taps = dflash.load(HERE / f"drafter_{DRAFTER}.safetensors").config.taps
    rows = []
    for stream in MODES:
        chosen = counts[counts["stream"] == stream]
        text = log(chosen, stream, taps)
        if stream == "prefix":
            text += text.splitlines()[-1][:60] + "\n"
        path = HERE / f"drafter_fed_{stream}.log"
        write_text(path, text)
        rows.append(f"| {path.name} | {stream} | {chosen['drafts'].sum()} | {chosen['emitted'].sum()} | `{sha256(path)}` |")
    card = [
        "# drafter_fed_prefix.log, drafter_fed_mixture.log: our own counts in the form of a vLLM log", "",
        "| | |", "|---|---|",
        f"| what | the {DRAFTER} drafter, seed {SEED}, offset 0, {len(chosen)} prompts, {PER_INTERVAL} to a line in a shuffled order |",
        "| form | vLLM 0.10.2 to 0.33; nothing stands before a line; throughputs 0.00, as where no time passed |",
        "| measured | the counts of drafter_counts.csv. No vLLM and no server ran |",
        "| on purpose | the last line of drafter_fed_prefix.log repeats the beginning of the one before, cut off |",
        f"| made by | `python data/make_drafter_logs.py`, k3lab {__version__} |",
        f"| source | drafter_counts.csv, sha256 `{sha256(HERE / 'drafter_counts.csv')}` |",
        "| licence | this project's |", "",
        "| file | fed | draft rounds | emitted | sha256 |", "|---|---|---|---|---|", *rows,
    ]  # fmt: skip
    write_text(HERE / "drafter_logs.md", "\n".join(card) + "\n")


if __name__ == "__main__":
    main()
