"""The journal of verdicts, its shipped data, and the command line over both."""

import argparse
import hashlib
import json
import os
import re
from pathlib import Path

import pandas as pd
import pytest

from k3lab.errors import BadInput
from k3lab.races import cli
from k3lab.races.compiled import RECOMPUTE_W_U
from k3lab.races.matrix import CONFIGS, INPUTS, KEYS, matrix_builds, read_journal, run_matrix, verdict_table

DATA = Path(__file__).parent.parent / "data" / "race_matrix.jsonl"


@pytest.fixture(scope="module")
def shipped() -> pd.DataFrame:
    return pd.DataFrame(read_journal(DATA))


def worst(rows: pd.DataFrame, **where) -> dict:
    """{config: verdicts at full, length1, middle, tail} of the rows selected."""
    for k, v in where.items():
        rows = rows[rows[k] == v]
    return {(w, s): dict(zip(g["input"], g["verdict"], strict=True)) for (w, s), g in rows.groupby(["warps", "stages"])}


def races_at(rows: pd.DataFrame, **where) -> dict:
    """{config: the inputs at which it races} where it does at all."""
    found = {c: {i for i, v in by.items() if v == "race"} for c, by in worst(rows, **where).items()}
    return {c: i for c, i in found.items() if i}


ALL, MASKED = set(INPUTS), {"length1", "tail"}
S4 = {(w, 4): ALL for w in (2, 4, 8)}
S3 = {(w, 3): MASKED for w in (2, 4)}


def test_shipped_matrix_is_whole_and_is_what_its_card_says(shipped):
    data = DATA.read_bytes()
    card = DATA.with_suffix(".md").read_text()
    assert hashlib.sha256(data).hexdigest() in card
    assert len(data) < 2_000_000
    assert len(shipped) == 4 * 2 * 2 * 2 * 2 * 9 * 4
    assert not shipped.duplicated(list(KEYS)).any()
    assert set(shipped["verdict"]) == {"ordered", "race", "uninitialised"}


@pytest.mark.parametrize("padding", ["undefined", "zero"])
@pytest.mark.parametrize(("triton", "expected"), [("3.6.0", S4 | S3), ("3.7.1", S4 | S3), ("3.8.0", S4), ("3.9.0", {})])
def test_shipped_matrix_has_the_measured_races(shipped, triton, expected, padding):
    """mechanism: the pipelined copy that LLVM deletes (stages 4), the skipped masked copy (w2s3, w4s3 up to 3.7.1); 3.9 orders all."""
    where = {"triton": triton, "target": "hip:gfx950", "async": "on", "pointer_range": False, "padding": padding}
    assert races_at(shipped, **where) == expected


def test_pointer_range_or_no_async_copy_orders_everything(shipped):
    safe = shipped[shipped["pointer_range"] | (shipped["async"] == "off")]
    assert set(safe["verdict"]) == {"ordered"}


def test_masked_rows_read_uninitialised_lds_unless_other_is_zero(shipped):
    rows = shipped[(shipped["async"] == "on") & ~shipped["pointer_range"] & (shipped["target"] == "hip:gfx950")]
    count = rows["uninitialised"].fillna(0)
    assert (count[rows["padding"] == "zero"] == 0).all()
    undefined = rows["padding"] == "undefined"
    assert (count[undefined & rows["input"].isin(MASKED)] > 0).all()
    assert (count[undefined & ~rows["input"].isin(MASKED)] == 0).all()


def test_wait_that_suffices_differs_by_input(shipped):
    rows = shipped[
        (shipped["triton"] == "3.6.0") & (shipped["target"] == "hip:gfx950") & (shipped["warps"] == 4) & (shipped["stages"] == 4)
    ]
    rows = rows[(rows["async"] == "on") & ~rows["pointer_range"] & (rows["padding"] == "undefined")].set_index("input")
    assert {i: [w["enough"] for w in rows.loc[i, "waits"]] for i in INPUTS} == {"full": [2], "length1": [1], "middle": [2], "tail": [1]}
    assert rows.loc["full", "waits"][0]["pairs"] == {"4": 16, "3": 8, "2": 0}
    assert rows.loc["length1", "waits"][0]["pairs"] == {"4": 2, "3": 2, "2": 2, "1": 0}


