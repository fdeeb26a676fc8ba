"""A drafter's passport: what an engine feeds it against what the checkpoint declares or is known to expect.

Two things must agree: the STREAM (prefix: the running prefix + pending MLP output; mixture: what the next consumer reads) and the
TAPS (after which layers). Nothing raises when either is wrong: shapes agree and acceptance drops. Taps are given here as "after
layer i", 0-based; engines and config keys count in two ways, which differ by one.

Every statement carries its source and a status:
  declared    in the config.json            documented  in an engine's source or a checkpoint's documentation
  observed    in the log                    reported    measured or served so by others
  convention  by the usual reading of a config key      assumed  not told, the default is taken
  disputed    sources disagree              unknown     not recorded here

The knowledge is in passport.toml.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pandas as pd
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from k3lab.drafter.inputs import parse_json, read_text, shown_name
from k3lab.errors import BadInput

TABLE = Path(__file__).with_name("passport.toml")
COLUMNS = ["what", "value", "status", "source"]
PLATFORMS = ("cuda", "rocm", "unknown")
STREAMS = {"prefix": "prefix", "prefix_only": "prefix", "attn_res": "mixture", "attn_res_stream": "mixture"}
KEYS = (
    "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids",
    "dflash_config.target_layer_ids", "dspark_target_layer_ids", "target_layer_ids",
)  # fmt: skip
COUNTS_LAYERS_RUN = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids")
K3_HIDDEN = 7168
ASSUMED_UNSET = "the environment was not given"


@dataclass(frozen=True)
class Observed:
    """What a log says that vLLM captures: ids in vLLM's count, and prefix or mixture; None where it does not say."""

    layers: tuple[int, ...] | None = None
    stream: str | None = None
    where: str = "log"


@dataclass(frozen=True)
class Passport:
    """statements: one row per statement (COLUMNS). verdict: match, mismatch or cannot tell, and why; warnings stand beside it."""

    statements: pd.DataFrame
    verdict: str
    reasons: list[str]
    warnings: list[str]
    fed: dict
    expected: dict

    @property
    def finding(self) -> bool:
        return self.verdict == "mismatch" or bool(self.warnings)

    def summary(self) -> dict:
        """Everything as plain JSON values."""
        return {
            "verdict": self.verdict, "reasons": self.reasons, "warnings": self.warnings, "fed": self.fed, "expected": self.expected,
            "statements": self.statements.to_dict("records"),
        }  # fmt: skip


@lru_cache(maxsize=1)
def knowledge() -> dict:
    """The table of engines and checkpoints in passport.toml."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def read_config(path: str | Path) -> dict:
    """A drafter's config.json. Raises BadInput if it is no JSON object, or its layer ids are no list of integers."""
    config = parse_json(read_text(path), path)
    for key in KEYS:
        ids = _lookup(config, key)
        if ids is not None and (not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids)):
            raise BadInput(f"{shown_name(path)}: {key} is {str(ids)[:80]!r}, not a list of integers")
        if ids and max(map(abs, ids)) > 10_000:
            raise BadInput(f"{shown_name(path)}: {key} holds {str(max(ids, key=abs))[:20]}: no model has so many layers")
    return config


def from_log(aux: list, log: str | Path) -> Observed:
    """What the last lines of a log (k3lab.drafter.logs, LogReport.aux) say that vLLM captures."""
    told = [a for a in aux if a.mode] or aux
    if not told:
        return Observed(where=str(log))
    last = told[-1]
    differ = len({(tuple(a.layers), a.mode) for a in told}) > 1
    where = f"{last.source}:{last.line}" + (f", the last of {len(told)} lines that differ" if differ else "")
    return Observed(tuple(last.layers), last.mode or None, where)


