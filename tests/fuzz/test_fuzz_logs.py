"""Logs, metrics and responses that were damaged, mixed or made up, through k3lab.drafter.logs.read and the command acceptance."""

import gzip
import json
from pathlib import Path

import pytest
from hostile import CANARY, ROOT, TOKENS, VALUES, cases, command, garbled, mutated, own_errors, watch
from hypothesis import given
from hypothesis import strategies as st

from k3lab.drafter.logs import read

LOGS = sorted(p for p in (ROOT / "tests" / "logs").iterdir() if p.name != "README.md")
PIECES = [line for p in LOGS for line in p.read_bytes().split(b"\n") if line.strip()]
DOCUMENTS = [json.loads(p.read_bytes()) for p in LOGS if p.suffix == ".json"]


def damaged(p: Path) -> st.SearchStrategy[bytes]:
    return garbled(p.read_bytes())


@st.composite
def made_up(draw: st.DrawFn) -> bytes:
    """Lines of every engine in any order, some with pieces of others or of nothing in them."""
    lines = draw(st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(TOKENS), st.binary(max_size=30)), min_size=1, max_size=12))
    text = b"\n".join(lines)
    return draw(garbled(text)) if draw(st.booleans()) else text


def look(folder: Path, files: list[bytes], name: str = "a.log") -> None:
    paths = []
    for i, data in enumerate(files):
        paths.append(folder / f"{i}{name}")
        paths[-1].write_bytes(data)
    with watch(folder), own_errors():
        found = read(paths)
        json.dumps(found.summary())
        counts = found.counted
        if len(counts):
            stated = counts.dropna(subset=["drafted", "accepted"])
            assert (stated["accepted"] <= stated["drafted"]).all(), "more accepted than drafted"
            assert (counts["drafts"].dropna() >= 0).all()
        if found.totals is not None and found.totals.mean_emitted is not None:
            assert found.totals.mean_emitted == found.totals.mean_emitted, "a mean that is not a number"


@pytest.mark.parametrize("log", LOGS, ids=[p.name for p in LOGS])
@cases(6)
@given(data=st.data())
def test_a_log_damaged(tmp_path_factory, log, data):
    folder = tmp_path_factory.getbasetemp()
    look(folder, [data.draw(damaged(log))])


@cases(50)
@given(files=st.lists(st.one_of(made_up(), *map(damaged, LOGS)), min_size=1, max_size=3))
def test_lines_of_all_engines_mixed(tmp_path_factory, files):
    look(tmp_path_factory.getbasetemp(), files)


@cases(40)
@given(document=st.sampled_from(DOCUMENTS).flatmap(mutated), before=st.sampled_from([b"", b"INFO ", b"[1, 2] {} ", b"data: "]))
def test_responses_with_other_values(tmp_path_factory, document, before):
    text = json.dumps(document).encode()
    look(tmp_path_factory.getbasetemp(), [before + text, text + b"\n" + text])


@cases(30)
@given(data=st.data())
def test_packed_logs_damaged(tmp_path_factory, data):
    """A .gz that was cut, altered, or packed around something that is no log."""
    inside = data.draw(st.sampled_from([b"".join(x + b"\n" for x in PIECES), b"", b"\x00" * 100, b"x" * 70_000]))
    packed = gzip.compress(inside, mtime=0)
    look(tmp_path_factory.getbasetemp(), [data.draw(garbled(packed)) if data.draw(st.booleans()) else packed], "a.log.gz")


@cases(25)
@given(data=st.data())
def test_acceptance_from_the_command_line(tmp_path_factory, data):
    """Status, one line on stderr, strict JSON; the report and the figure are written whole or not at all."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "a.log"
    path.write_bytes(data.draw(st.one_of(made_up(), *map(damaged, LOGS))))
    drawn = data.draw(st.sampled_from([False, False, False, True]))
    command(folder, ["acceptance", path, *data.draw(st.sampled_from([[], ["--json"]]))], out=drawn)
    assert sorted(p.name for p in folder.iterdir() if p.name != "out") == ["a.log"]


@cases(20)
@given(text=st.one_of(st.text(max_size=60), made_up().map(lambda b: b.decode("utf-8", "surrogateescape"))))
def test_pasted_text_of_any_kind(tmp_path_factory, text):
    with watch(tmp_path_factory.getbasetemp()), own_errors():
        read(text).summary()


@cases(20)
@given(value=VALUES, data=st.data())
def test_the_log_that_a_passport_is_held_against(tmp_path_factory, value, data):
    """--log beside a config: what the log says may be anything."""
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_text(json.dumps({"architectures": ["K3DSparkModel"], "dspark_target_layer_ids": [1, 2], "x": value}))
    line = next(x for x in PIECES if b"aux hidden capture" in x)
    (folder / "a.log").write_bytes(data.draw(garbled(line)))
    command(folder, ["passport", folder / "config.json", "--engine", "vllm", "--version", "0.33.0", "--log", folder / "a.log", "--json"])


def test_names_in_a_log_start_nothing(tmp_path, monkeypatch):
    (tmp_path / f"{CANARY}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = next(x for x in PIECES if b"SpecDecoding metrics" in x).decode()
    document = {"model": f"{CANARY}:f", "metrics": {"speculative_decoding": {"__reduce__": ["os.system", f"touch {tmp_path}/ran"]}}}
    (tmp_path / "a.log").write_text(f"{line}\n__import__('{CANARY}')\n$(touch {tmp_path}/ran)\n{json.dumps(document)}\n")
    command(tmp_path, ["acceptance", tmp_path / "a.log", "--json"])
    assert not (tmp_path / "ran").exists()