def test_verdict_table_shows_the_worst_per_config(shipped):
    table = verdict_table(shipped, by=("triton", "pointer_range"))
    assert list(table.columns) == [f"w{w}s{s}" for w, s in CONFIGS]
    assert table.loc[("3.9.0", False), "w4s4"] == "uninitialised"
    assert table.loc[("3.8.0", False), "w4s4"] == "race"
    assert table.loc[("3.8.0", True), "w4s4"] == "ordered"
    with pytest.raises(BadInput, match="no rows"):
        verdict_table(shipped[:0])


def test_a_slice_run_live_resumes_and_agrees_with_the_shipped_rows(shipped, tmp_path, monkeypatch):
    """Killed after one row and a half: the torn line goes, the finished row stays, nothing is doubled."""
    monkeypatch.setenv("K3LAB_ARTEFACTS", str(tmp_path / "artefacts"))
    journal = tmp_path / "rows.jsonl"
    builds = matrix_builds(["installed"], ["hip:gfx950"], [False], [True], ["undefined"], [(4, 4)])
    first = run_matrix(builds, journal, jobs=1, progress=False)
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(lines[0] + lines[1][:40])
    again = run_matrix(builds, journal, jobs=1, progress=False)
    assert sorted(journal.read_text().splitlines()) == sorted(x.rstrip("\n") for x in lines)
    assert len(again) == len(first) == len(INPUTS)
    keys = list(KEYS)
    if set(first["triton"]) <= set(shipped["triton"]):
        both = first.merge(shipped, on=keys, suffixes=("", "_shipped"))
        assert len(both) == len(INPUTS)
        assert both["verdict"].tolist() == both["verdict_shipped"].tolist()
        assert both["race"].tolist() == both["race_shipped"].tolist()


def test_reading_a_journal_leaves_the_file_as_it_is(shipped, tmp_path):
    path = tmp_path / "rows.jsonl"
    whole = DATA.read_text().splitlines(keepends=True)[:2]
    for text, rows in (("".join(whole) + '{"kernel": "reco', 2), ("".join(whole), 2), ('{"ker', 0)):
        path.write_text(text)
        assert len(read_journal(path)) == rows
        assert path.read_text() == text
    path.write_text("a file of somebody else, with no line end")
    with pytest.raises(BadInput, match="line 1: not JSON"):
        run_matrix([], path, jobs=1, progress=False)
    assert path.read_text().endswith("no line end")