def passport(
    config: dict, engine: str, version: str = "unknown", platform: str = "unknown", env: Mapping[str, str] | None = None,
    checkpoint: str | None = None, pipeline: int = 1, observed: Observed | None = None,
) -> Passport:  # fmt: skip
    """Compare what `engine` feeds with what `config` expects.

    env: environment variables of the server, None if they are not known. checkpoint: ORG/NAME, where the config does not tell.
    pipeline: pipeline-parallel size. observed: what a log says; it outweighs what the table would conclude.
    Raises BadInput for a platform other than cuda, rocm or unknown, and for a pipeline that cannot be cut.
    """
    if platform not in PLATFORMS:
        raise BadInput(f"platform {platform!r}: expected {', '.join(PLATFORMS)}")
    rows: list[dict] = []

    def state(what: str, value: object, status: str, source: str) -> None:
        rows.append(dict(zip(COLUMNS, (what, _text(value), status, source), strict=True)))

    warnings: list[str] = []
    method = _method(config)
    state("drafter: method", method or "unknown", "declared" if method else "unknown", "config.json")
    known = _checkpoint(config, checkpoint, method, state)
    layers = _target_layers(config, known, state)
    declared = _declared_stream(config, state, warnings)
    expected = _expected(config, known, declared, method, state, warnings)
    expected["target_layers"] = layers

    found = next((e for e in knowledge()["engine"] if engine.strip().lower() in (e["name"], *e["aliases"])), None)
    state("engine", f"{engine} {version}, {platform}", "declared" if found else "unknown",
          "as given" if found else f"as given; this table knows {', '.join(e['name'] for e in knowledge()['engine'])}")  # fmt: skip
    k3 = _is_kimi_k3(config, known, layers)
    fed = _fed(found, config, method, version, platform, env, declared, k3, layers, state, warnings)
    if observed is not None:
        _observe(fed, found, observed, state, warnings)
    _edges(fed, found, layers, platform, pipeline, env, state, warnings)
    if config.get("fc_norm") is True and found and found["name"] == "vllm" and method == "dspark":
        warnings.append(
            "the config asks for fc_norm (a norm per tap before they are joined), which vLLM 0.29.0's K3DSparkModel lacks "
            "(raviraju1113/speculators, docs/experiments/kimi_k3_draft_eval.md); later versions were not read"
        )
    verdict, reasons = _judge(fed, expected, known)
    return Passport(pd.DataFrame(rows, columns=COLUMNS), verdict, reasons, warnings, _plain(fed), _plain(expected))


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _plain(side: dict) -> dict:
    return {k: v for k, v in side.items() if not k.startswith("_")}


def _lookup(config: dict, key: str) -> object:
    outer, _, inner = key.rpartition(".")
    section = config.get(outer) if outer else config
    return section.get(inner) if isinstance(section, dict) else None


def _ids(config: dict) -> dict[str, list[int]]:
    return {key: ids for key in KEYS if (ids := _lookup(config, key))}


def _method(config: dict) -> str | None:
    """eagle3, dspark or dflash, by what the config calls itself, else by the section that it has."""
    named = [config.get(k) for k in ("speculators_model_type", "architectures", "model_type", "algorithm")]
    words = " ".join(str(w) for n in named for w in (n if isinstance(n, list) else [n]) if isinstance(w, str)).lower()
    for method in ("dspark", "dflash", "eagle3"):
        if method in words:
            return method
    if config.get("markov_rank") or config.get("dspark_target_layer_ids"):
        return "dspark"
    return "dflash" if isinstance(config.get("dflash_config"), dict) else "eagle3" if isinstance(config.get("eagle_config"), dict) else None


def _checkpoint(config: dict, name: str | None, method: str | None, state) -> dict | None:
    table = knowledge()["checkpoint"]
    own = config.get("_name_or_path")
    for told, how in ((name, "as given"), (own if isinstance(own, str) else None, "config.json, _name_or_path")):
        if told and (entry := next((c for c in table if c["name"].lower() == told.strip().lower()), None)):
            state("checkpoint", entry["name"], "declared", how)
            return entry
    if name:
        state("checkpoint", name, "unknown", "as given; this table does not know it")
        return None
    lists = list(_ids(config).values())
    fits = [c for c in table if any(ids in lists for ids in c.get("ids", [])) and method in (None, c.get("method", method))]
    if len(fits) == 1:
        state("checkpoint", f"{fits[0]['name']}, recognised by its layer ids", "assumed", fits[0]["source"])
        return fits[0]
    why = "the config holds no name, and its layer ids are not known"
    state("checkpoint", "unknown: name it with --checkpoint ORG/NAME", "unknown", why)
    return None


