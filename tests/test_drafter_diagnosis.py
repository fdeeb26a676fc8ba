"""What summed acceptance is said to mean: each fault and its neighbour that is none, with the figures that decide."""

import json
from itertools import pairwise

import numpy as np
import pytest

from k3lab.drafter.diagnosis import ENOUGH_ROUNDS, best_split, diagnose, wilson
from k3lab.drafter.log_totals import Totals
from k3lab.drafter.logs import read

# survival of drafts 1..7, measured on the tiny K3, its own stream and the other
RIGHT = (0.895, 0.785, 0.674, 0.568, 0.485, 0.425, 0.384)
WRONG = (0.544, 0.262, 0.144, 0.093, 0.048, 0.034, 0.026)
# published, Inferact/Kimi-K3.1-Pro-DSpark-preview
PUBLISHED = {
    "GSM8K": (0.86, 0.71, 0.59, 0.48, 0.39, 0.32, 0.26), "HumanEval": (0.76, 0.56, 0.41, 0.30, 0.23, 0.18, 0.14),
    "MBPP": (0.77, 0.56, 0.41, 0.29, 0.21, 0.16, 0.12), "MATH-500": (0.80, 0.62, 0.46, 0.35, 0.26, 0.19, 0.14),
}  # fmt: skip


def line(survival, drafts=1000, stamp="05-01 14:24:50"):
    """A vLLM line of `drafts` rounds with that survival."""
    reached = [round(s * drafts) for s in survival]
    accepted, k = sum(reached), len(reached)
    return (
        f"(APIServer pid=1) INFO {stamp} [metrics.py:101] SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted: {accepted} tokens, Drafted: {k * drafts} tokens, Per-position acceptance rate: "
        f"{', '.join(f'{n / drafts:.3f}' for n in reached)}, Avg Draft acceptance rate: {accepted / k / drafts:.1%}\n"
    )


def response(survival, drafts, tokens, name):
    """A response body with metrics per request."""
    reached = [drafts, *(round(s * drafts) for s in survival), 0]
    histogram = [int(a - b) for a, b in pairwise(reached)]
    accepted = sum(reached[1:])
    metrics = {"num_spec_steps": drafts, "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafts * len(survival),
               "acceptance_histogram": histogram, "mean_acceptance_length": 1 + accepted / drafts}  # fmt: skip
    usage = {"prompt_tokens": tokens - 100, "completion_tokens": 100}
    return json.dumps({"id": name, "usage": usage, "metrics": {"speculative_decoding": metrics}}) + "\n"


def first(text):
    return read(text).diagnosis


def test_the_measured_wrong_stream_is_a_collapse_and_the_right_one_is_not():
    wrong = first(line(WRONG, 10_000))
    assert (wrong.kind, wrong.finding) == ("collapse at position 0", True)
    assert "stream" in wrong.text
    assert wrong.evidence["survival"][0] == pytest.approx(0.544)
    assert first(line(RIGHT, 10_000)).kind == "healthy"


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_published_drafter_is_called_faulty(name):
    assert not first(line(PUBLISHED[name])).finding


def test_between_the_two_it_is_undecided_and_no_finding():
    said = first(line((0.65, 0.4, 0.25)))
    assert (said.kind, said.finding) == ("undecided", False)


def test_a_good_start_whose_later_positions_fall_off_is_fast_decay():
    said = first(line((0.85, 0.40, 0.15, 0.05)))
    assert (said.kind, said.finding) == ("fast decay", True)
    assert "position" in said.text


def test_rounds_of_different_length_are_no_decay():
    """With a dynamic draft length the later positions are often not drafted: 0.40 says nothing about them."""
    text = line((0.85, 0.40, 0.15, 0.05)).replace("Drafted: 4000 tokens", "Drafted: 2100 tokens")
    assert first(text).kind == "healthy"


def test_nothing_accepted_is_exactly_one_with_a_bound_on_the_rate():
    said = first(line((0.0,) * 7, 3000))
    assert (said.kind, said.finding) == ("exactly 1.0", True)
    assert "0.001" in said.text
    assert first(line((0.002,) * 7, 3000)).kind == "collapse at position 0"


def test_no_drafts_at_all_are_not_drafting():
    idle = 'vllm:spec_decode_num_drafts_total{engine="0"} 0.0\nvllm:spec_decode_num_draft_tokens_total{engine="0"} 0.0\n'
    said = first(idle + 'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 0.0\n')
    assert (said.kind, said.finding) == ("not drafting", True)


def test_few_rounds_are_never_judged():
    for survival in (WRONG, RIGHT, (0.0, 0.0)):
        said = first(line(survival, ENOUGH_ROUNDS - 1))
        assert (said.kind, said.finding) == ("too few drafts", False)
        assert "95% interval" in said.text


def test_a_small_sample_that_only_looks_collapsed_is_undecided():
    """0.60 in 120 rounds reaches up to 0.68; in 2000 it does not."""
    assert first(line((0.60, 0.30), 120)).kind == "undecided"
    assert first(line((0.60, 0.30), 2000)).kind == "collapse at position 0"


