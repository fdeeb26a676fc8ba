"""Acceptance read from logs: every format and version to the same counts, what is added and what is not, what is not understood."""

import gzip
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lab.drafter import log_input
from k3lab.drafter.acceptance import check_counts, summarize
from k3lab.drafter.logs import read
from k3lab.errors import BadInput

LOGS = Path(__file__).parent / "logs"
# the literal line of AEON-7 #6, its elided rates filled so that they sum to 1.37
REAL = (
    "SpecDecoding metrics: Mean acceptance length: 2.37, Accepted throughput: 8.90 tokens/s, Drafted throughput: 97.50 tokens/s, Accepted: "
    "89 tokens, Drafted: 975 tokens, Per-position acceptance rate: 0.600, 0.385, 0.215, 0.092, 0.046, 0.031, 0.000, 0.000, 0.000, 0.000, "
    "0.000, 0.000, 0.000, 0.000, 0.000, Avg Draft acceptance rate: 9.1%"
)
ATOM = (
    "[MTP Stats Interval] Average toks/fwd: 1.73, Accepted/Total Draft tokens: 727/1000, Acceptance rate: 72.70%, "
    "Accepted tokens distribution: {0: '27.30%', 1: '72.70%'}"
)
REQUEST = {"speculative_decoding": {
    "mean_acceptance_length": 1.2326, "draft_acceptance_rate": 0.0775, "acceptance_histogram": [39, 1, 0, 3], "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10, "num_draft_tokens": 129, "num_spec_tokens": 3}}  # fmt: skip
DECODE = "Decode batch, #running-req: {r}, #full token: {t}, accept len: {m}, accept rate: 0.37, cuda graph: True, #queue-req: 0"


def vllm(drafts, reached, drafted=None, form="new"):
    """A line as the version prints it; form: "new" (0.10.2 on), "0.9", "0.8.5"."""
    accepted, drafted = sum(reached), len(reached) * drafts if drafted is None else drafted
    rates = ", ".join(f"{n / drafts:.3f}" for n in reached)
    mean, rate = accepted / drafts + (form != "0.8.5"), f"{accepted / drafted:.1%}"
    if form == "new":
        return (
            f"SpecDecoding metrics: Mean acceptance length: {mean:.2f}, Accepted throughput: 1.00 tokens/s, Drafted throughput: 2.00 tokens"
            f"/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {rates}, Avg Draft "
            f"acceptance rate: {rate}"
        )
    return (
        f"SpecDecoding metrics: Draft acceptance rate: {rate}, Mean acceptance length: {mean:.2f}, Accepted: {accepted} tokens, "
        f"Drafted: {drafted} tokens, Per-position acceptance rate: {rates}"
    )


def prom(drafts, reached, engine="0", created=1.7e9, total="_total"):
    """A scrape of vLLM V1 counters, with the _created samples that are no counts."""
    label = f'engine="{engine}",model_name="m"'
    counts = {"num_drafts": drafts, "num_draft_tokens": len(reached) * drafts, "num_accepted_tokens": sum(reached)}
    lines = [f"# TYPE vllm:spec_decode_num_drafts{total} counter"]
    lines += [f"vllm:spec_decode_{k}{total}{{{label}}} {float(v)}" for k, v in counts.items()]
    lines += [f"vllm:spec_decode_{k}_created{{{label}}} {created!r}" for k in counts]
    lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos{total}{{{label},position="{j}"}} {float(n)}' for j, n in enumerate(reached)]
    return "\n".join(lines) + "\n"


def counts(report):
    t = report.totals
    return t.drafts, t.drafted, t.accepted, t.emitted, t.accepted_at


def kinds(report):
    return [d.kind for d in report.diagnoses]


SAME = (1000, 3000, 1850, 2850, [800, 600, 450])


@pytest.mark.parametrize(
    "name",
    ["vllm_0.33.log", "vllm_0.8.5.log", "vllm_0.9.2.log", "vllm_bench.txt", "vllm_bench.json", "acceptance.csv", "acceptance_report.txt"],
)
def test_every_format_of_the_same_rounds_gives_the_same_counts_and_passes_its_check(name):
    report = read(LOGS / name)
    assert counts(report) == SAME
    assert (report.records["residual"].abs() <= report.records["tolerance"]).all()
    assert kinds(report) == ["healthy"]
    assert not any(u.spec_like for u in report.unread)


def test_prometheus_before_and_after_are_a_difference_and_one_scrape_counts_from_the_start():
    report = read([LOGS / "vllm_before.prom", LOGS / "vllm_after.prom"])
    assert counts(report) == SAME
    assert "read as one series" in report.notes[0]
    assert counts(read(LOGS / "vllm_after.prom")) == (5000, 15000, 7850, 12850, [3800, 2600, 1450])


def test_two_scrapes_in_one_file_and_engines_are_added():
    text = prom(100, [80, 60]) + prom(50, [10, 5], "1") + prom(300, [200, 150]) + prom(150, [50, 25], "1")
    assert counts(read(text)) == (300, 600, 270, 570, [160, 110])


def test_the_names_that_vllm_0_8_5_declares_are_read():
    assert counts(read(prom(100, [80, 60], total="")))[:3] == (100, 200, 140)


def test_a_counter_reset_counts_the_later_scrape_and_is_said():
    report = read(prom(500, [400, 300], created=1.0) + prom(100, [80, 60], created=2.0))
    assert counts(report)[:3] == (100, 200, 140)
    assert any("reset" in n for n in report.notes)


def test_scrapes_in_the_wrong_order_are_refused():
    with pytest.raises(BadInput, match="give the earlier scrape first"):
        read(prom(500, [400, 300]) + prom(100, [80, 60]))


@pytest.mark.parametrize("name", ["vllm_v0.log", "vllm_v0.prom"])
def test_v0_counts_the_accepted_prefix_and_not_every_agreeing_draft(name):
    """emitted 10616 of 13311 drafted at k = 3: 4437 rounds, so 6179 accepted before a rejection, not the 8547 that V0 prints."""
    t = read(LOGS / name).totals
    assert (t.drafts, t.drafted, t.accepted, t.emitted, t.k) == (4437, 13311, 6179, 10616, 3)


PREFIXES = {
    "bare": "", "api": "(APIServer pid=1) INFO 05-01 14:24:50 [metrics.py:101] ",
    "core": "(EngineCore_DP0 pid=47) INFO 05-01 14:24:50 [m.py:1] ",
    "engine": "INFO 05-01 14:24:50 [m.py:1] Engine 000: ", "docker": "2026-05-01T14:24:50.123456789Z ", "compose": "vllm-1  | ",
    "colour": "\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO ",
}  # fmt: skip


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES.keys())
def test_the_published_line_behind_every_prefix_and_line_end(tmp_path, prefix, end):
    log = tmp_path / "x.log"
    log.write_bytes((prefix + REAL + end).encode())
    report = read(log)
    assert counts(report) == (65, 975, 89, 154, [39, 25, 14, 6, 3, 2, *[0] * 9])
    row = report.records.iloc[0]
    assert abs(row["residual"]) <= 0.0011
    assert row["line"] == 1


def test_the_process_and_the_time_of_a_line_are_kept():
    rows = read("\n".join(PREFIXES[p] + REAL for p in ("api", "core", "engine", "docker", "bare"))).records
    assert rows["stream"].tolist() == ["APIServer pid=1", "EngineCore_DP0 pid=47", "Engine 000", "", ""]
    assert rows["ts"].tolist() == ["05-01 14:24:50"] * 3 + ["2026-05-01T14:24:50", ""]
    assert rows["line"].tolist() == [1, 2, 3, 4, 5]


@st.composite
def printed_rounds(draw):
    drafts, k = draw(st.integers(1, 900)), draw(st.integers(1, 8))
    reached, last = [], drafts
    for _ in range(k):
        last = draw(st.integers(0, last))
        reached.append(last)
    return drafts, reached


@settings(max_examples=50, deadline=None)
@given(printed_rounds(), st.sampled_from(["new", "0.9", "0.8.5"]))
def test_printed_ratios_are_worked_back_to_the_very_counts(case, form):
    """Below 1000 rounds of equal length nothing is lost in three decimals. With nothing accepted 0.8.5 and 0.9 differ in the mean."""
    drafts, reached = case
    report = read(vllm(drafts, reached, form=form) + "\n")
    assert report.records["convention"].iloc[0] == ("no bonus" if form == "0.8.5" else "bonus")
    assert counts(report) == (drafts, drafts * len(reached), sum(reached), drafts + sum(reached), reached)


@settings(max_examples=50, deadline=None)
@given(st.integers(1000, 2_000_000), st.lists(st.floats(0.05, 0.95), min_size=1, max_size=8), st.floats(0.5, 0.99))
def test_large_intervals_stay_within_the_printed_digits_and_sum_to_accepted(drafts, shares, cut):
    """Dynamic draft length: drafted is no multiple of k, so rounds come from the mean."""
    reached = [int(x) for x in drafts * np.cumprod(shares)]
    drafted = max(sum(reached), drafts, int(cut * drafts * len(reached)))
    row = read(vllm(drafts, reached, drafted) + "\n").counted.iloc[0]
    extra = sum(reached) / drafts
    assert abs(row["drafts"] / drafts - 1) <= 1.02 * min(0.005, len(reached) * 0.0005) / extra + 1 / drafts
    found = [row[f"accepted_{j}"] for j in range(len(reached))]
    assert sum(found) == row["accepted"] == sum(reached)
    assert all(b <= a for a, b in zip([row["drafts"], *found], found, strict=False))


def test_counts_are_summed_and_means_never_averaged():
    report = read(vllm(10, [10, 10]) + "\n" + vllm(990, [99, 0]) + "\n")
    assert report.totals.mean_emitted == pytest.approx((30 + 1089) / 1000)
    assert report.totals.survival == pytest.approx([109 / 1000, 10 / 1000])


def test_both_bonus_conventions_add_as_counts_and_an_undecidable_line_is_left_out_and_said():
    odd = "SpecDecoding metrics: Draft acceptance rate: 50.0%, Mean acceptance length: 1.50, Accepted: 10 tokens, Drafted: 20 tokens"
    report = read("\n".join([vllm(100, [80, 40], form="0.8.5"), vllm(200, [160, 80], form="0.9"), odd]))
    assert report.records["convention"].tolist() == ["no bonus", "bonus", "unknown"]
    assert counts(report)[:3] == (300, 600, 360)
    assert any("left out" in n for n in report.notes)
    assert any("not their means" in n for n in report.notes)


def test_the_first_v1_line_has_no_rounds_and_gives_no_mean():
    report = read("SpecDecoding metrics: Draft acceptance rate: 50.0%, Accepted: 66 tokens, Drafted: 132 tokens\n")
    assert (report.totals.accepted, report.totals.drafted, report.totals.drafts, report.totals.mean_emitted) == (66, 132, None, None)
    assert "66 of 132" in report.diagnosis.text


def test_intervals_in_which_nothing_was_drafted_are_flagged_and_add_nothing():
    nan = REAL.replace("2.37", "nan").replace("89 tokens", "0 tokens").replace("975 tokens", "0 tokens").replace("9.1%", "nan%")
    report = read(f"{nan}\n{REAL}\n")
    assert counts(report)[:3] == (65, 975, 89)
    assert len(report.flags["nan"]) == 1


def test_atom_intervals_are_counted_and_their_cumulative_twins_are_not():
    report = read(LOGS / "atom.log")
    assert counts(report) == (2000, 4000, 2730, 4730, [1540, 1190])
    assert (report.records["residual"].abs() <= report.records["tolerance"]).all()
    assert counts(read(ATOM + "\n")) == (1000, 1000, 727, 1727, [727])


def test_atom_cumulative_lines_alone_count_once_and_survive_a_restart():
    twin = ATOM.replace("Interval]", "        ]")
    later = twin.replace("727/1000", "1454/2000")
    assert counts(read(f"{twin}\n{later}\n"))[:3] == (2000, 2000, 1454)
    assert counts(read(f"{twin}\n{later}\n{twin}\n"))[:3] == (3000, 3000, 2181)


def test_a_per_request_record_gives_exact_positions():
    report = read(LOGS / "vllm_request.json")
    assert counts(report) == (43, 129, 10, 53, [4, 3, 3])
    assert report.records["length"].tolist() == [154]
    assert report.records["model"].tolist() == ["moonshotai/Kimi-K3"]


@pytest.mark.parametrize("wrap", ["{}", "INFO 05-01 [x.py:1] response: {} took 3 s", "data: {}", "2026-05-01T14:24:50Z {{x}} {}"])
def test_json_lines_behind_any_prefix(wrap):
    body = json.dumps({"id": "a", "metrics": REQUEST})
    text = wrap.format(body) + "\n" + wrap.format(body.replace('"a"', '"b"')) + "\n"
    assert counts(read(text)) == (86, 258, 20, 106, [8, 6, 6])


def test_chunks_of_a_streamed_response_are_counted_once():
    meta = {"id": "r", "spec_verify_ct": 2, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 14, "completion_tokens": 5}
    last = {**meta, "spec_verify_ct": 5, "spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 35}
    report = read("".join(f"data: {json.dumps({'meta_info': m})}\n" for m in (meta, last)))
    assert counts(report)[:3] == (5, 35, 9)
    assert any("earlier states" in n for n in report.notes)


def test_sglang_response_counts_go_before_its_mean_that_has_the_prefill_token():
    report = read(LOGS / "sglang_response.json")
    assert counts(report) == (3, 21, 3, 6, [2, 1])
    old = {"meta_info": {"spec_verify_ct": 3, "spec_accept_token_num": 3, "spec_draft_token_num": 21, "spec_accept_histogram": [1, 1, 1]}}
    assert counts(read(json.dumps(old) + "\n")) == (3, 21, 3, 6, [2, 1])


def test_sglang_lines_are_weighted_by_running_requests_and_said_to_be_estimated():
    report = read(LOGS / "sglang.log")
    assert report.totals.mean_emitted == pytest.approx((8 * 3.56 + 4 * 3.20 + 12 * 3.80) / 24)
    assert report.totals.drafts is None
    assert report.totals.estimated_drafts == 40 * 24
    assert report.totals.k == 7
    assert report.records["length"].tolist() == [5000.0] * 3
    assert read(LOGS / "sglang_old.log").totals.mean_emitted == 2.4


def test_further_tensor_parallel_ranks_of_sglang_add_nothing():
    def line(rank, mean):
        return f"[2026-05-27 20:14:38 {rank}] " + DECODE.format(r=8, t=100, m=mean)

    one = read("\n".join([line("DP0 TP0", 3.0), line("DP1 TP4", 5.0)]))
    assert one.totals.mean_emitted == pytest.approx(4.0)
    many = read("\n".join([line("TP0", 3.0), line("TP1", 3.0), line("TP2", 3.0)]))
    assert (len(many.records), many.totals.records) == (3, 1)


@pytest.mark.parametrize(("name", "mean"), [("sglang_server_info.json", 3.56), ("sglang_bench.txt", 3.56), ("sglang.prom", 3.2)])
def test_a_lone_printed_mean_is_no_verdict(name, mean):
    report = read(LOGS / name)
    assert report.totals.mean_emitted == mean
    assert kinds(report) == ["undecided"]


AUX = "(Worker pid=7) INFO Kimi-K3 aux hidden capture: layers=(2, 23, 47) mode={} (VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1)"


@pytest.mark.parametrize(("word", "mode"), [("attn_res_stream", "mixture"), ("prefix_only", "prefix")])
def test_the_aux_line_names_stream_and_layers(word, mode):
    report = read(f"{AUX.format(word)}\n{AUX.format(word)}\n{REAL}\n")
    assert report.mode == report.summary()["mode"] == mode
    assert [a.layers for a in report.aux] == [[2, 23, 47]]


def test_eagle3_layers_are_kept_without_a_mode_and_two_modes_are_both():
    report = read("INFO [eagle3_utils.py:28] Using Eagle3 auxiliary layers from config: (41, 42, 43)\n")
    assert (report.aux[0].layers, report.mode, kinds(report)) == ([41, 42, 43], None, ["no acceptance"])
    assert read("\n".join([AUX.format("prefix_only"), AUX.format("attn_res_stream")])).mode == "both"
    odd = read(AUX.format("something_new") + "\n")
    assert (odd.mode, odd.unread[0].spec_like) == (None, 1)


@pytest.mark.parametrize(
    "line",
    ["export SGLANG_SIMULATE_ACC_LEN=3.61", "env: {'SGLANG_SIMULATE_ACC_LEN': '2.5'}", "--method mtp --spec-decode-acceptance-rate 0.59",
     "speculative_config={'method': 'dspark', 'rejection_sample_method': 'synthetic'}"],
)  # fmt: skip
def test_simulated_acceptance_is_flagged(line):
    report = read(f"{line}\n{vllm(1000, [800, 600])}\n")
    assert kinds(report)[0] == "simulated"
    assert report.finding


@pytest.mark.parametrize("line", ["unset SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_LEN=0", "{'rejection_sample_method': 'strict'}"])
def test_simulation_that_is_off_is_not_flagged(line):
    assert "simulated" not in read(f"{line}\n{REAL}\n").flags


def test_a_diffusion_model_has_no_draft_acceptance():
    report = read("INFO DiffusionDecoding metrics: Committed token throughput: 9.00 tokens/s, Mean denoising steps per canvas: 18.00\n")
    assert kinds(report) == ["diffusion"]


def test_engines_are_not_mixed_into_one_total():
    report = read(f"{vllm(1000, [800])}\n{ATOM}\n[2026-05-27 20:14:38 TP0] {DECODE.format(r=8, t=9, m=3.0)}\n")
    assert report.totals is None
    assert kinds(report) == ["mixed engines"]
    assert {(g.engine, g.drafts) for g in report.groups} == {("vllm", 1000), ("atom", 1000), ("sglang", None)}
    assert report.summary()["mean_emitted"] is None


def test_log_and_metrics_of_one_engine_are_not_added(tmp_path):
    log, metrics = tmp_path / "a.log", tmp_path / "b.prom"
    log.write_text(vllm(900, [700, 500]) + "\n")
    metrics.write_text(prom(1000, [800, 600]))
    report = read([log, metrics])
    assert counts(report)[:3] == (1000, 2000, 1400)
    assert any("not added" in n for n in report.notes)


# ---------------------------------------------------------------- what is not understood


def test_a_log_of_an_unknown_engine_is_said_to_be_one_with_its_first_lines():
    report = read(LOGS / "unknown.log")
    assert not report.recognised
    assert kinds(report) == ["unknown engine"]
    assert report.unread[0].first[0][:2] == (1, "I0501 14:24:50.000000 4711 server.cc:12] listening on 8000")


def test_acceptance_of_an_engine_that_is_not_read_is_counted_and_shown():
    report = read(LOGS / "llama_cpp.log")
    (unread,) = report.summary()["not_understood"]
    assert (unread["spec_like"], unread["ordinary"], unread["first"][0]["line"]) == (1, 1, 2)
    assert kinds(report) == ["no acceptance"]


def test_cut_and_overwritten_lines_are_counted_apart_from_ordinary_ones():
    text = "\n".join(
        [REAL, "INFO: GET /health 200", REAL[:210], REAL.replace(", Drafted: ", "(APIServer pid=2) "), REAL[: REAL.index(", Avg")]]
    )
    (unread,) = read(text).unread
    assert (unread.lines, unread.records, unread.ordinary, unread.spec_like) == (5, 1, 1, 3)
    assert [n for n, _, _ in unread.first] == [3, 4, 5]


def test_an_engine_that_does_not_speculate_is_not_called_unknown():
    line = "(APIServer pid=1) INFO [loggers.py:310] Engine 000: Avg prompt throughput: 9 tokens/s, Avg generation throughput: 1.0 tokens/s"
    report = read(line + "\n")
    assert kinds(report) == ["not drafting"]
    assert report.recognised
    assert "SpecDecoding metrics" in report.diagnosis.text


def test_reports_behind_a_prefix_with_lines_in_between_are_read():
    bench = (LOGS / "vllm_bench.txt").read_text().splitlines()
    mixed = [x for line in bench for x in (f"client-1  | {line}", "server-1  | INFO: GET /health 200")]
    report = read("\n".join(mixed))
    assert counts(report) == SAME
    assert report.unread[0].ordinary == len(bench) + 2


def test_a_report_without_its_counts_is_not_understood():
    report = read("---------------Speculative Decoding---------------\nAcceptance length:      3.50\n======\n")
    assert (len(report.records), report.unread[0].spec_like) == (0, 1)


BAD_RECORDS = {
    "negative": {"num_spec_steps": -1}, "huge": {"num_spec_steps": 10**30}, "text": {"num_draft_tokens": "129"},
    "nan": {"num_spec_steps": float("nan")},
    "bool": {"num_draft_tokens": True}, "fraction": {"num_draft_tokens": 1.5},
    "histogram of other rounds": {"acceptance_histogram": [1, 2]},
    "histogram of texts": {"acceptance_histogram": ["39", 1, 0, 3]}, "long histogram": {"acceptance_histogram": [0] * 5000 + [43]},
    "accepted over drafted": {"num_accepted_draft_tokens": 130},
}  # fmt: skip


@pytest.mark.parametrize("change", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_a_record_that_cannot_be_is_counted_and_not_used(change):
    report = read(json.dumps({"metrics": {"speculative_decoding": {**REQUEST["speculative_decoding"], **change}}}) + "\n")
    assert len(report.records) == 0
    assert report.unread[0].spec_like == 1


def test_rates_that_are_no_survival_give_no_positions_and_too_many_are_refused():
    rising = read(vllm(100, [40, 40]).replace("0.400, 0.400", "0.300, 0.500") + "\n")
    assert rising.totals.accepted_at == []
    many = read(vllm(100, [1] * 65) + "\n")
    assert (len(many.records), many.unread[0].spec_like) == (0, 1)


# ---------------------------------------------------------------- inputs


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_read(tmp_path, pack):
    """What a shell makes of `<(zcat server.log.gz)`."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(pack(REAL.encode() + b"\n"),))
    writer.start()
    assert read(tmp_path / "pipe").recognised
    writer.join()


def test_gz_and_invalid_utf8_are_read(tmp_path):
    packed = tmp_path / "x.log.gz"
    packed.write_bytes(gzip.compress(b"\xff\xfa caf\xe9\n" + REAL.encode() + b"\n"))
    assert counts(read(packed))[:3] == (65, 975, 89)


def bad_inputs(folder):
    good = gzip.compress(REAL.encode() * 50)
    files = {
        "empty.log": b"",
        "blank.log": b" \n\n",
        "binary.log": b"\x7fELF\0\0",
        "utf16.log": "x\n".encode("utf-16"),
        "cut.log.gz": good[:-20],
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [(folder / "empty.log", "empty"), (folder / "blank.log", "empty"), (folder / "binary.log", "binary"),
            (folder / "utf16.log", "UTF-16"),
            (folder / "cut.log.gz", "damaged"), (folder / "none.log", "no such file"), (folder, "a folder"), ([], "no log given"),
            ("", "empty"), ("\n", "empty"), ("a\0b.log", "cannot be read"), ([folder / "empty.log"] * 2, "more than once")]  # fmt: skip


def test_inputs_that_are_no_logs_are_refused_with_their_name(tmp_path):
    for given_, why in bad_inputs(tmp_path):
        with pytest.raises(BadInput, match=why):
            read(given_)


def test_chunk_borders_change_nothing(monkeypatch):
    text = "\n".join(
        [(LOGS / n).read_text() for n in ("vllm_0.33.log", "vllm_bench.txt", "acceptance.csv", "vllm_v0.log", "llama_cpp.log")]
        + [prom(9, [5])]
    )
    whole = read(text)
    for size in (64, 257, 1000):
        monkeypatch.setattr(log_input, "CHUNK", size)
        part = read(text)
        assert part.records.astype(object).equals(whole.records.astype(object))
        assert part.unread == whole.unread


def test_a_line_without_end_is_not_kept_and_not_read_to_its_end(monkeypatch):
    for name in ("LONGEST", "CHUNK"):
        monkeypatch.setattr(log_input, name, 1 << 16)
    text = "x accept len: 3 " * 20000
    report = read(f"{REAL}\n{text}\n{REAL}\n")
    assert counts(report)[:3] == (130, 1950, 178)
    (unread,) = report.unread
    assert (unread.lines, unread.spec_like) == (3, 1)
    assert max(len(shown) for _, shown, _ in unread.first) <= 200


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000 + '"spec_verify_ct"', '{"spec_verify_ct": ' * 50_000 + "1" + "}" * 50_000, '{"spec_verify_ct": ' + "9" * 10_000 + "}",
     '{"spec_verify_ct": NaN, "spec_accept_length": Infinity}', "vllm:spec_a{" * 100_000, 'vllm:spec_a{x="' * 100_000],
    ids=["deep", "deep object", "huge integer", "nan", "names", "open quotes"],
)  # fmt: skip
def test_hostile_lines_are_counted_and_cost_no_traceback(text):
    report = read(f"{text}\n{REAL}\n")
    assert counts(report)[:3] == (65, 975, 89)
    assert report.unread[0].spec_like + report.unread[0].records >= 2


SEEDS = [
    p.read_bytes() for p in sorted(LOGS.iterdir()) if p.suffix != ".md"
] + [REAL.encode(), ATOM.encode(), AUX.format("prefix_only").encode(), json.dumps(REQUEST).encode()]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_input_raises_nothing_but_bad_input_and_loses_no_line(tmp_path_factory, data):
    """Bytes replaced, cut, doubled: every line is a record's, not understood, or ordinary, and the summary stays strict JSON."""
    base = bytearray(b"\n".join(data.draw(st.lists(st.sampled_from(SEEDS), min_size=1, max_size=3))))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(base) - 1))
        base[at : at + data.draw(st.integers(0, 8))] = data.draw(
            st.sampled_from([b"", b"9", b"9" * 40, b"nan", b"-", b"{", b"\n", b'"', b"\xff", b".", b",", b"}"])
        )
    path = tmp_path_factory.getbasetemp() / "fuzz.log"
    path.write_bytes(bytes(base))
    try:
        report = read(path)
    except BadInput:
        return
    json.dumps(report.summary(), allow_nan=False)
    (unread,) = report.unread
    assert unread.lines == len(bytes(base).removesuffix(b"\n").split(b"\n"))
    assert unread.ordinary <= unread.lines
    found = sum(b"SpecDecoding metrics: " in line for line in bytes(base).split(b"\n"))
    assert unread.records + unread.spec_like >= found


def test_counted_rows_are_a_counts_frame_for_the_summaries():
    report = read(LOGS / "vllm_0.33.log")
    check_counts(report.counted)
    table = summarize(report.counted).set_index(["metric", "position"])["value"]
    assert table.loc["mean_emitted"].iloc[0] == report.totals.mean_emitted
    assert table.loc["survival"].tolist() == pytest.approx(report.totals.survival)
    check_counts(read(LOGS / "sglang.log").records)


def test_the_summary_has_its_keys_and_is_strict_json():
    keys = {"mean_emitted", "survival", "drafts", "accepted", "drafted", "mode", "diagnosis", "not_understood"}
    for path in LOGS.iterdir():
        summary = read(path).summary() if path.suffix != ".md" else {}
        json.dumps(summary, allow_nan=False)
        assert not summary or keys <= set(summary)


def test_a_scrape_that_accepts_more_than_was_drafted_states_no_accepted_count(tmp_path):
    """A damaged scrape, or one put together of two servers: the counter is not believed."""
    lines = ["vllm:spec_decode_num_draft_tokens_total 1331", "vllm:spec_decode_num_accepted_tokens_total 8547"]
    (tmp_path / "a.prom").write_text("\n".join([*lines, "vllm:spec_decode_num_drafts_total 500"]) + "\n")
    assert read(tmp_path / "a.prom").records["accepted"].isna().all()
