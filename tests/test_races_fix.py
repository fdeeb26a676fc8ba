"""The prune list and the repro script are run, not read: the snippet by Triton's autotuner, the script in a process of its own."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pandas as pd
import pytest

from k3lab.errors import BadInput
from k3lab.races.fix import prune_list, repro_script
from k3lab.races.matrix import CONFIGS, INPUTS, read_journal
from k3lab.races.toolchain import toolchain_path

triton = pytest.importorskip("triton", reason="Triton has no build for this platform")
DATA = Path(__file__).parent.parent / "data" / "race_matrix.jsonl"
PATH = {"target": "hip:gfx950", "async": "on", "pointer_range": False, "padding": "undefined"}


@pytest.fixture(scope="module")
def shipped() -> pd.DataFrame:
    return pd.DataFrame(read_journal(DATA))


def chosen(rows, **where):
    for k, v in where.items():
        rows = rows[rows[k].isin(v) if isinstance(v, list) else rows[k] == v]
    return rows


@pytest.mark.parametrize(
    ("version", "kept"),
    [("3.6.0", {(2, 2), (4, 2), (8, 2), (8, 3)}), ("3.8.0", {(w, s) for w in (2, 4, 8) for s in (2, 3)}), ("3.9.0", set(CONFIGS))],
)
def test_configs_kept_per_version(shipped, version, kept):
    got = prune_list(chosen(shipped, triton=version, **PATH))
    assert set(got.kept) == kept
    assert set(got.dropped) == set(CONFIGS) - kept
    assert got.basis == (f"Triton {version}, async copy on, pointer_range off, padding undefined",)
    assert got.inputs == INPUTS
    assert "other=0.0" in got.notes[0]
    for text in (got.configs, got.early_config_prune):
        assert got.basis[0] in text
        assert "full, length1, middle, tail" in text


def test_snippet_is_what_triton_takes(shipped):
    text = prune_list(chosen(shipped, triton="3.7.1", **PATH)).configs
    configs = eval(f"dict({text})", {"triton": triton})["configs"]
    assert [(c.num_warps, c.num_stages) for c in configs] == [(2, 2), (4, 2), (8, 2), (8, 3)]
    assert all(isinstance(c, triton.Config) for c in configs)


def test_prune_function_runs_in_tritons_autotuner(shipped):
    namespace: dict = {}
    exec(prune_list(chosen(shipped, triton=["3.7.1", triton.__version__], **PATH)).early_config_prune, namespace)
    prune = namespace["keep_ordered_configs"]

    def kernel(x):
        pass

    every = [triton.Config({}, num_warps=w, num_stages=s) for w, s in CONFIGS] + [triton.Config({}, num_warps=16, num_stages=2)]
    tuner = triton.autotune(configs=every, key=[], prune_configs_by={"early_config_prune": prune})(triton.jit(kernel))
    tuner.nargs = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # this version was analysed
        left = tuner.prune_configs({})
    assert {(c.num_warps, c.num_stages) for c in left} == {(2, 2), (4, 2), (8, 2), (8, 3)}
    with pytest.raises(ValueError, match="none of the configs"):
        prune([triton.Config({}, num_warps=4, num_stages=4)], {})


def test_prune_function_warns_on_a_version_that_was_not_analysed(shipped):
    namespace: dict = {}
    exec(prune_list(chosen(shipped, triton="3.6.0", **PATH)).early_config_prune.replace("3.6.0", "0.0.1"), namespace)
    with pytest.warns(UserWarning, match="analysed for Triton"):
        namespace["keep_ordered_configs"]([triton.Config({}, num_warps=4, num_stages=2)], {})


def test_several_versions_keep_what_holds_in_all(shipped):
    got = prune_list(chosen(shipped, triton=["3.6.0", "3.8.0"], **PATH))
    assert len(got.basis) == 2
    assert set(got.kept) == {(2, 2), (4, 2), (8, 2), (8, 3)}
    assert got.dropped[4, 4] == "race at full, length1, middle, tail"
    assert got.dropped[4, 3] == "race at length1, tail"


def test_what_was_not_analysed_is_not_kept(shipped):
    rows = chosen(shipped, triton="3.9.0", **PATH)
    rows = rows.drop(rows[(rows["warps"] == 8) & (rows["stages"] == 2) & (rows["input"] == "tail")].index)
    rows.loc[(rows["warps"] == 2) & (rows["stages"] == 2) & (rows["input"] == "full"), "verdict"] = "error"
    got = prune_list(rows)
    assert got.dropped == {(2, 2): "error at full", (8, 2): "analysed at 3 of 4 combinations"}


def test_zero_padding_leaves_nothing_to_note(shipped):
    assert prune_list(chosen(shipped, triton="3.9.0", **PATH | {"padding": "zero"})).notes == ()


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (lambda r: r[r["verdict"] == "nothing"], "there are no rows"),
        (lambda r: r.drop(columns=["input"]), "lack input"),
        (lambda r: r[r["triton"] == "3.6.0"], r"several targets \(hip:gfx942, hip:gfx950\)"),
        (lambda r: r[(r["verdict"] == "race") & (r["target"] == "hip:gfx950")], "no config of recompute_w_u_fwd_kernel"),
    ],
)
def test_rows_that_give_no_list_are_one_clear_error(shipped, select, message):
    with pytest.raises(BadInput, match=message):
        prune_list(select(shipped))


def run_script(row, folder, version="installed"):
    """Exit status and lines of the generated script, started as a stranger would: no k3lab, Triton alone on the path."""
    script = folder / "repro.py"
    script.write_text(repro_script(row))
    assert len(script.read_text().splitlines()) < 80
    assert "k3lab" not in script.read_text()
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(folder / "cache")}
    if version != "installed":
        env["PYTHONPATH"] = str(toolchain_path(version))
    done = subprocess.run([sys.executable, str(script)], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert f"verdict: {'race' if done.returncode else 'ordered'}" in done.stdout
    return done.returncode, done.stdout.splitlines()


@pytest.fixture(scope="module")
def rows_now(shipped):
    """(warps, stages, pointer_range) to the shipped rows of the installed Triton; newer versions than the data have none."""
    rows = chosen(shipped, triton=triton.__version__, **{k: PATH[k] for k in ("target", "async", "padding")})
    if rows.empty:
        pytest.skip(f"data/race_matrix.jsonl has no rows of Triton {triton.__version__}")
    return {k: g.to_dict("records") for k, g in rows.groupby(["warps", "stages", "pointer_range"])}


@pytest.mark.slow
@pytest.mark.parametrize(("warps", "stages", "pointer_range"), [(4, 4, False), (2, 3, False), (8, 3, False), (4, 4, True)])
def test_repro_script_agrees_with_the_matrix(rows_now, tmp_path, warps, stages, pointer_range):
    """Its few lines count waits by themselves; the full analysis gave the rows."""
    rows = rows_now[warps, stages, pointer_range]
    status, lines = run_script(rows[0], tmp_path)
    assert status == any(r["verdict"] == "race" for r in rows)
    for name, count in (("full", "rows 64"), ("length1", "rows 1")):
        raced = next(r["verdict"] for r in rows if r["input"] == name) == "race"
        assert any(x.startswith(f"{count}:") and "IN FLIGHT" in x for x in lines) == raced
    deleted = next(x for x in lines if x.startswith("copies in TTGIR")).rpartition("deleted: ")[2]
    assert int(deleted) == max(r["missing_copy"] if r.get("missing_copy") == r.get("missing_copy") else 0 for r in rows)


def test_repro_script_names_the_wait_that_would_do(rows_now, tmp_path):
    if triton.__version__ != "3.7.1":
        pytest.skip("the waits of this Triton version were not written down")
    _, lines = run_script(rows_now[4, 4, False][0], tmp_path)
    flying = [x for x in lines if "IN FLIGHT" in x]
    assert [x.partition("vmcnt(4)")[1] for x in flying] == ["vmcnt(4)"] * 2
    assert [x.rpartition("IN FLIGHT, ")[2] for x in flying] == ["vmcnt(2) would do", "vmcnt(1) would do"]
    assert "copies in TTGIR: 3; LDS-DMA in the assembly: 4, which is 2 copies; deleted: 1" in lines


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kernel": "other"}, "shows nothing of other"), ({"target": "cuda:90"}, "got target cuda:90"), ({"warps": 16}, "warps 16")],
)
def test_a_row_that_the_script_cannot_show_is_refused(shipped, change, message):
    with pytest.raises(BadInput, match=message):
        repro_script(shipped.iloc[0].to_dict() | change)
