#!/usr/bin/env python3
"""Exact-match accuracy of the tiny Kimi-K3 served at high concurrency, by route, against how often undefined rows are NaN.

    python data/measure_accuracy.py --device cuda --out data --jobs 8     about 4 minutes on one H200 with 16 cores
    python data/measure_accuracy.py --device cpu --problems 24 --max-seqs 8 --rate 0.4 --p 0 1e-3 1 --out /tmp/a

Every (route, p, seed) is served for real: the undefined rows of one workgroup (sequence, head, layer, launch) of the chunk kernel are
NaN with probability p and zero otherwise. p = 1 is "always NaN", p = 0 and zero padding are "never". Counts go to accuracy.json, the
data card to accuracy.md. Beside each measured count stands what the exposure alone predicts: a request survives if none of the
workgroups that it was exposed to before its answer was complete drew NaN, mean over correct requests of (1 - p)^exposures, where
exposures and correctness come from the same route at p = 0.
"""

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import binomtest
from tqdm import tqdm

from k3lab.provenance import sha256
from k3lab.tiny import data, model, serving
from k3lab.tiny.cards import made_on, made_with, write_text

HERE = Path(__file__).resolve().parent
P_VALUES = (0.0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1, 1.0)
ROUTES = ("chunk_all", "split")


@dataclass(frozen=True)
class Task:
    """One served run: problems and arrivals come from seed, the NaN draws too; p None is zero padding in every row."""

    route: str
    p: float | None
    seed: int
    problems: int
    max_seqs: int
    max_tokens: int
    rate: float
    max_new: int
    device: str
    weights: str


def answered_at(tokens: list[int], exposed: list[int]) -> int:
    """Workgroups that the request was exposed to when its answer "The answer is N." was complete (all of them, if it never was)."""
    for i in range(len(tokens)):
        if tokens[i] == ord(".") and "The answer is " in data.decode(tokens[: i + 1]):
            return exposed[i]
    return exposed[-1]


def measure(task: Task) -> dict:
    """Serve one task; counts, and per request whether it was correct and its exposures up to the answer."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    net = model.load(task.weights, task.device)
    prompts = data.arithmetic_prompts(task.problems, task.seed)
    start = time.perf_counter()
    outputs, frame = serving.serve(
        net,
        [x.tokens for x in prompts],
        max_seqs=task.max_seqs,
        max_tokens=task.max_tokens,
        max_new=task.max_new,
        arrivals=serving.poisson_arrivals(task.problems, task.rate, task.seed),
        route=task.route,
        p=task.p,
        seed=task.seed,
    )
    correct = [data.is_correct(o.tokens, x.problem) for o, x in zip(outputs, prompts, strict=True)]
    return {
        "route": task.route,
        "padding": "zero" if task.p is None else "nan with p",
        "p": task.p,
        "seed": task.seed,
        "correct": sum(correct),
        "total": task.problems,
        "hit_requests": sum(o.poisoned > 0 for o in outputs),
        "cut_by_length": sum(o.reason == "length" for o in outputs),
        "steps": len(frame),
        "mixed_steps": int(frame.mixed.sum()),
        "mean_running": float(frame.running.mean()),
        "exposed_decode_workgroups": int(frame.exposed_decodes.sum()),
        "exposed_prefill_workgroups": int(frame.exposed_prefills.sum()),
        "poisoned_workgroups": int(frame.poisoned.sum()),
        "seconds": time.perf_counter() - start,
        "made_on": made_on(made_with(task.device)),
        "requests": [[int(c), answered_at(o.tokens, o.exposed)] for c, o in zip(correct, outputs, strict=True)],
    }


def with_expectation(rows: list[dict]) -> list[dict]:
    """Rows with expected_correct: sum over the requests that the same route and seed answer at p = 0 of (1 - p)^exposures.

    The requests themselves are kept in the rows of p = 0 alone; a row that has its expectation keeps it.
    """
    clean = {(r["route"], r["seed"]): r["requests"] for r in rows if r["p"] == 0 and "requests" in r}
    out = []
    for r in rows:
        base, p = clean.get((r["route"], r["seed"])), r["p"] or 0.0
        kept = {k: v for k, v in r.items() if k != "requests" or r["p"] == 0}
        if "expected_correct" not in kept or kept["expected_correct"] is None:
            kept["expected_correct"] = None if base is None else sum(c * (1 - p) ** e for c, e in base)
        if "requests" in r:
            exposures = sorted(e for _, e in r["requests"])
            kept["exposures_per_request"] = {"min": exposures[0], "median": exposures[len(exposures) // 2], "max": exposures[-1]}
        out.append(kept)
    return out


def finished(path: Path, about: dict) -> list[dict]:
    """Rows of an earlier, unfinished or partial run in the same setting with the same weights, whatever device made them."""
    if not path.is_file():
        return []
    old = json.loads(path.read_text())
    same = old["weights_sha256"] == about["weights_sha256"] and old["setting"] == about["setting"]
    return old["rows"] if same else []


def card(r: dict) -> str:
    """The data card, every number out of the record r."""
    s = r["setting"]
    workgroups = [f"{kind} workgroups" for kind in ("exposed decode", "exposed prefill", "NaN")]
    columns = ("route", "p", "seed", "correct", "accuracy (95% Wilson)", "expected", "mixed steps", *workgroups)
    lines = [columns, ("---",) * len(columns)]
    for x in r["rows"]:
        low, high = binomtest(x["correct"], x["total"]).proportion_ci(0.95, "wilson")
        lines.append(
            (
                x["route"],
                "zero padding" if x["p"] is None else f"{x['p']:g}",
                str(x["seed"]),
                f"{x['correct']} / {x['total']}",
                f"{x['correct'] / x['total']:.4f} ({low:.4f} to {high:.4f})",
                "" if x["expected_correct"] is None else f"{x['expected_correct'] / x['total']:.4f}",
                f"{x['mixed_steps']} / {x['steps']}",
                f"{x['exposed_decode_workgroups']:,}",
                f"{x['exposed_prefill_workgroups']:,}",
                f"{x['poisoned_workgroups']:,}",
            )
        )
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    runs: dict[str, list[str]] = {}
    for x in r["rows"]:
        runs.setdefault(x["made_on"], []).append(x["route"])
    places = "; ".join(f"{len(v)} runs ({', '.join(f'{v.count(t)} {t}' for t in dict.fromkeys(v))}) on {k}" for k, v in runs.items())
    return f"""# accuracy.json: served accuracy by route, against the probability that undefined rows are NaN