def test_a_foreign_journal_is_refused_by_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    with pytest.raises(BadInput, match=r"line 1: not a row.*lacks"):
        read_journal(path)
    path.write_text("not json\n")
    with pytest.raises(BadInput, match="line 1: not JSON"):
        read_journal(path)
    path.write_text("[]\n")
    with pytest.raises(BadInput, match="JSON object"):
        read_journal(path)


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args(words)
    return args.run(args)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Artefacts of one racy and one ordered build, as the races command leaves them; also its answer."""
    folder = tmp_path_factory.mktemp("artefacts")
    old = os.environ.get("K3LAB_ARTEFACTS")
    os.environ["K3LAB_ARTEFACTS"] = str(folder)
    yield folder
    if old is None:
        del os.environ["K3LAB_ARTEFACTS"]
    else:
        os.environ["K3LAB_ARTEFACTS"] = old


def test_command_line_finds_the_race_and_lds_finds_it_again_in_the_folder(cache, capsys):
    assert command("races", RECOMPUTE_W_U, "--configs", "w4s4", "--inputs", "full", "--jobs", "1", "--json") == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    seen = {r["pointer_range"]: (r["warps"], r["stages"], r["padding"], r["input"], r["verdict"]) for r in rows}
    assert seen == {True: (4, 4, "undefined", "full", "ordered"), False: (4, 4, "undefined", "full", "race")}
    racy = next(r for r in rows if r["verdict"] == "race")
    assert {"kind", "first", "second", "tile", "bytes", "waves", "wait", "message"} <= set(racy["findings"][0])

    assert command("lds", str(cache), "--inputs", "full") == 1
    text = capsys.readouterr().out
    assert re.search(r"LDS-DMA by global_load_lds.*\n.*full\s+race", text)
    assert re.search(r"LDS-DMA by buffer_load.*\n.*full\s+ordered", text)
    assert "assumed: " in text
    ordered = next(p for p in cache.rglob("*.amdgcn") if "buffer_load_dwordx4" in p.read_text() and "global_load_lds" not in p.read_text())
    assert command("lds", str(ordered)) == 0

    # assembly alone: no names, so the inputs cannot be given until --args says them
    alone = cache / "alone.amdgcn"
    alone.write_text(ordered.read_text())
    assert command("lds", str(alone)) == 2
    capsys.readouterr()
    assert command("lds", str(alone), "--args", "k,kg,v,beta,w,u,A,gk,cu_seqlens,chunk_indices,T") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["races", RECOMPUTE_W_U, "--target", "cuda:90"], "LDS analysis is for AMD"),
        (["races", RECOMPUTE_W_U, "--target", "gfx950"], "write hip:gfx950"),
        (["races", RECOMPUTE_W_U, "--target", "hip:gfx1"], "hip:gfx1"),
        (["races", RECOMPUTE_W_U, "--configs", "4x2"], "'4x2'"),
        (["races", RECOMPUTE_W_U, "--signature", "[1"], "--signature"),
        (["races", RECOMPUTE_W_U, "--inputs", "full,most"], "--inputs most: neither"),
        (["races", RECOMPUTE_W_U, "--jobs", "0"], "jobs is 0"),
        (["lds", "no/such.amdgcn"], "no/such.amdgcn"),
        (["lds", "."], "holds no .amdgcn"),
        (["toolchain", "add"], "at least one VERSION"),
        (["toolchain", "list", "3.8.0"], "takes no VERSION"),
    ],
)
def test_bad_words_are_one_clear_error(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=re.escape(message)):
        command(*words)


def test_toolchain_list(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("K3LAB_TOOLCHAINS", str(tmp_path))
    assert command("toolchain", "list") == 0
    assert "no toolchain added" in capsys.readouterr().out


def test_races_takes_its_types_from_a_capture(tmp_path, capsys):
    """A KDA capture gives the launch of the chunk forward; a capture of kind call gives each recorded argument's type."""
    import torch

    from k3lab.capture import Capture
    from k3lab.testing import random_call

    kda = Capture.from_call(random_call((1, 65), heads=2, dtype=torch.float16)).save(tmp_path / "kda.safetensors")
    common = ("--configs", "w4s4", "--inputs", "full", "--pointer-range", "off", "--jobs", "1", "--json")
    assert command("races", RECOMPUTE_W_U, "--capture", str(kda), *common) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [r["verdict"] for r in rows] == ["race"]

    source = tmp_path / "scale.py"
    source.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef scale(x, y, N: tl.constexpr):\n"
        "    o = tl.arange(0, N)\n    tl.store(y + o, tl.load(x + o) * 2)\n"
    )
    tensors = {"arg.x": torch.zeros(64), "arg.y": torch.zeros(64), "result.0": torch.zeros(1)}
    recorded = Capture(tensors, {"kind": "call"}).save(tmp_path / "call.safetensors")
    signature = ("--signature", '{"N": 64}')
    assert command("races", f"{source}:scale", "--capture", str(recorded), *signature, *common) == 0
    assert [r["verdict"] for r in json.loads(capsys.readouterr().out)["rows"]] == ["ordered"]


@pytest.mark.parametrize("change", [{"triton": ["3.6.0"]}, {"warps": "2"}, {"pointer_range": 1}, {"verdict": "fine"}, {"verdict": {}}, "["])
def test_a_journal_row_with_a_value_of_another_type_is_refused_by_line(tmp_path, change):
    row = read_journal(DATA)[0]
    text = "[" * 100_000 if change == "[" else json.dumps(row | change)
    (tmp_path / "m.jsonl").write_text(f"{json.dumps(row)}\n{text}\n")
    with pytest.raises(BadInput, match="line 2"):
        read_journal(tmp_path / "m.jsonl")
