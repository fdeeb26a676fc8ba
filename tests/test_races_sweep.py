"""Sweeps on the CPU: planted faults and their verdicts, the journal under SIGKILL, the command line.

Faults are planted in a launcher of a file of its own, which the worker process loads as it would a user's. Nothing here says
anything about a GPU.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import joblib
import pytest
import torch
from scipy.stats import binomtest

import k3lab
from k3lab.__main__ import main
from k3lab.errors import BadInput
from k3lab.races import verdicts
from k3lab.races.sweep import SKIPPED, Case, append_row, read_journal, run_sweep
from k3lab.races.sweep_targets import capture_input, configs_of, problem, random_input

FAULTS = """
import os, signal, time
import torch
from k3lab.races.sweep_targets import Problem

runs = 0

def problem(kernel, spec, device):
    x = torch.linspace(1, 2, 64, dtype=torch.float64).reshape(8, 8) + spec.get("add", 0)
    low = x.float()
    return Problem({"x": low, "fault": spec.get("fault")}, {"y": torch.empty_like(low)}, {"y": x}, {"y": low}, torch.float32)

def launch(config, inputs, outputs):
    global runs
    runs += 1
    fault, x, y = inputs["fault"] or config["fault"], inputs["x"], outputs["y"]
    if fault == "partial":
        y[:7] = x[:7]
        return
    y.copy_(x)
    if fault == "racy" and runs % 4 == 0:
        y[2, 3] = 1e38 / runs
    if fault == "wrong":
        y[0, 5] += 1
    if fault == "rounding":
        y[7, 7] = torch.nextafter(y[7, 7], torch.tensor(9.0))
    if fault == "out of memory":
        raise torch.OutOfMemoryError("planted")
    if fault == "illegal access":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if fault == "inputs":
        x += 1
    if fault == "exit":
        os._exit(3)
    if fault == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        time.sleep(600)
"""

# the worker's protocol with nothing behind it, so that a sweep of many rows takes seconds
FAST_WORKER = """
import json, os, sys, threading, time
order = json.loads(sys.stdin.buffer.readline())

def leave():
    while os.read(0, 4096):
        pass
    os._exit(1)

threading.Thread(target=leave, daemon=True).start()
for item in order["items"]:
    print(json.dumps({"begin": item["number"]}), flush=True)
    time.sleep(0.03)
    answer = {"status": "ok", "inputs": "i", "distinct": 1, "deviating": 0, "hashes": [item["spec"]["name"]], "first_diff": {},
              "differing": 0, "big": 0, "nonfinite": 0, "outside": 0, "elements": 1, "ok": True, "outputs": {}, "pid": os.getpid()}
    print(json.dumps({"number": item["number"], **answer}), flush=True)
