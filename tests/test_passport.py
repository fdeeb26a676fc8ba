"""The passport: what each engine feeds, what each checkpoint expects, where they differ, and what is said where nobody knows."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lab.drafter import passport as module
from k3lab.drafter.passport import KEYS, Observed, knowledge, passport, read_config
from k3lab.drafter.published import published
from k3lab.errors import BadInput

FLAG = "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"
ON, OFF = {FLAG: "1"}, {FLAG: "0"}
INFERACT = {
    "architectures": ["K3DSparkModel"], "hidden_size": 7168, "num_target_layers": 5, "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89], "markov_rank": 256,
}  # fmt: skip
RADIXARK = {"architectures": ["Qwen3DSparkModel"], "hidden_size": 7168, "dflash_config": {"target_layer_ids": [7, 23, 51, 67, 83]}}
MODAL = {"architectures": ["DFlashDraftModel"], "hidden_size": 7168, "dflash_config": {"target_layer_ids": [19, 37, 54, 66, 78, 90]}}
LIGHTSEEK = INFERACT | {"target_layer_ids": [7, 31, 47, 63, 87], "fc_norm": True, "aux_hidden_stream": "attn_res"}
TORCHSPEC = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "hidden_size": 7168, "eagle_aux_hidden_state_layer_ids": [48, 68, 88]}
NOBODY = {
    "architectures": ["DFlashDraftModel"], "hidden_size": 7168, "target_num_hidden_layers": 93,
    "dflash_config": {"target_layer_ids": [4, 40]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "engine", "settings", "fed", "verdict"),
    [
        (MODAL, "vllm", {"platform": "cuda", "env": ON}, "mixture", "match"),
        (MODAL, "vllm", {"platform": "cuda", "env": OFF}, "prefix", "mismatch"),
        (MODAL, "vllm", {"platform": "cuda"}, "prefix", "mismatch"),  # off is the default
        (MODAL, "vllm", {"platform": "rocm", "env": ON}, "prefix", "mismatch"),
        (MODAL, "vllm", {"env": ON}, "unknown", "cannot tell"),  # the platform decides
        (MODAL, "vllm", {"env": OFF}, "prefix", "mismatch"),  # on either platform
        (MODAL, "vllm", {"platform": "cuda", "env": ON, "version": "0.27.1"}, "unknown", "cannot tell"),
        (MODAL, "vllm", {"platform": "rocm", "env": ON, "version": "0.40.0"}, "unknown", "cannot tell"),
        (MODAL, "vllm", {"platform": "rocm", "env": ON, "version": "0.33.0+rocm700"}, "prefix", "mismatch"),
        (MODAL, "vllm", {"platform": "cuda", "env": ON, "version": "main"}, "unknown", "cannot tell"),
        (MODAL, "sglang", {}, "mixture", "match"),
        (MODAL, "TRT-LLM", {}, "mixture", "match"),
        (MODAL, "tensorrt-llm", {"env": {"KIMI_K3_AUX_ATTN_RES_STREAM": "0"}}, "prefix", "mismatch"),
        (MODAL, "tokenspeed", {}, "prefix", "mismatch"),  # it declares nothing
        (MODAL, "tokenspeed", {"env": {"TOKENSPEED_DFLASH_AUX_STREAM": "ATTN_RES"}}, "mixture", "match"),
        (LIGHTSEEK, "tokenspeed", {}, "mixture", "match"),  # it declares attn_res
        (LIGHTSEEK, "vllm", {"platform": "cuda"}, "prefix", "mismatch"),
        (RADIXARK, "sglang", {}, "mixture", "cannot tell"),  # disputed
        (RADIXARK, "vllm", {"platform": "cuda"}, "prefix", "cannot tell"),
        (INFERACT, "vllm-ascend", {}, "prefix", "cannot tell"),
        (NOBODY, "vllm", {"platform": "cuda", "env": ON}, "mixture", "cannot tell"),
        (NOBODY, "my-engine", {}, "unknown", "cannot tell"),
    ],
)  # fmt: skip
def test_stream_by_engine_platform_version_and_flag(config, engine, settings, fed, verdict):
    result = passport(config, engine, **{"version": "0.33.0", **settings})
    assert (result.fed["stream"], result.verdict) == (fed, verdict)


@pytest.mark.parametrize("settings", [{"platform": "rocm"}, {}])
def test_the_flag_is_a_silent_no_op_on_rocm(settings):
    result = passport(INFERACT, "vllm", "0.33.0", env=ON, **settings)
    assert any("no-op" in w and "56434" in w for w in result.warnings)
    assert result.finding
    assert not passport(INFERACT, "vllm", "0.33.0", env=OFF, **settings).warnings
    assert not passport(INFERACT, "vllm", "0.33.0", platform="cuda", env=ON).warnings


def test_vllm_counts_layers_already_run_and_others_name_the_layer():
    """One config, one set of taps, two ways of writing it."""
    assert passport(MODAL, "vllm", "0.33").fed["engine_ids"] == [20, 38, 55, 67, 79, 91]
    assert passport(MODAL, "sglang", "0.5.23").fed["engine_ids"] == [19, 37, 54, 66, 78, 90]
    for engine in ("vllm", "sglang"):
        assert passport(MODAL, engine, "unknown").fed["after_layers"] == [19, 37, 54, 66, 78, 90]
    eagle3 = {"architectures": ["Eagle3X"], "eagle_aux_hidden_state_layer_ids": [2, 46, 90], "hidden_size": 7168}
    for engine in ("vllm", "sglang", "tokenspeed"):
        fed = passport(eagle3, engine, "0.33").fed
        assert (fed["engine_ids"], fed["after_layers"]) == ([2, 46, 90], [1, 45, 89])


def test_ids_shipped_unshifted_are_one_layer_early():
    """The published case: 48, 68, 88 are layers, in a key that counts layers already run; 49, 69, 89 are right."""
    wrong = passport(TORCHSPEC, "vllm", "0.29.0", platform="cuda")
    assert wrong.verdict == "mismatch"
    assert any("1 layer too early" in r and "unshifted" in r for r in wrong.reasons)
    right = passport(TORCHSPEC | {"eagle_aux_hidden_state_layer_ids": [49, 69, 89]}, "vllm", "0.29.0", platform="cuda")
    assert right.verdict == "match"


def test_lists_of_one_config_that_disagree_are_named():
    both = NOBODY | {"eagle_aux_hidden_state_layer_ids": [5, 41]}
    assert not passport(both, "vllm", "0.33").warnings  # 5 layers run = after layer 4
    off = passport(NOBODY | {"eagle_aux_hidden_state_layer_ids": [4, 40]}, "vllm", "0.33")
    assert any("disagree" in w for w in off.warnings)
    assert off.expected["layers_status"] == "disputed"


def test_without_ids_at_the_top_vllm_takes_its_default():
    nested = {
        "architectures": ["Eagle3X"],
        "target_num_hidden_layers": 93,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [10, 20, 30]},
    }
    result = passport(nested, "vllm", "0.33", platform="cuda")
    assert result.fed["engine_ids"] == [2, 46, 90]
    assert result.verdict == "mismatch"
    assert passport(nested, "sglang", "0.5").fed["engine_ids"] == [10, 20, 30]


@pytest.mark.parametrize(
    ("taps", "settings", "says"),
    [
        ([10, 92], {"env": OFF}, "not the post-AttnRes output"),
        ([10, 93], {}, "has no layer 93"),
        ([40, 10], {}, "not ascending"),
    ],
)  # fmt: skip
def test_edges_of_the_model(taps, settings, says):
    config = NOBODY | {"dflash_config": {"target_layer_ids": taps}}
    result = passport(config, "vllm", "0.33.0", platform="cuda", **settings)
    assert any(says in text for text in [*result.reasons, *result.warnings])
    assert result.finding


def test_last_layer_fed_by_the_mixture_needs_no_warning():
    config = NOBODY | {"dflash_config": {"target_layer_ids": [10, 92]}}
    assert not passport(config, "vllm", "0.33.0", platform="cuda", env=ON).warnings


def test_the_embedding_is_the_same_in_both_streams():
    config = NOBODY | {"dflash_config": {}, "eagle_aux_hidden_state_layer_ids": [0, 41]}
    assert "fed: the embedding" in passport(config, "vllm", "0.33").statements["what"].tolist()


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"pipeline": 2, "env": ON}, True),  # 93 layers on two stages are 47 + 46: the first ends after layer 46
        ({"pipeline": 2, "env": OFF}, False),
        ({"pipeline": 3, "env": ON}, False),
        ({"pipeline": 3, "env": ON | {"VLLM_PP_LAYER_PARTITION": "20,27,46"}}, True),
        ({"pipeline": 1, "env": ON}, False),
    ],
)  # fmt: skip
def test_a_tap_that_ends_a_stage_is_refused_with_the_mixture(settings, refused):
    config = NOBODY | {"dflash_config": {"target_layer_ids": [10, 46]}}
    result = passport(config, "vllm", "0.33.0", platform="cuda", **settings)
    assert any("refuses to start" in r for r in result.reasons) == refused


def test_stage_ends_as_vllm_cuts_them():
    """What is left over goes to the stages before the last, so the last is never the longest."""
    assert module._stage_ends(93, 2, None) == [47]
    assert module._stage_ends(93, 4, None) == [23, 46, 70]
    assert module._stage_ends(8, 4, None) == [2, 4, 6]
    assert module._stage_ends(11, 4, None) == [3, 6, 9]


def test_the_log_outweighs_the_table():
    seen = Observed((20, 38, 55, 67, 79, 91), "mixture", "server.log:7")
    result = passport(MODAL, "vllm", "0.33.0", platform="rocm", env=ON, observed=seen)
    assert result.verdict == "match"
    assert any("the log is taken" in w for w in result.warnings)
    off = passport(MODAL, "vllm", "0.33.0", platform="cuda", env=ON, observed=Observed((19, 37, 54, 66, 78, 90), "mixture", "server.log:7"))
    assert off.verdict == "mismatch"
    assert any("1 layer too early" in r for r in off.reasons)


def test_a_log_contradicts_what_was_given_or_documented_not_what_was_assumed():
    seen = Observed((20, 38, 55, 67, 79, 91), "mixture", "server.log:7")
    for platform, env, warns in (("cuda", None, False), ("unknown", {"OTHER": "1"}, False), ("cuda", OFF, True), ("rocm", None, True)):
        result = passport(MODAL, "vllm", "0.33.0", platform=platform, env=env, observed=seen)
        assert any("the log is taken" in w for w in result.warnings) == warns
        assert "_assumed" not in result.summary()["fed"]


def test_published_figures_expect_the_stream_that_the_passport_expects():
    rows = published().drop_duplicates("drafter").set_index("drafter")["stream"]
    assert set(rows.index) <= {c["name"] for c in knowledge()["checkpoint"]}
    for name, stream in rows.items():
        expected = passport({}, "vllm", checkpoint=name).expected["stream"]
        assert expected == {"none": "either"}.get(stream, stream), name


def test_a_target_without_attn_res_has_one_stream():
    config = {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [3, 7, 15, 19, 23]}, "num_target_layers": 27}
    result = passport(config, "sglang", "0.5.23")
    assert result.expected["stream"] == "either"
    assert result.verdict == "match"


def test_fc_norm_is_warned_of_where_the_engine_lacks_it():
    assert any("fc_norm" in w for w in passport(LIGHTSEEK, "vllm", "0.29.0").warnings)
    assert not any("fc_norm" in w for w in passport(LIGHTSEEK, "tokenspeed", "1").warnings)


def test_a_named_checkpoint_needs_no_ids():
    bare = {"architectures": ["Eagle3X"], "eagle_aux_hidden_state_layer_ids": [2, 46, 90], "hidden_size": 7168}
    assert passport(bare, "sglang", "0.5").expected["stream"] == "unknown"  # these ids are a default: they tell no checkpoint
    named = passport(bare, "sglang", "0.5", checkpoint="LightseekOrg/kimi-k3-eagle3.1-mla")
    assert (named.expected["stream"], named.verdict) == ("prefix", "match")
    assert "this table does not know it" in passport(bare, "sglang", "0.5", checkpoint="a/b").statements.to_csv()


def test_every_statement_has_a_source_and_every_claim_in_the_table_too():
    for config in (INFERACT, RADIXARK, MODAL, LIGHTSEEK, TORCHSPEC, NOBODY, {}):
        for engine in ("vllm", "vllm-ascend", "sglang", "tensorrt-llm", "tokenspeed", "atom", "other"):
            frame = passport(config, engine, "0.33.0", pipeline=2).statements
            assert frame[["what", "value", "status", "source"]].map(bool).all(axis=None)
    for engine in knowledge()["engine"]:
        assert all(r["source"] and r["text"] for r in engine.get("stream", []) + engine.get("layers", []))
        assert all(r["stream"] in ("prefix", "mixture", "unknown") for r in engine.get("stream", []))
        assert set(r for rule in engine.get("layers", []) for r in rule["keys"]) <= set(KEYS)
    for c in knowledge()["checkpoint"]:
        assert c["source"]
        assert all(claim["source"] and claim["text"] and claim["stream"] in ("prefix", "mixture") for claim in c.get("claim", []))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("not json", "not JSON"),
        ("[]", "expected a JSON object"),
        ("a\0", "binary"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"target_layer_ids": "1,2"}', "target_layer_ids is '1,2', not a list of integers"),
        ('{"dflash_config": {"target_layer_ids": [1, true]}}', "not a list of integers"),
        ('{"target_layer_ids": [' + "9" * 400 + "]}", "no model has so many layers"),
        ('{"target_layer_ids": [' + "9" * 5000 + "]}", "not JSON"),
    ],
)  # fmt: skip
def test_bad_configs_are_one_clear_error(tmp_path, text, says):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"config\.json") as error:
        read_config(path)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"platform": "tpu"}, "expected cuda, rocm, unknown"),
        ({"pipeline": 0}, "--pipeline 0"),
        ({"pipeline": 94}, "--pipeline 94"),
        ({"pipeline": 2, "env": {"VLLM_PP_LAYER_PARTITION": "1,2"}}, "add up to 93"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_clear_error(settings, says):
    with pytest.raises(BadInput, match=says):
        passport(INFERACT, "vllm", "0.33.0", **settings)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=6)
    | st.lists(st.integers(-3, 99), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["target_layer_ids", "aux_hidden_stream"]), inner, max_size=2)
    ),
    max_leaves=6,
)
VARIABLES = [FLAG, "VLLM_PP_LAYER_PARTITION", "TOKENSPEED_DFLASH_AUX_STREAM"]
names = [*KEYS, "dflash_config", "eagle_config", "architectures", "model_type", "aux_hidden_stream", "num_target_layers", "hidden_size",
         "target_num_hidden_layers", "_name_or_path", "fc_norm", "markov_rank"]  # fmt: skip


@given(
    config=st.dictionaries(st.sampled_from(names), values, max_size=6),
    engine=st.sampled_from(["vllm", "sglang", "tokenspeed", "trtllm", "atom", "vllm-ascend", ""]) | st.text(max_size=5),
    version=st.sampled_from(["0.33.0", "0.28", "main", ""]) | st.text(max_size=8),
    platform=st.sampled_from(["cuda", "rocm", "unknown"]),
    env=st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=6), max_size=3),
    pipeline=st.integers(-1, 5),
)  # fmt: skip
@settings(max_examples=250, deadline=None)
def test_hostile_configs_give_a_verdict_or_bad_input(tmp_path_factory, config, engine, version, platform, env, pipeline):
    path = tmp_path_factory.mktemp("c") / "config.json"
    path.write_text(json.dumps(config))
    try:
        result = passport(read_config(path), engine, version, platform, env, None, pipeline)
    except BadInput:
        return
    assert result.verdict in ("match", "mismatch", "cannot tell")
    json.dumps(result.summary())


def test_an_engine_that_the_table_does_not_know_is_told_which_it_knows():
    """A typo would else read as one more unknown."""
    result = passport({"dflash_config": {"target_layer_ids": [1]}}, "vlm", "0.33.0")
    source = result.statements.set_index("what").loc["engine", "source"]
    assert "vllm" in source
    assert "sglang" in source