def _target_layers(config: dict, known: dict | None, state) -> int | None:
    taps = max((len(v) for v in _ids(config).values()), default=0)
    for key in ("target_num_hidden_layers", "num_target_layers"):
        n = config.get(key)
        # some configs say the number of taps under num_target_layers
        if isinstance(n, int) and not isinstance(n, bool) and 0 < n <= 10_000 and not (key == "num_target_layers" and n == taps):
            state("target: layers", n, "declared", f"config.json, {key}")
            return n
    if known:
        state("target: layers", known["target_layers"], "documented", known["source"])
        return known["target_layers"]
    state("target: layers", "unknown", "unknown", "neither config.json nor the table says")
    return None


def _declared_stream(config: dict, state, warnings: list[str]) -> str | None:
    said = _lookup(config, "dflash_config.aux_hidden_stream") or config.get("aux_hidden_stream")
    source = "config.json, aux_hidden_stream"
    if said is None:
        state("declares: stream", "nothing", "unknown", source)
        return None
    stream = STREAMS.get(said.strip().lower()) if isinstance(said, str) else None
    state("declares: stream", f"{stream} ({said})" if stream else str(said)[:60], "declared" if stream else "unknown", source)
    if stream is None:
        warnings.append(f"aux_hidden_stream {str(said)[:60]!r} is neither prefix nor attn_res: not used")
    return stream


def _expected(config: dict, known: dict | None, declared: str | None, method: str | None, state, warnings: list[str]) -> dict:
    """The stream and taps that the checkpoint expects."""
    taps_by_key = {key: [i - (key in COUNTS_LAYERS_RUN) for i in ids] for key, ids in _ids(config).items()}
    for key, ids in _ids(config).items():
        source = f"config.json; ids of this key {'count layers already run' if key in COUNTS_LAYERS_RUN else 'name the layer that is read'}"
        state(f"declares: {key}", f"{_text(ids)}: after layers {_text(taps_by_key[key])}", "convention", source)
    taps, taps_status = next(iter(taps_by_key.values()), None), "convention" if taps_by_key else "unknown"
    if known and known.get("taps"):
        taps, taps_status = known["taps"], known.get("taps_status", "documented")
        state("expects: after layers", taps, taps_status, known["source"])
    elif len({tuple(t) for t in taps_by_key.values()}) > 1:
        taps, taps_status = None, "disputed"
        warnings.append("the config's own layer lists disagree: " + "; ".join(f"{k}: after {_text(t)}" for k, t in taps_by_key.items()))

    claims = list(known.get("claim", [])) if known else []
    ranks = ["documented" if c["kind"] in ("documented", "trained") else "reported" for c in claims]
    for c, rank in zip(claims, ranks, strict=True):
        state(f"expects: stream ({c['kind']})", f"{c['stream']}: {c['text']}", rank, c["source"])
    streams = {c["stream"] for c in claims} | ({declared} if declared else set())
    if known and known.get("attn_res") is False:
        stream, status = "either", "documented"
        state("expects: stream", "either: the target has no AttnRes, both are the same", status, known["source"])
    elif len(streams) > 1:
        stream, status = "disputed", "disputed"
        state("expects: stream", "disputed: " + " or ".join(sorted(streams)), status, "the statements above")
    elif streams:
        stream = streams.pop()
        status = "declared" if declared else "documented" if "documented" in ranks else "reported"
    else:
        stream, status = "unknown", "unknown"
        state("expects: stream", "unknown", "unknown", "neither config.json nor the table says")
    return {"stream": stream, "stream_status": status, "after_layers": taps, "layers_status": taps_status}


def _is_kimi_k3(config: dict, known: dict | None, layers: int | None) -> bool:
    if known:
        return known["target_layers"] == 93
    return layers == 93 or (layers is None and K3_HIDDEN in (config.get("target_hidden_size"), config.get("hidden_size")))