"""

FAST_SWEEP = """
import sys
from k3lab.races.sweep import Case, run_sweep
cases = [Case("fast", {"num_warps": w}, {"name": f"input {n}"}, "none:launch", "none:problem") for w in range(8) for n in range(5)]
run_sweep(cases, 3, sys.argv[1], jobs=2, progress=False, where={"device": "cpu"}, worker=sys.argv[2])
"""
ROWS = 8 * 5 * 2
INPUT = {"name": "one"}


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("faults") / "faults.py"
    path.write_text(FAULTS)
    return str(path)


@pytest.fixture
def fast(tmp_path) -> tuple[Path, Path]:
    """The fast worker and a sweep over it, as files."""
    worker, sweep = tmp_path / "worker.py", tmp_path / "sweep.py"
    worker.write_text(FAST_WORKER)
    sweep.write_text(FAST_SWEEP)
    return worker, sweep


def fault_cases(faults: str, names, inputs=(INPUT,)) -> list[Case]:
    return [Case("planted", {"fault": f}, i, f"{faults}:launch", f"{faults}:problem") for f in names for i in inputs]


def fast_cases(count: int) -> list[Case]:
    return [Case("fast", {"num_warps": w}, {"name": "one"}, "none:launch", "none:problem") for w in range(count)]


@pytest.mark.slow
def test_every_fault_has_its_verdict(faults, tmp_path):
    """Each planted fault is named as what it is, the honest launcher is clean, and a second call reads it all from the journal."""
    by_input = [{"name": f, "fault": f} for f in ("racy", "partial", "wrong", "out of memory", "inputs", "honest")]
    cases = fault_cases(faults, ["honest", "rounding", "also honest"]) + fault_cases(faults, ["of the input"], by_input)
    journal = tmp_path / "sweep.jsonl"
    rows = run_sweep(cases, 8, journal, jobs=2, timeout=60, progress=False)
    table = verdicts.judge(rows)
    assert dict(zip(table["config"].str.removeprefix("fault=")[:3], table["verdict"], strict=False)) == {
        "honest": "no difference", "rounding": "different rounding between configs", "also honest": "no difference",
    }  # fmt: skip
    table = table[3:].set_index("input")
    assert dict(table["verdict"]) == {
        "racy": "differs run to run", "partial": "depends on initial memory", "wrong": "same but wrong",
        "out of memory": "out of memory", "inputs": "error", "honest": "no difference",
    }  # fmt: skip
    assert set(table.index[table["finding"]]) == {"racy", "partial", "wrong"}
    racy = table.loc["racy"]
    assert racy["first_diff"] == {"y": [2, 3]}
    assert (racy["big"], racy["differing"], racy["deviating"], racy["distinct"]) == (1, 1, 2, 3)
    assert (table.loc["partial", "outside"], table.loc["partial", "nonfinite"], table.loc["wrong", "outside"]) == (8, 8, 1)
    assert table.loc["honest", "excluded_rate"] == pytest.approx(1 - 0.05 ** (1 / 16))
    assert "changed its inputs: x" in table.loc["inputs", "detail"]
    before = journal.read_bytes()
    again = run_sweep(cases, 8, journal, worker="no such worker", progress=False)
    assert again == rows
    assert journal.read_bytes() == before
    assert len(read_journal(journal)) == 2 * len(cases)


@pytest.mark.slow
def test_what_takes_the_process_down_costs_one_row(faults):
    """Exit, SIGSEGV, an illegal access and a hang are rows; the next input of the same config is run all the same."""
    names = ["exit", "segv", "illegal access", "hang", "honest"]
    cases = fault_cases(faults, ["of the input"], [{"name": f, "fault": f} for f in names])
    rows = run_sweep(cases, 3, fills=("nan",), timeout=15, progress=False)
    assert [r["status"] for r in rows] == ["crash", "crash", "illegal access", "hang", "ok"]
    assert ["exit status 3" in rows[0]["error"], "signal 11" in rows[1]["error"], "15 s" in rows[3]["error"]] == [True] * 3
    assert list(verdicts.judge(rows)["finding"]) == [True] * 4 + [False]


def test_killed_twenty_times_no_row_is_lost_or_doubled(fast, tmp_path):
    """SIGKILL at random moments: what the journal had finished stays as it was, nothing comes twice, the rest is run."""
    worker, sweep = fast
    rng = random.Random(0)
    env = {**os.environ, "PYTHONPATH": str(Path(k3lab.__file__).parents[1])}
    kills = rounds = partial = 0
    journal = tmp_path / "0.jsonl"
    while kills < 20:
        before = journal.read_bytes() if journal.exists() else b""
        process = subprocess.Popen([sys.executable, sweep, journal, worker], env=env)
        started, delay = time.monotonic(), rng.uniform(0.1, 1.2)
        # the clock of the kill starts with the first new row, or after a while without one: most kills fall among the writes
        while process.poll() is None and time.monotonic() - started < 3 and (not journal.exists() or journal.read_bytes() == before):
            time.sleep(0.005)
        try:
            assert process.wait(delay) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        data = journal.read_bytes() if journal.exists() else b""
        assert data.startswith(before[: before.rfind(b"\n") + 1])
        rows = read_journal(journal) if data else []
        partial += 0 < len(rows) < ROWS
        if process.returncode == 0:
            assert len(rows) == ROWS
            rounds += 1
            journal = tmp_path / f"{rounds}.jsonl"
        elif kills % 3 == 0 and data:
            journal.write_bytes(data[: -rng.randrange(1, 40)])  # a line torn by the kill itself is rare: tear one
    assert partial >= 10
    subprocess.run([sys.executable, sweep, journal, worker], env=env, check=True)
    rows = read_journal(journal)
    assert len({r["key"] for r in rows}) == len(rows) == ROWS
    assert len(journal.read_bytes().splitlines()) == ROWS


def test_a_worker_ends_with_its_sweep(faults):
    """A worker that hangs in a launch ends once stdin closes, as it does when the sweep is killed."""
    order = {"launch": f"{faults}:launch", "problem": f"{faults}:problem", "kernel": "k", "runs": 1, "load": False, "deadline": None}
    order["items"] = [{"number": 0, "config": {"fault": "hang"}, "spec": INPUT, "fill": "nan"}]
    process = subprocess.Popen([sys.executable, "-m", "k3lab.races.sweep_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline()) == {"begin": 0}
    process.stdin.close()
    assert process.wait(20) == 1
    process.stdout.close()


def test_a_deadline_leaves_rows_that_the_next_run_fills(fast, tmp_path):
    """Past the deadline rows say so, no process is started, and a resumed sweep replaces them."""
    worker, journal = str(fast[0]), tmp_path / "j.jsonl"
    options = {"where": {"device": "cpu"}, "progress": False}
    rows = run_sweep(fast_cases(2), 3, journal, deadline=time.time() - 1, worker="no such worker", **options)
    assert {r["status"] for r in rows} == {SKIPPED}
    assert set(verdicts.judge(rows)["verdict"]) == {SKIPPED}
    rows = run_sweep(fast_cases(2), 3, journal, worker=worker, **options)
    assert {r["status"] for r in rows} == {"ok"}
    assert read_journal(journal) == rows
    # another number of runs, device or load is another row
    assert {r["runs"] for r in run_sweep(fast_cases(2), 4, journal, worker=worker, **options)} == {4}
    assert len(read_journal(journal)) == 8


def test_a_capture_is_known_by_its_content(fast, tmp_path):
    """The same file elsewhere is the same input, an edited one is not, and no row says where a file lay."""
    captures = [tmp_path / n / "x.safetensors" for n in "abc"]
    for path, text in zip(captures, ("one", "one", "two"), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    cases = [Case("fast", {"num_warps": 4}, capture_input(p), "none:launch", "none:problem") for p in captures]
    rows = run_sweep(cases, 3, fills=("nan",), where={}, progress=False, worker=str(fast[0]))
    assert len(rows) == 2
    assert str(tmp_path) not in json.dumps(rows)


def test_append_writes_a_row_once_and_mends_a_torn_line(tmp_path):
    """Under one key the first finished row stays; a half-written last line makes room."""
    journal = tmp_path / "j.jsonl"
    row = {"key": "a", "kernel": "k", "config": {}, "input": "i", "fill": "nan", "runs": 1, "status": "ok"}
    assert append_row(journal, row)
    assert not append_row(journal, {**row, "status": "crash"})
    with open(journal, "ab") as f:
        f.write(b'{"key": "b", "ker')
    assert read_journal(journal) == [row]
    assert append_row(journal, {**row, "key": "c"})
    assert [r["key"] for r in read_journal(journal)] == ["a", "c"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json\n", "line 1: not JSON"),
        ("[]\n", "lacks everything"),
        ('{"kernel": "k"}\n', "lacks key, config, input, fill, runs, status"),
        ('{"key":"a","kernel":"k","config":{},"input":"i","fill":"nan","runs":1,"status":"ok"}\n' * 2, "line 2: .* twice"),
    ],
)
def test_a_foreign_journal_is_refused(tmp_path, text, words):
    path = tmp_path / "j.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        run_sweep(fast_cases(1), 3, path, where={}, progress=False)
    with pytest.raises(BadInput, match="cannot be read"):
        read_journal(tmp_path)


def test_bad_arguments_are_refused(faults):
    """A target that cannot be loaded, no runs, an unknown fill and an input that is no JSON are the caller's error, not rows."""
    where = {"where": {"device": "cpu"}, "progress": False}
    with pytest.raises(BadInput, match="no_such_module"):
        run_sweep([Case("k", {}, INPUT, "no_such_module:launch", f"{faults}:problem")], 1, timeout=60, **where)
    with pytest.raises(BadInput, match="runs is 0"):
        run_sweep(fast_cases(1), 0, **where)
    with pytest.raises(BadInput, match="fill ones"):
        run_sweep(fast_cases(1), 1, fills=("ones",), **where)
    with pytest.raises(BadInput, match="must be JSON"):
        run_sweep([Case("k", {"x": torch.ones(1)}, INPUT)], 1, **where)
    with pytest.raises(BadInput, match="no name"):
        run_sweep([Case("k", {}, {})], 1, **where)
    with pytest.raises(BadInput, match="not one of prepare"):
        configs_of("no such kernel")
    with pytest.raises(BadInput, match="no such capture"):
        capture_input("missing.safetensors")
    with pytest.raises(BadInput, match="dtype 'int99'"):
        problem("intra", random_input([3], dtype="int99"), "cpu")


