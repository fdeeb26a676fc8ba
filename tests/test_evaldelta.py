"""Two results tables into z, p and wrong answers: against textbook figures, in every form that lm_eval writes, and refused otherwise."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from k3lab.drafter.evaldelta import _counted, compare, newcombe, read_table, sizes_that_fit, whole_answers
from k3lab.errors import BadInput

PUBLISHED = Path(__file__).parents[1] / "data/published/vllm_pr_50649_gsm8k.csv"
BEFORE = """\
some server output, then
2026-08-01 |Tasks|Version|     Filter     |n-shot|  Metric   |   |Value |   |Stderr|
|-----|------:|----------------|-----:|-----------|---|-----:|---|-----:|
|gsm8k|      3|flexible-extract|     5|exact_match|↑  |0.8901|±  |0.0086|
|     |       |strict-match    |     5|exact_match|↑  |0.8901|±  |0.0086|

done
"""
AFTER = BEFORE.replace("0.8901|±  |0.0086", "0.9689|±  |0.0048", 1).replace("0.8901|±  |0.0086", "0.9697|±  |0.0047")


@pytest.fixture
def put(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def results(task="gsm8k", *, right, n, metric="exact_match", filter_="strict-match", higher=True, **more):
    p = right / n
    return json.dumps(
        {
            "results": {task: {"alias": task, f"{metric},{filter_}": p, f"{metric}_stderr,{filter_}": math.sqrt(p * (1 - p) / (n - 1))}},
            "n-shot": {task: 5}, "n-samples": {task: {"original": n, "effective": n}}, "higher_is_better": {task: {metric: higher}}, **more,
        }
    )  # fmt: skip


def test_the_pull_request_in_numbers():
    """The published table: 145 wrong answers of 1319 to 41 and 40, each test done again here from the counts alone."""
    delta = compare(read_table(f"{PUBLISHED}:before"), read_table(f"{PUBLISHED}:PR"))
    assert delta.rows["n_before"].tolist() == [1319, 1319]
    assert set(delta.rows["n_source"]) == {"inferred"}
    assert delta.rows["wrong_before"].tolist() == [145, 145]
    assert delta.rows["wrong_after"].tolist() == [41, 40]
    assert delta.rows["verdict"].tolist() == ["better", "better"]
    assert not delta.finding
    chi2 = stats.chi2_contingency([[145, 1174], [41, 1278]], correction=False)  # its statistic is z squared
    assert delta.rows["z"][0] ** 2 == pytest.approx(chi2.statistic)
    assert delta.rows["p"][0] == pytest.approx(chi2.pvalue)
    assert delta.rows["wrong_ratio"][0] == pytest.approx(41 / 145)
    reach = 1.959964 * math.sqrt(1 / 41 - 1 / 1319 + 1 / 145 - 1 / 1319)
    assert delta.rows["wrong_ratio_high"][0] == pytest.approx(41 / 145 * math.exp(reach), rel=1e-5)
    assert len(delta.unmatched) == 2  # 20-shot has no row before


def test_text_table_gives_the_same_as_the_published_csv(put):
    text = compare(read_table(put("a.txt", BEFORE)), read_table(put("b.md", "> " + AFTER.replace("\n", "\n> "))))
    csv = compare(read_table(f"{PUBLISHED}:before"), read_table(f"{PUBLISHED}:PR"))
    columns = ["filter", "z", "p", "wrong_before", "wrong_after", "wrong_ratio_low", "verdict"]
    pd.testing.assert_frame_equal(text.rows[columns], csv.rows[columns])
    assert text.rows["task"].tolist() == ["gsm8k", "gsm8k"]  # a blank cell repeats the task above


def test_newcombe_textbook_example():
    """Newcombe 1998, table II, method 10: 56/70 - 48/80 = 0.20, 95% interval 0.0524 to 0.3339."""
    low, high = newcombe(48, 80, 56, 70)
    assert low == pytest.approx(0.0524, abs=5e-5)
    assert high == pytest.approx(0.3339, abs=5e-5)


def test_newcombe_interval_covers_the_truth():
    rng = np.random.default_rng(5)
    p1, p2, n = 0.89, 0.95, 400
    hits = [low <= p2 - p1 <= high for a, b in rng.binomial(n, [p1, p2], (800, 2)) for low, high in [newcombe(int(a), n, int(b), n)]]
    assert 0.925 < np.mean(hits) < 0.975  # 800 draws: standard error 0.0077


def test_unpaired_test_holds_its_level():
    """Without a difference 5% of runs are called different, a little less by discreteness."""
    rng = np.random.default_rng(6)
    called = 0
    for a, b in rng.binomial(1319, 0.9, (400, 2)):
        row = _counted(int(a), 1319, int(b), 1319, 0.95)
        called += row["p"] < 0.05
        assert (row["p"] < 0.05) == (not row["change_low"] < 0 < row["change_high"]) or abs(row["p"] - 0.05) < 0.01
    assert 0.01 < called / 400 < 0.09  # standard error 0.011


@given(n=st.integers(20, 3000), share=st.floats(0.02, 0.98), digits=st.integers(4, 6))
@settings(max_examples=40, deadline=None)
def test_the_true_n_is_always_among_those_that_fit(n, share, digits):
    k = min(max(round(share * n), 1), n - 1)
    p = k / n
    value, stderr = round(p, digits), round(math.sqrt(p * (1 - p) / (n - 1)), digits)
    assert n in sizes_that_fit([(value, stderr, digits)])
    assert whole_answers(value, stderr, n, digits) is not None


def test_one_row_alone_leaves_n_open_and_says_so(put):
    one = "|Tasks|Filter|n-shot|Metric|   |Value|   |Stderr|\n|t|none|0|acc|↑|0.50|±|0.05|\n"
    delta = compare(read_table(put("a", one)), read_table(put("b", one.replace("0.50", "0.52"))))
    assert any("values from" in n and "give --n" in n for n in delta.notes)
    assert delta.rows["n_source"].tolist() == ["inferred"]
    given_n = compare(read_table(put("a", one)), read_table(put("b", one.replace("0.50", "0.52"))), n=100)
    assert given_n.rows["n_source"].tolist() == ["given"]
    assert given_n.rows["wrong_after"].tolist() == [48]


def test_json_takes_n_direction_and_counts_from_the_file(put):
    a, b = put("a.json", results(right=1174, n=1319)), put("b.json", results(right=1100, n=1319))
    row = compare(read_table(a), read_table(b)).rows.iloc[0]
    assert (row["n_source"], row["wrong_before"], row["wrong_after"], row["verdict"]) == ("recorded", 145, 219, "worse")
    assert compare(read_table(a), read_table(b)).finding


@pytest.mark.parametrize(("higher", "verdict"), [(True, "worse"), (False, "better")])
def test_direction_decides_better_or_worse(put, higher, verdict):
    a, b = put("a.json", results(right=900, n=1000, higher=higher)), put("b.json", results(right=800, n=1000, higher=higher))
    assert compare(read_table(a), read_table(b)).rows["verdict"].tolist() == [verdict]


def test_no_arrow_is_a_difference_and_a_finding(put):
    table = "|Tasks|Filter|n-shot|Metric|   |Value|   |Stderr|\n|t|none|0|score||0.5000|±|0.0500|\n"
    delta = compare(read_table(put("a", table)), read_table(put("b", table.replace("0.5000", "0.9000").replace("0.0500", "0.0300"))), n=101)
    assert delta.rows["verdict"].tolist() == ["differs"]
    assert delta.finding


def test_a_metric_without_counts_is_tested_by_its_standard_errors(put):
    table = "|Tasks|Filter|n-shot|Metric|   |Value|   |Stderr|\n|wiki|none|0|perplexity|↓|12.50|±|0.20|\n"
    row = compare(read_table(put("a", table)), read_table(put("b", table.replace("12.50", "13.50")))).rows.iloc[0]
    assert row["basis"] == "standard errors"
    assert row["z"] == pytest.approx(1 / math.hypot(0.2, 0.2))
    assert row["verdict"] == "worse"


def test_no_stderr_and_no_n_is_not_tested(put):
    table = "|Tasks|Filter|n-shot|Metric|   |Value|   |Stderr|\n|a|none|0|bleu|↑|12.50|±|N/A|\n"
    delta = compare(read_table(put("a", table)), read_table(put("b", table.replace("12.50", "20.00"))))
    assert delta.rows["verdict"].tolist() == ["not tested"]
    assert not delta.finding


def test_subtasks_and_groups_are_rows_of_their_own(put):
    head = "|Tasks|Version|Filter|n-shot|Metric|   |Value|   |Stderr|\n|---|---|---|---:|---|---|---:|---|---:|\n"
    group = "|mmlu|2|none| |acc|↑|0.7000|±|0.0100|\n"
    inner = "| - stem|2|none| |acc|↑|0.6000|±|0.0200|\n|  - maths|0|none|0|acc|↑|0.5000|±|0.0300|\n"
    table = read_table(put("a", head + group + inner + "\n" + head.replace("Tasks", "Groups") + group))
    assert [(r.task, r.n_shot) for r in table.rows.itertuples()][:3] == [("mmlu", None), ("stem", None), ("maths", 0)]
    assert len(compare(table, table).rows) == 3  # the group's second row is the same row


def test_all_right_on_one_side_has_no_ratio_interval(put):
    a, b = put("a.json", results(right=95, n=100)), put("b.json", results(right=100, n=100))
    row = compare(read_table(a), read_table(b)).rows.iloc[0]
    assert (row["wrong_after"], row["wrong_ratio"]) == (0, 0)
    assert row["wrong_ratio_low"] is None
    same = compare(read_table(b), read_table(b)).rows.iloc[0]
    assert (same["z"], same["p"], same["verdict"]) == (0, 1, "no difference shown")


def test_rows_not_understood_are_named(put):
    table = read_table(put("a", BEFORE.replace("|     |       |strict-match    |     5|", "|     |strict-match    |     5|")))
    assert [line for line, _ in table.not_understood] == [5]
    assert len(table.rows) == 1


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("empty", " \n", "empty"),
        ("nothing", "hello\n", "no row of an lm_eval table"),
        ("no_results.json", '{"config": 1}', "no `results` object"),
        ("list.json", "[1]", "expected a JSON object"),
        ("twice.json", '{"results": {"a": {}, "a": {}}}', "there twice"),
        ("deep.json", '{"results": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deeply"),
        ("huge.json", '{"results": {"a": {"acc,none": ' + "9" * 5000 + "}}}", "not JSON"),
        ("none.json", '{"results": {"a": {"acc,none": NaN, "x": "y", "z": [1]}}}', "no row of an lm_eval table"),
        ("binary", "a\0b", "binary"),
        ("x.csv", "a,b\n1,2\n", "has the columns filter, stderr and one metric"),
        ("runs.csv", "run,filter,acc,stderr\nA,none,0.5,0.01\nB,none,0.6,0.01\n", "name one as"),
        ("same", BEFORE + BEFORE.replace("0.8901", "0.7"), "there twice with different values"),
    ],
)  # fmt: skip
def test_bad_tables_are_one_clear_error(put, name, text, says):
    with pytest.raises(BadInput, match=says) as error:
        compare(read_table(put(name, text)), read_table(f"{PUBLISHED}:PR"))
    assert name in str(error.value)


def test_tables_without_a_common_row_name_what_they_hold(put):
    other = BEFORE.replace("gsm8k", "mmlu ")
    with pytest.raises(BadInput, match=r"no row is in both.*gsm8k.*mmlu"):
        compare(read_table(put("a", BEFORE)), read_table(put("b", other)))
    with pytest.raises(BadInput, match="no run 'after'"):
        read_table(f"{PUBLISHED}:after")
    with pytest.raises(BadInput, match="cannot be read"):
        read_table("does/not/exist")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["acc,none", "acc_stderr,none", "a"]), inner, max_size=3),
    max_leaves=8,
)


@given(
    results=json_values, shots=json_values, samples=json_values,
    text=st.text(alphabet="|- \n:gsm8kTasksMetricValueStderr0.5↑±N/A", max_size=200),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_hostile_tables_give_rows_or_bad_input(tmp_path_factory, results, shots, samples, text):
    folder = tmp_path_factory.mktemp("t")
    (folder / "a.json").write_text(json.dumps({"results": results, "n-shot": shots, "n-samples": samples, "higher_is_better": results}))
    (folder / "b.txt").write_text("|Tasks|Metric|Value|Stderr|\n" + text, encoding="utf-8")
    (folder / "c.csv").write_text("filter,acc,stderr\n" + text.replace("|", ","), encoding="utf-8")
    for name in ("a.json", "b.txt", "c.csv"):
        try:
            table = read_table(folder / name)
        except BadInput:
            continue
        assert len(compare(table, table).rows) >= 1


@pytest.mark.parametrize("n", [1, 0, -4, 10**8, 10**400])
def test_a_number_of_questions_that_no_task_has_is_refused(put, n):
    table = read_table(put("a", BEFORE))
    with pytest.raises(BadInput, match="--n"):
        compare(table, table, n=n)


def test_coarse_digits_of_many_questions_are_searched_without_trying_each_count():
    """Ten million counts fit a value of one digit; the standard error leaves two spans of them."""
    assert whole_answers(1.0, 0.9, 10**7, 0) is None
    assert whole_answers(0.5, 0.0, 10**7, 1) == 4_500_000
    assert whole_answers(0.8901, 0.0086, 1319, 4) == 1174


@pytest.mark.parametrize("text", ['filter,stderr,acc\n"' + "x" * 200_000 + '",0.1,0.5\n', ",\n", "\n\n,", '"\r'])
def test_a_csv_that_cannot_be_read_is_refused(put, text):
    """A field beyond the reader's limit, nothing in it, a quote that does not end."""
    with pytest.raises(BadInput, match=r"a\.csv"):
        read_table(put("a.csv", text))


def test_a_csv_with_the_line_ends_of_an_old_mac_is_read(put):
    """The reader of the standard library gave an error of its own."""
    assert len(read_table(put("a.csv", "filter,stderr,acc\rnone,0.1,0.5\r")).rows) == 1