def _fed(
    engine: dict | None, config: dict, method: str | None, version: str, platform: str, env: Mapping[str, str] | None,
    declared: str | None, k3: bool, layers: int | None, state, warnings: list[str],
) -> dict:  # fmt: skip
    """The stream and taps that the engine feeds, by the table."""
    fed = {"stream": "unknown", "stream_status": "unknown", "engine_ids": None, "after_layers": None, "layers_status": "unknown"}
    if engine is None:
        return fed
    flag, told = engine.get("flag"), env or {}
    value = str(told.get(flag, "")).strip().lower() if flag else ""
    if flag:
        state(f"engine: {flag}", value or "not set", "declared" if env and flag in env else "assumed",
              "as given" if env and flag in env else ASSUMED_UNSET if not env else "not among the variables given")  # fmt: skip
    facts = {"method": method, "platform": platform if platform != "unknown" else None, "version": _version(version),
             "env": told, "declared": declared or "nothing"}  # fmt: skip
    if not k3:
        state("fed: stream", "unknown: the target is not known to be Kimi-K3", "unknown", "the table is about Kimi-K3")
    elif flag and value and value not in engine["flag_values"]:
        warnings.append(f"{flag}={value[:40]!r} is not one of {', '.join(engine['flag_values'])}: what the engine makes of it is not known")
        state("fed: stream", "unknown", "unknown", f"{flag} has no value that the table knows")
    else:
        _fed_stream(fed, engine, facts, state, warnings)
    _fed_layers(fed, engine, config, method, layers, state)
    return fed


def _fed_stream(fed: dict, engine: dict, facts: dict, state, warnings: list[str]) -> None:
    open_, chosen = [], None
    for rule in engine.get("stream", []):
        answer, missing = _applies(rule, facts)
        if answer is None:
            # an earlier rule that asks no more than this one decides first, whatever the answer
            if not any(earlier <= missing for _, earlier in open_):
                open_.append((rule, missing))
        elif answer:
            chosen = rule
            break
    candidates = [r for r, _ in open_] + ([chosen] if chosen else [])
    streams = {r["stream"] for r in candidates}
    if len(streams) == 1 and "unknown" not in streams:
        rule = chosen or candidates[0]
        fed |= {"stream": rule["stream"], "stream_status": rule.get("status", "documented")}
        # a switch that was not given is taken to be at its default: a log may say otherwise without a contradiction
        fed["_assumed"] = engine.get("flag") not in (None, *facts["env"]) and not rule.get("ignores_flag")
        state("fed: stream", f"{rule['stream']}: {rule['text']}", fed["stream_status"], rule["source"])
    else:
        for rule in candidates:
            state("fed: stream, if", f"{rule['stream']}: {rule['text']}", "unknown", rule["source"])
        asked = sorted({name for _, missing in open_ for name, _ in missing})
        depends = f": it depends on the {' and the '.join(asked)}" if asked else ""
        state("fed: stream", f"unknown{depends}", "unknown", "the statements above")
    flag = engine.get("flag")
    for rule in candidates:
        if rule.get("ignores_flag") and str(facts["env"].get(flag, "0")).strip() == "1":
            when = "" if rule is chosen and not open_ else "on ROCm "
            warnings.append(f"{flag}=1 {when}is a silent no-op: {rule['text']} ({rule['source']})")


def _applies(rule: dict, facts: dict) -> tuple[bool | None, set[tuple[str, str]]]:
    """Whether a rule's conditions hold; None if none fails and some are not answered: those, as (name, what it has to be)."""
    missing = set()
    for name in ("method", "platform"):
        if name in rule and facts[name] is None:
            missing.add((name, str(rule[name])))
        elif name in rule and facts[name] not in rule[name]:
            return False, set()
    if "declared" in rule and facts["declared"] != rule["declared"]:
        return False, set()
    for variable, wanted in rule.get("env", {}).items():
        if str(facts["env"].get(variable, "")).strip().lower() != wanted:
            return False, set()
    if "version" in rule and facts["version"] is None:
        missing.add(("version", rule["version"]))
    elif "version" in rule and not SpecifierSet(rule["version"]).contains(facts["version"], prereleases=True):
        return False, set()
    return (None if missing else True), missing


def _version(text: str) -> str | None:
    """The release of a version, without local and pre-release parts; None for a commit, `main`, `unknown`."""
    try:
        return Version(text.strip().removeprefix("v")).base_version
    except InvalidVersion:
        return None