@pytest.mark.parametrize("runs", [1, 20, 50, 100])
def test_excluded_rate_is_the_exact_interval(runs):
    """R = 1 - 0.05^(1/N) is scipy's exact one-sided upper end at no deviation in N, and 3/N is near it."""
    exact = binomtest(0, runs, alternative="less").proportion_ci(0.95, method="exact").high
    assert verdicts.excluded_rate(runs) == pytest.approx(exact, rel=1e-9)
    if runs > 10:
        assert verdicts.excluded_rate(runs) == pytest.approx(3 / runs, rel=0.08)
    with pytest.raises(BadInput):
        verdicts.excluded_rate(0)


@pytest.mark.slow
def test_command_line_on_a_kernel_of_ones_own(faults, capsys):
    """Exit 0 and the excluded rate for an honest launcher, 1 and the sentence for a racy one."""
    own = ["sweep", "--kernel", "mine", "--launch", f"{faults}:launch", "--problem", f"{faults}:problem", "--runs", "8"]
    assert main([*own, "--input", '{"name": "one"}', "--configs", '[{"fault": "honest"}]']) == 0
    assert "no difference in 16 runs (a deviation rate above 17.07% would have shown" in capsys.readouterr().out
    assert main([*own, "--input", '{"name": "one"}', "--configs", '[{"fault": "racy"}]', "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdicts"][0]["verdict"] == "differs run to run"
    assert len(answer["rows"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernel", "nope"], "is not one of prepare"),
        (["--capture", "missing.safetensors"], "no such capture"),
        (["--padding", "ones"], "not one of undefined, zero, nan"),
        (["--kernel", "attn_res", "--ladder"], "are for the KDA kernels"),
        (["--configs", "{}"], "expected a list of JSON objects"),
        (["--configs", "["], "not JSON"),
        (["--launch", "a:b"], "needs --launch, --problem, --configs"),
        (["--input", '{"name": "x"}'], "--input is for a kernel of your own"),
        ([], "sweep needs a GPU"),
    ],
)
def test_command_line_refuses(arguments, words, capsys):
    """Exit 2 and one line that says what to do."""
    if not arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["sweep", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_sweep_and_matrix_run_on_a_dask_cluster(fast, tmp_path):
    """The same tasks on a local Dask cluster through joblib.parallel_config: rows and verdicts are those of a local run."""
    distributed = pytest.importorskip("distributed", reason="dask and distributed are in the test extra")
    from k3lab.races.matrix import matrix_builds, run_matrix

    builds = matrix_builds(["installed"], ["hip:gfx950"], (False,), (True,), ("zero",), ((4, 2), (4, 4)))
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        journal = tmp_path / "sweep.jsonl"
        rows = run_sweep(fast_cases(4), 3, journal, jobs=2, where={"device": "cpu"}, progress=False, worker=str(fast[0]))
        matrix = run_matrix(builds, tmp_path / "matrix.jsonl", ("full",), progress=False)
    assert [r["status"] for r in rows] == ["ok"] * 8
    assert len({r["pid"] for r in rows}) == 4
    assert sorted(r["key"] for r in read_journal(journal)) == sorted(r["key"] for r in rows)
    assert dict(zip(matrix["stages"], matrix["verdict"], strict=True)) == {2: "ordered", 4: "race"}


@pytest.mark.parametrize(
    "change", [{"hashes": []}, {"hashes": [["a"]]}, {"distinct": {}}, {"outputs": {"u": {"error": "x"}}}, {"hashes": None}, {"runs": []}]
)
def test_rows_that_no_sweep_wrote_are_refused(tmp_path, change):
    """A journal that was edited: an error of its own, when it is read or when it is judged."""
    row = next(r for r in read_journal(Path(__file__).parents[1] / "data" / "race_sweep.jsonl") if r["status"] == "ok" and "hashes" in r)
    (tmp_path / "s.jsonl").write_text(json.dumps(row | change) + "\n")
    with pytest.raises(BadInput, match="of a sweep"):
        verdicts.judge(read_journal(tmp_path / "s.jsonl"))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"key": {}}'])
def test_a_journal_line_that_is_no_row_is_refused(tmp_path, text):
    (tmp_path / "s.jsonl").write_text(text + "\n")
    with pytest.raises(BadInput, match="line 1"):
        read_journal(tmp_path / "s.jsonl")
