"""The committed measurement of bench/h200.py: what the README shows of it, its card and its figure."""

import json
import sys
from pathlib import Path

import pytest

from k3lab import figures

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def h200():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import h200
    finally:
        sys.path.pop(0)
    return h200


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "data" / "h200.json").read_text())


def test_the_readme_shows_the_measurement(h200, result):
    """The table is the summary of the record, digit by digit, and the prose beside it holds."""
    text = (ROOT / "README.md").read_text()
    assert figures.markdown_table(h200.summary(result)) in text
    memory = result["peak_bytes"]["k3lab"] / result["peak_bytes"]["fla"]
    assert f"peaks at {memory:.2f} of fla-core's memory" in text
    (chunk, mixed, decodes, _), kernels = result["times"], {k["kernel"]: k["ms"] for k in result["kernels"] if k["of"] == "k3lab"}
    assert f"in a graph, {mixed['k3lab / fla graph']:.2f} for 0.4: the 128 decodes, at {decodes['k3lab / floor']:.2f} of" in text
    assert decodes["k3lab graph_ms"] / mixed["k3lab graph_ms"] == pytest.approx(1 / 3, abs=0.02)
    at_floor = mixed["k3lab graph_ms"] - decodes["k3lab graph_ms"] + decodes["floor_ms"]
    assert f"at the floor the batch\n  would reach {at_floor / mixed['fla graph_ms']:.2f}" in text
    again = next(r for r in result["growth_tokens"] if r["tokens"] == h200.LONG)
    assert f"{chunk['k3lab wall_ms']:.3f} and {again['k3lab wall_ms']:.3f} in the one run" in text
    twice = [(chunk, again), (decodes, next(r for r in result["growth_decodes"] if r["decodes"] == h200.DECODES))]
    assert all(abs(a[f"{w} graph_ms"] / b[f"{w} graph_ms"] - 1) < 0.03 for a, b in twice for w in ("k3lab", "fla"))
    assert text.count("**0.") == sum("**" in x for x in h200.summary(result)[["in a graph", "called"]].to_numpy().flatten())
    assert round(chunk["k3lab / floor"]) == 7
    shares = sum(kernels.values()), *(kernels[f"fused_{k}_fwd_kernel"] for k in ("halves", "state", "gate"))
    assert "sum to {:.2f} ms: `halves` {:.2f}, `state` {:.2f}, `gate` {:.2f}.".format(*shares) in text
    small = [r for r in result["attn_res"] if r["tokens"] < 4096]
    ratios = [r["k3lab / fla graph"] for r in small]
    assert f"in a graph, {min(ratios):.2f} to {max(ratios):.2f} for 0.5" in text
    assert (small[0]["bytes"], round(small[0]["k3lab graph_ms"] * 1e3)) == (172032, 6)


def test_every_result_of_ours_was_within_its_budget_before_it_was_timed(result):
    ours = [r for r in result["accuracy"] if r["what"].startswith("k3lab")]
    assert len(ours) > 60
    assert all(r["ok"] and r["error"] <= r["budget"] for r in ours)
    assert {d for r in ours for d in ("bfloat16", "float32") if d in r["what"]} == {"bfloat16", "float32"}


def test_the_card_is_of_the_record(h200, result):
    assert (ROOT / "data" / "h200.md").read_text() == h200.card("h200.json", result, "python bench/h200.py --out h200.json")


def test_a_card_names_the_sources_that_ran(h200, result):
    more = result | {"sources": {n: h200.sha256(h200.PACKAGE / n) for n in h200.SOURCES}, "peak_bytes_short": {"k3lab": 2e6, "fla": 3e6}}
    text = h200.card("h200.json", more, "made")
    assert all(digest in text for digest in more["sources"].values())
    assert "of 128 sequences of one token: k3lab 2 MB, fla 3 MB." in text


def test_the_growth_figure_can_be_read(h200, result):
    fig, frame = h200.figure(result)
    assert figures.problems(fig) == []
    assert len(frame) == len(h200.TOKENS) + len(h200.SEQUENCES)
    assert "measured on one NVIDIA H200" in " ".join(t.get_text() for t in fig.texts).replace("\n", " ")


def lacking(result: dict, key: str) -> str:
    return json.dumps({k: v for k, v in result.items() if k != key})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[1]", "list indices"),
        ("growth_tokens", "it lacks 'growth_tokens'"),
        ("targets", "it lacks 'targets'"),
    ],
    ids=["no file", "no JSON", "a list", "no curves", "no summary"],
)
def test_drawing_another_file_is_refused_before_anything_is_written(content, why, h200, result, tmp_path, monkeypatch, capsys):
    path = tmp_path / "made.json"
    if content is not None:
        path.write_text(lacking(result, content) if content in result else content)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("K3LAB_OUT", str(tmp_path / "out"))
    monkeypatch.setattr(sys, "argv", ["h200.py", "--draw", str(path)])
    with pytest.raises(SystemExit) as done:
        h200.main()
    assert done.value.code == 2
    message = capsys.readouterr().err
    assert f"--draw {path}: is not a result of this script: " in message
    assert why in message
    assert "give a file that --out wrote" in message
    assert sorted(tmp_path.iterdir()) == before


def test_drawing_a_result_leaves_its_picture_beside_it(h200, result, tmp_path, monkeypatch, capsys):
    path = tmp_path / "made.json"
    path.write_text(json.dumps(result))
    monkeypatch.setenv("K3LAB_OUT", str(tmp_path / "out"))
    monkeypatch.setattr(sys, "argv", ["h200.py", "--draw", str(path)])
    h200.main()
    assert path.with_suffix(".png").read_bytes() == (tmp_path / "out" / "h200_growth.png").read_bytes()
    assert figures.markdown_table(h200.summary(result)) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--out", "h200.md"], "ends in .json"),
        (["--out", "missing/h200.json"], "folder that exists"),
        (["--draw", "h200.json", "--sweep"], "measures nothing"),
    ],
)
def test_options_that_cannot_be_met_are_refused_before_measuring(options, why, h200, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["h200.py", *options])
    with pytest.raises(SystemExit) as done:
        h200.main()
    assert done.value.code == 2
    assert why in capsys.readouterr().err