def _fed_layers(fed: dict, engine: dict, config: dict, method: str | None, layers: int | None, state) -> None:
    declared = _ids(config)
    for rule in engine.get("layers", []):
        if "method" in rule and method not in rule["method"]:
            continue
        key = next((k for k in rule["keys"] if k in declared), None)
        if key is None:
            continue
        after = [i + rule["shift"] for i in declared[key]]
        ids = [i + _offset(engine, method) for i in after]
        fed |= {"engine_ids": ids, "after_layers": after, "layers_status": "documented"}
        state("fed: engine ids", f"{_text(ids)}, from {key}: {rule['text']}", "documented", rule["source"])
        state("fed: after layers", after, "documented", f"{engine['name']}: {engine['base']}")
        return
    if engine["name"] == "vllm" and method == "eagle3" and layers:
        ids = [2, layers // 2, layers - 3]
        fed |= {"engine_ids": ids, "after_layers": [i - 1 for i in ids], "layers_status": "documented"}
        state("fed: engine ids", f"{_text(ids)}, vLLM's default: it finds no layer ids at the top of the config", "documented",
              "vLLM, EagleModelMixin.get_eagle3_default_aux_hidden_state_layers: 2, L // 2, L - 3")  # fmt: skip
        return
    state("fed: after layers", "unknown", "unknown", f"no layer ids in the config that {engine['name']} is known to read; {engine['base']}")


def _offset(engine: dict, method: str | None) -> int:
    """Engine id minus 0-based layer: an EAGLE3 id counts layers already run in every engine of the table."""
    return 1 if method == "eagle3" else engine["id_offset"]


def _observe(fed: dict, engine: dict | None, seen: Observed, state, warnings: list[str]) -> None:
    if engine and engine["name"] not in ("vllm", "vllm-ascend") and seen.layers is not None:
        warnings.append(f"the log is vLLM's ({seen.where}), the engine named is {engine['name']}: its ids are read as vLLM's")
    if seen.stream:
        state("fed: stream", seen.stream, "observed", seen.where)
        if fed["stream"] not in ("unknown", seen.stream) and not fed.get("_assumed"):
            warnings.append(f"the log says {seen.stream} where {fed['stream']} was to be expected: the log is taken ({seen.where})")
        fed |= {"stream": seen.stream, "stream_status": "observed"}
    if seen.layers is not None:
        after = [i - 1 for i in seen.layers]
        state("fed: engine ids", f"{_text(seen.layers)}: after layers {_text(after)}", "observed", seen.where)
        if fed["after_layers"] is not None and after != sorted(fed["after_layers"]) and after != fed["after_layers"]:
            given = _text(fed["after_layers"])
            warnings.append(f"the log's layers, after {_text(after)}, are not those that the config gives, after {given}")
        fed |= {"engine_ids": list(seen.layers), "after_layers": after, "layers_status": "observed"}
    if not seen.stream and seen.layers is None:
        state("log", "says neither stream nor layers", "unknown", f"{seen.where}; the line is vLLM's, on CUDA: Kimi-K3 aux hidden capture")


def _edges(
    fed: dict, engine: dict | None, layers: int | None, platform: str, pipeline: int, env: Mapping[str, str] | None, state, warnings
) -> None:
    """The ends of the model and of pipeline stages; sets fed["_refused"] to a reason if the engine cannot serve this."""
    taps = fed["after_layers"]
    stages = _stage_ends(layers, pipeline, env)
    if taps is None:
        return
    if -1 in taps:
        state("fed: the embedding", "one tap is before layer 0: prefix and mixture are the same there", "documented",
              "https://github.com/vllm-project/vllm/pull/50487")  # fmt: skip
    if layers is not None:
        if beyond := [t for t in taps if not -1 <= t < layers]:
            fed["_refused"] = f"a target of {layers} layers has no layer {_text(beyond)}: nothing is captured there"
        if layers - 1 in taps and engine and engine["name"] in ("vllm", "vllm-ascend"):
            state("fed: the last layer", "the output-side mixture only on CUDA with the flag at 1; otherwise the prefix, which is not "
                  "what the model puts out", "documented", "https://github.com/vllm-project/vllm/pull/50815 (open when read)")  # fmt: skip
            if fed["stream"] != "mixture":
                warnings.append(f"id {layers} is tapped as {fed['stream']}: not the post-AttnRes output that this id is documented to be "
                                "(https://github.com/vllm-project/vllm/pull/50815)")  # fmt: skip
    if taps != sorted(taps):
        warnings.append(f"taps after {_text(taps)} are not ascending: engines capture in the order of the layers, so that the joined "
                        "features come in another order than the config's")  # fmt: skip
    if stages and engine and engine["name"] == "vllm":
        state("engine: pipeline stages end after layers", [e - 1 for e in stages], "documented",
              "vLLM, vllm/distributed/utils.py (get_pp_indices), or VLLM_PP_LAYER_PARTITION")  # fmt: skip
        if (at := [t for t in taps if t + 1 in stages]) and fed["stream"] == "mixture":
            fed["_refused"] = (f"tap after layer {_text(at)} ends a pipeline stage that is not the last: its consumer lives on the next "
                               "rank, and vLLM refuses to start (https://github.com/vllm-project/vllm/pull/50487)")  # fmt: skip
    elif stages:
        state("engine: pipeline stages", f"{pipeline}: where they end was not read for this engine", "unknown", "the table")


def _stage_ends(layers: int | None, pipeline: int, env: Mapping[str, str] | None) -> list[int]:
    """Layers run at the end of every pipeline stage but the last, as vLLM cuts them: what is left over goes to stages before the last."""
    if pipeline < 1 or (layers is not None and pipeline > layers):
        raise BadInput(f"--pipeline {pipeline}: expected a number of stages from 1 to the number of layers")
    if pipeline == 1 or layers is None:
        return []
    cut = [layers // pipeline] * pipeline
    for stage in range(2, layers % pipeline + 2):
        cut[-stage] += 1
    if partition := (env or {}).get("VLLM_PP_LAYER_PARTITION"):
        parts = partition.split(",")
        if not all(p.strip().isdecimal() and len(p) < 6 for p in parts) or len(parts) != pipeline or sum(map(int, parts)) != layers:
            raise BadInput(f"VLLM_PP_LAYER_PARTITION={partition[:80]}: expected {pipeline} numbers that add up to {layers} layers")
        cut = [int(p) for p in parts]
    return [sum(cut[: i + 1]) for i in range(pipeline - 1)]


def _judge(fed: dict, expected: dict, known: dict | None) -> tuple[str, list[str]]:
    wrong, open_, right = [], [], []
    if fed.get("_refused"):
        wrong.append(fed["_refused"])
    if expected["stream"] == "either":
        right.append("stream: the target has no AttnRes, so that there is only one")
    elif "unknown" in (fed["stream"], expected["stream"]):
        sides = [name for name, side in (("what is fed", fed), ("what is expected", expected)) if side["stream"] == "unknown"]
        open_.append(f"stream: {' and '.join(sides)} is unknown")
    elif expected["stream"] == "disputed":
        open_.append(f"stream: {fed['stream']} is fed, and sources disagree on what the checkpoint expects")
    elif fed["stream"] == expected["stream"]:
        right.append(f"stream: {fed['stream']}, as expected ({expected['stream_status']})")
    else:
        expects = f"{expected['stream']} ({expected['stream_status']})"
        wrong.append(f"stream: the engine feeds the {fed['stream']}, the checkpoint expects the {expects}")

    taps, wanted = fed["after_layers"], expected["after_layers"]
    if taps is None or wanted is None:
        open_.append("layers: what is fed is unknown" if taps is None else f"layers: what is expected is {expected['layers_status']}")
    elif sorted(taps) == sorted(wanted):
        basis = {"reported": ", as reported", "convention": ", by the convention of the config's key"}.get(expected["layers_status"], "")
        right.append(f"layers: after {_text(taps)}{basis}")
    elif len(taps) == len(wanted) and len({a - b for a, b in zip(sorted(taps), sorted(wanted), strict=True)}) == 1:
        off = sorted(taps)[0] - sorted(wanted)[0]
        by = f"{abs(off)} layer{'s' * (abs(off) > 1)} too {'late' if off > 0 else 'early'}"
        text = f"layers: every tap is {by}: after {_text(taps)} instead of after {_text(wanted)}"
        if known and fed["engine_ids"] == known.get("unshifted"):
            text += "; the checkpoint ships its ids unshifted"
        wrong.append(text)
    else:
        wrong.append(f"layers: after {_text(taps)} instead of after {_text(wanted)}")
    verdict = "mismatch" if wrong else "cannot tell" if open_ else "match"
    return verdict, [*wrong, *open_, *right]
