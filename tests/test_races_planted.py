"""The planted race: what racecheck says of it, its two kernels as compiled, and the rows measured on an H200.

The test marked gpu runs both kernels where there is an NVIDIA GPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import k3lab
from k3lab.provenance import sha256
from k3lab.races import verdicts
from k3lab.races.sweep import read_journal, run_sweep

RACY_OUTPUT = """========= COMPUTE-SANITIZER
planted: done
========= Error: Race reported between Write access at tile_copy_kernel+0x150
=========     and Read access at tile_copy_kernel+0x1f0 [512 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_racecheck_output_is_parsed():
    """Its summary, its silence, and a program that failed under it, which leaves a clean summary too."""
    from k3lab.races.planted import parse_racecheck

    got = parse_racecheck(RACY_OUTPUT)
    assert (got["status"], got["hazards"], got["errors"], got["warnings"]) == ("ok", 1, 1, 0)
    assert "Race reported between Write access" in got["text"]
    clean = "========= COMPUTE-SANITIZER\nplanted: done\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert parse_racecheck(clean)["hazards"] == 0
    failed = clean.replace("planted: done", "ModuleNotFoundError: No module named 'triton'")
    assert parse_racecheck(failed)["status"] == "error"
    assert parse_racecheck("")["status"] == "error"
    row = {"kernel": "planted_faulty", "config": {"num_warps": 4}, "input": "8 workgroups", "fill": "racecheck", "runs": 1, **got}
    assert verdicts.racecheck_words(row) == "1 hazards (1 errors, 0 warnings)"


COMPILE = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from k3lab.races.planted import TILE, WAITS, tile_copy_kernel
from k3lab.races.sweep import PLANTED_WARPS
out = {}
for name, wait in WAITS.items():
    for warps in PLANTED_WARPS:
        types = {"src": "*bf16", "dst": "*bf16", "WAIT": "constexpr", "N": "constexpr", "num_warps": "constexpr"}
        source = GluonASTSource(tile_copy_kernel, types, {(2,): wait, (3,): TILE, (4,): warps},
                                {(n,): [["tt.divisibility", 16]] for n in (0, 1)})
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
        steps = r"cp\\.async\\.cg|cp\\.async\\.commit_group|cp\\.async\\.wait_group\\s+\\d|bar\\.sync|ld\\.shared|st\\.global"
        found = re.findall(steps, ptx)
        out[f"{name} {warps}"] = [re.sub(r"\\s+", " ", x) for i, x in enumerate(found) if i == 0 or x != found[i - 1]]
print(json.dumps(out))
"""


@pytest.mark.slow
def test_the_planted_kernels_differ_in_the_wait_alone(compiling_env):
    """Compiled for cuda:90: copy, commit, wait, barrier, read; the twin waits for 0 groups in flight, the faulty one for 1."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=compiling_env)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, order in json.loads(done.stdout).items():
        wait = "1" if name.startswith("planted_faulty") else "0"
        steps = ["cp.async.cg", "cp.async.commit_group", f"cp.async.wait_group {wait}", "bar.sync", "ld.shared", "st.global"]
        assert order == steps, name


def test_the_published_rows_name_exactly_the_faulty_copy():
    """data/race_sweep.jsonl as measured on an H200: the weak wait at every grid size, nothing else; its card has its sha256."""
    path = Path(k3lab.__file__).parents[1] / "data" / "race_sweep.jsonl"
    table = verdicts.judge(read_journal(path))
    assert set(table["kernel"][table["finding"]]) == {"planted_faulty"}
    faulty, correct, rest = (table[table["kernel"] == k] for k in ("planted_faulty", "planted_correct", "recompute_w_u"))
    assert set(faulty["input"]) == set(correct["input"]) == {"8 workgroups", "1024 workgroups", "16384 workgroups"}
    assert faulty["finding"].all()
    assert (faulty["big"] > 0).all()
    assert list(faulty["racecheck"][faulty["racecheck"] != ""]) == ["4 hazards (0 errors, 4 warnings)"]
    assert list(correct["racecheck"][correct["racecheck"] != ""]) == ["0 hazards"]
    assert set(rest["verdict"]) == {"no difference"}
    assert len(rest) == 9 * (2 * 2 + 3)
    assert rest["excluded_rate"].max() == pytest.approx(1 - 0.05**0.01)
    assert sha256(path) in path.with_suffix(".md").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("workgroups", [8, 1024])
def test_gpu_sweep_names_the_faulty_copy_and_only_it(workgroups):
    """On an NVIDIA GPU: the weak wait is a finding at every grid size, its twin never."""
    from k3lab.races.sweep import planted_cases

    if torch.version.hip:
        pytest.skip("the planted race is cp.async code for NVIDIA")
    table = verdicts.judge(run_sweep(planted_cases((workgroups,), (4,)), 20, progress=False))
    assert dict(zip(table["kernel"], table["finding"], strict=True)) == {"planted_faulty": True, "planted_correct": False}