def test_long_requests_at_one_point_zero_are_a_long_context_cliff():
    short = [response(RIGHT, 150, 1000 + i, f"s{i}") for i in range(20)]
    long = [response((0.02,) * 7, 150, 90_000 + i, f"l{i}") for i in range(10)]
    said = first("".join(x for pair in zip(short[:10], long, strict=True) for x in pair) + "".join(short[10:]))
    assert (said.kind, said.finding) == ("long-context cliff", True)
    assert said.evidence["tokens"] == 90_000


def test_a_mild_fall_with_length_as_published_at_1m_is_none():
    short = [response((0.86, 0.71, 0.59), 150, 1000 + i, f"s{i}") for i in range(10)]
    long = [response((0.78, 0.45, 0.2), 150, 900_000 + i, f"l{i}") for i in range(10)]
    assert first("".join(short + long)).kind == "healthy"


def test_a_fall_along_a_log_is_named_by_its_line_and_time():
    before = [line(RIGHT, 400, f"05-01 14:0{i}:00") for i in range(5)]
    said = first("".join(before + [line((0.01,) * 7, 400, f"05-01 15:0{i}:00") for i in range(5)]))
    assert (said.kind, said.evidence["line"]) == ("cliff in time", 6)
    assert "15:00:00" in said.text


def test_sglang_lines_know_the_length_of_their_requests():
    decode = "[2026-05-27 20:{:02}:00 TP0] Decode batch, #running-req: 4, #token: {}, accept len: {}, accept rate: 0.4, cuda graph: True\n"
    short = [decode.format(i, 4000 + i, 4.4) for i in range(20)]
    said = first("".join(short + [decode.format(30 + i, 400_000 + i, 1.02) for i in range(20)]))
    assert said.kind == "long-context cliff"
    assert said.evidence["tokens"] == 100_000


def test_a_mean_below_the_bound_of_position_0_is_a_collapse_without_positions():
    """mean - 1 is the sum over positions, so no less than position 0: 1.30 cannot hide a normal start; 3.6 of 7 tells nothing."""
    decode = "[2026-05-27 20:14:38 TP0] Decode batch, #running-req: 8, accept len: {}, accept rate: {}, cuda graph: True\n"
    assert first(decode.format("1.30", "0.04") * 5).kind == "collapse at position 0"
    assert first(decode.format("3.60", "0.37") * 5).kind == "undecided"
    assert first(decode.format("6.90", "0.84") * 5).kind == "healthy"
    assert first(decode.format("1.00", "0.00") * 5).kind == "exactly 1.0"


def test_rates_that_do_not_add_up_to_the_mean_are_inconsistent():
    said = first(line(RIGHT).replace("Mean acceptance length: 5.22", "Mean acceptance length: 4.22"))
    assert (said.kind, said.finding) == ("inconsistent", True)
    assert said.evidence["worst"] == pytest.approx(1.0, abs=0.02)


def test_a_collapse_names_the_stream_that_the_log_states():
    aux = "INFO Kimi-K3 aux hidden capture: layers=(2, 23) mode=prefix_only (VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=0)\n"
    assert "prefix stream" in first(aux + line(WRONG, 5000)).text


def test_lines_that_differ_widen_the_interval_of_position_0():
    """Half of the lines at 0.3, half at 0.9: rounds on their own would know 0.60 to 0.01, and call it a collapse."""
    said = first("".join(line((0.3,), 500) + line((0.9,), 500) for _ in range(8)))
    assert said.kind == "undecided"
    low, high = said.evidence["position_0"]
    assert high - low > 0.2


def test_the_interval_covers_the_mean_of_correlated_lines():
    """Lines of hard and easy prompts: rounds on their own would give an interval several times too narrow."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        kept = rng.beta(8, 3, 30)
        text = "".join(line(tuple(kept[i] ** np.arange(1, 4)), 500) for i in range(30))
        t = read(text).totals
        truth = 1 + sum(np.mean(rng.beta(8, 3, 100_000) ** j) for j in (1, 2, 3))
        covered += t.low <= truth <= t.high
    assert covered >= 34  # 95% of 40 is 38; below 34 has a probability under 2%


def test_diagnose_is_a_function_of_totals_and_rows():
    report = read(line(RIGHT))
    assert [d.kind for d in diagnose(report.totals, report.counted)] == ["healthy"]
    assert [d.kind for d in diagnose(None, report.counted.iloc[:0])] == ["undecided"]
    idle = Totals("vllm", "vllm line", [], 1, drafts=0, accepted=0, drafted=0, emitted=0)
    assert [d.kind for d in diagnose(idle, report.counted.iloc[:0])] == ["not drafting"]


def test_the_best_split_is_the_one_of_all_splits():
    rng = np.random.default_rng(1)
    drafts = rng.integers(50, 300, 40).astype(float)
    emitted = drafts * np.where(np.arange(40) < 17, 4.0, 2.0) + rng.normal(size=40)
    at, before, after = best_split(drafts, emitted)
    assert (at, round(before, 1), round(after, 1)) == (17, 4.0, 2.0)
    assert best_split(drafts[:1], emitted[:1]) is None


def test_wilson_interval_against_scipy():
    from scipy.stats import binomtest

    for hits, n in ((0, 30), (7, 43), (65, 65), (544, 1000)):
        low, high = binomtest(hits, n).proportion_ci(method="wilson")
        assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)
