"""Benchmark of log reading: python bench/logs.py [--size MB] [--runs N]

Five generated logs of 50 MB each, read from disk by one process:
  vLLM      a SpecDecoding line and a throughput line every 40 access lines
  SGLang    nearly every line is a Decode batch line with accept len
  mixed     vLLM, SGLang and ATOM lines, access lines and lines that look like acceptance and are not understood
  responses JSON lines, each a response body of 2 KB with metrics per request
  foreign   no line of a known engine
Beside each, in the same run, the floor: reading the bytes and counting line breaks, and grep -c of two markers. Times are the best of
N; beside the wall clock stands the processor time of the reading process, which other work on the machine changes less.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from k3lab.drafter.logs import read
from k3lab.figures import markdown_table

ACCESS = '(APIServer pid=1) INFO:     10.0.0.{a}:{b} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
THROUGHPUT = (
    "(APIServer pid=1) INFO 05-01 14:24:50 [loggers.py:310] Engine 000: Avg prompt throughput: 93.9 tokens/s, Avg generation "
    "throughput: {b}.0 tokens/s, Running: {a} reqs, Waiting: 0 reqs, GPU KV cache usage: 3.0%, Prefix cache hit rate: 0.0%"
)
DECODE = (
    "[2025-05-27 20:14:38 TP0] Decode batch, #running-req: {a}, #full token: {b}, full token usage: 0.12, accept len: {mean:.2f}, accept "
    "rate: {rate:.2f}, cuda graph: True, gen throughput (token/s): 95.33, #queue-req: 1"
)
UNKNOWN = "[engine] draft acceptance = 0.{a} ( 167 accepted / 259 generated), mean acceptance length = {mean:.2f}"


def vllm_line(rng: np.random.Generator) -> str:
    """A line as vLLM 0.10.2 to 0.33.0 prints it, for 7 drafts a round."""
    drafts = int(rng.integers(200, 900))
    survived = rng.binomial(drafts, 0.8 ** np.arange(1, 8))
    survived = np.minimum.accumulate(survived)
    rates = ", ".join(f"{n / drafts:.3f}" for n in survived)
    accepted = int(survived.sum())
    return (
        f"(APIServer pid=1) INFO 05-01 14:24:50 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}"
        f", Accepted throughput: {accepted / 10:.2f} tokens/s, Drafted throughput: {drafts * 0.7:.2f} tokens/s, Accepted: {accepted} "
        f"tokens, Drafted: {7 * drafts} tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance rate: "
        f"{accepted / drafts / 7:.1%}"
    )


def atom_line(rng: np.random.Generator) -> str:
    """An ATOM line of one draft a round."""
    hits = int(rng.integers(600, 900))
    return (
        f"[atom 14:45:50] [MTP Stats Interval] Average toks/fwd: {1 + hits / 1000:.2f}, Accepted/Total Draft tokens: {hits}/1000, "
        f"Acceptance rate: {hits / 10:.2f}%, Accepted tokens distribution: {{0: '{100 - hits / 10:.2f}%', 1: '{hits / 10:.2f}%'}}"
    )


def response(rng: np.random.Generator) -> str:
    """A response body with metrics per request (vLLM PR 48915), of a request of its own."""
    drafts = int(rng.integers(50, 400))
    histogram = np.bincount(rng.binomial(7, 0.4, drafts), minlength=8)
    accepted = int(histogram @ np.arange(8))
    metrics = {"mean_acceptance_length": 1 + accepted / drafts, "draft_acceptance_rate": accepted / drafts / 7, "num_spec_tokens": 7,
               "acceptance_histogram": histogram.tolist(), "num_spec_steps": drafts, "num_accepted_draft_tokens": accepted,
               "num_draft_tokens": 7 * drafts}  # fmt: skip
    choice = {"index": 0, "message": {"role": "assistant", "content": "word " * 300}, "finish_reason": "stop"}
    usage = {"prompt_tokens": int(rng.integers(10, 5000)), "completion_tokens": drafts + accepted}
    body = {"id": f"chatcmpl-{rng.integers(2**62):x}", "object": "chat.completion", "model": "moonshotai/Kimi-K3", "choices": [choice],
            "usage": usage, "metrics": {"speculative_decoding": metrics}}  # fmt: skip
    return json.dumps(body)


def block_of(kind: str, rng: np.random.Generator) -> bytes:
    """Some thousand lines of a kind."""
    out = []
    for _ in range(100):
        a, b, mean = int(rng.integers(1, 99)), int(rng.integers(1000, 60000)), float(rng.uniform(2, 5))
        access = [ACCESS.format(a=a, b=b + i) for i in range(40)]
        decode = [DECODE.format(a=a, b=b + i, mean=mean, rate=(mean - 1) / 7) for i in range(40)]
        if kind == "vLLM":
            out += [*access, THROUGHPUT.format(a=a, b=b), vllm_line(rng)]
        elif kind == "SGLang":
            out += [*decode, *access[:2]]
        elif kind == "mixed":
            out += [*access[:20], vllm_line(rng), *decode[:10], atom_line(rng), UNKNOWN.format(a=a, mean=mean), THROUGHPUT.format(a=a, b=b)]
        elif kind == "responses":
            out += [response(rng) for _ in range(40)]
        else:
            out += [f"worker {a}: step {b + i} loss {mean:.4f} grad norm 1.25 tokens 65536 lr 3e-4" for i in range(40)]
    return ("\n".join(out) + "\n").encode()


def best(call: Callable[[], object], runs: int) -> tuple[float, float, object]:
    """Wall and processor seconds of this process, each the smallest of `runs`, and the last result."""
    wall, cpu, result = [], [], None
    for _ in range(runs):
        start, used = time.perf_counter(), time.process_time()
        result = call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return min(wall), min(cpu), result


def count_lines(path: Path) -> int:
    with open(path, "rb") as f:
        return sum(block.count(b"\n") for block in iter(lambda: f.read(4 << 20), b""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=50, metavar="MB", help="of each log, in units of 10^6 bytes (default: 50)")
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--out", help="write the numbers as JSON")
    args = parser.parse_args()
    versions = {"device": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
                "numpy": np.__version__, "pandas": pd.__version__}  # fmt: skip
    print(", ".join(f"{k} {v}" for k, v in versions.items()))
    rng, rows = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory(prefix="k3lab-bench-") as scratch:
        for kind in ("vLLM", "SGLang", "mixed", "responses", "foreign"):
            path, block = Path(scratch, f"{kind}.log"), block_of(kind, rng)
            with open(path, "wb") as f:
                while f.tell() < args.size * 1e6:
                    f.write(block)
            size = path.stat().st_size / 1e6
            floor, _, lines = best(lambda path=path: count_lines(path), args.runs)
            grep = ["grep", "-c", "-e", "SpecDecoding metrics", "-e", "accept len", str(path)]
            grepped = best(lambda grep=grep: subprocess.run(grep, capture_output=True), args.runs)[0] if shutil.which("grep") else np.nan
            seconds, cpu, report = best(lambda path=path: read(path), args.runs)
            assert sum(u.lines for u in report.unread) == lines
            rows.append((kind, size, lines, len(report.records), seconds, cpu, size / seconds, seconds / floor, seconds / grepped))
            print(f"{kind}: {seconds:.2f} s", file=sys.stderr)
    columns = ["log", "MB", "lines", "records", "read, s", "CPU, s", "MB/s", "x reading and counting lines", "x grep -c"]
    table = pd.DataFrame(rows, columns=columns)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(markdown_table(table))
    print(f"\npeak memory of the process {memory:.2f} GiB")
    if args.out:
        with open(args.out, "w") as f:
            json.dump({"versions": versions, "peak memory, GiB": memory, "rows": table.to_dict("records")}, f, indent=1)


if __name__ == "__main__":
    main()