| | |
|---|---|
| what | exact match on {s["problems"]} held-out arithmetic problems a run, greedy, served by k3lab/tiny/serving.py: \
up to {s["max_seqs"]} requests at a time, {s["max_tokens"]} tokens a step, Poisson arrivals at {s["rate"]} a step, \
at most {s["max_new"]} new bytes |
| made by | `data/measure_accuracy.py`, seeds {", ".join(map(str, s["seeds"]))}, torch stages in fp32 |
| made on | {places} |
| weights sha256 | `{r["weights_sha256"]}` |
| what is real, what is set | served for real; the value of undefined rows is set: NaN with probability p per workgroup \
(sequence, head, layer, launch) of the chunk kernel, else zero. Not an observation of any GPU's undefined rows |
| licence | this project's |

A route is exposed where a chunk of fewer than 64 tokens goes through the chunk kernel: by chunk_all every decode of a mixed step and every
ragged prefill piece, by split the ragged prefill pieces alone. p = 1 is "always NaN". "Expected" comes from exposure counts at p = 0 alone.

{table}
"""


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--weights", type=Path, default=HERE / "tiny_k3.safetensors")
    ap.add_argument("--out", type=Path, default=HERE)
    ap.add_argument("--problems", type=int, default=512)
    ap.add_argument("--seeds", type=int, nargs="+", default=[0])
    ap.add_argument("--p", type=float, nargs="+", default=list(P_VALUES))
    ap.add_argument("--max-seqs", type=int, default=128)
    ap.add_argument("--max-tokens", type=int, default=4096)
    ap.add_argument("--rate", type=float, default=2.0, help="arrivals a step")
    ap.add_argument("--max-new", type=int, default=80)
    ap.add_argument("--jobs", type=int, default=1, help="processes; they share the device")
    ap.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    ap.add_argument("--again", action="store_true", help="run everything, also what accuracy.json in --out holds in the same setting")
    a = ap.parse_args()
    rest = (a.problems, a.max_seqs, a.max_tokens, a.rate, a.max_new, a.device, str(a.weights))
    tasks = [Task(route, p, seed, *rest) for seed in a.seeds for route in a.routes for p in [None, *a.p]]
    about = {
        "setting": {
            "problems": a.problems, "seeds": a.seeds, "max_seqs": a.max_seqs, "max_tokens": a.max_tokens, "rate": a.rate,
            "max_new": a.max_new,
        },
        "weights_sha256": sha256(a.weights),
    }  # fmt: skip
    a.out.mkdir(parents=True, exist_ok=True)
    kept = [] if a.again else finished(a.out / "accuracy.json", about)
    have = {(r["route"], r["p"], r["seed"]) for r in kept}
    tasks = [t for t in tasks if (t.route, t.p, t.seed) not in have]
    # spawned, because CUDA does not survive a fork
    with ProcessPoolExecutor(a.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(measure, t): i for i, t in enumerate(tasks)}
        done = {}
        for f in tqdm(as_completed(futures), total=len(tasks), desc="accuracy", file=sys.stderr, ascii=True):
            done[futures[f]] = f.result()
            # after every run, so that a killed measurement keeps what it has
            order = {route: i for i, route in enumerate(ROUTES)}
            rows = sorted(kept + list(done.values()), key=lambda r: (r["seed"], order[r["route"]], r["p"] is not None, r["p"] or 0.0))
            record = {**about, "rows": with_expectation(rows)}
            write_text(a.out / "accuracy.json", json.dumps(record, indent=1) + "\n")
            write_text(a.out / "accuracy.md", card(record))


if __name__ == "__main__":
    main()
