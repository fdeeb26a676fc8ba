"""Kernels compiled here for GPUs that are not here: artefacts, verdicts on the measured configs, controls, refusals."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch

from k3lab.errors import BadInput
from k3lab.races.compiled import RECOMPUTE_W_U, Build, Compiled, compile_builds, recompute_w_u_signature, signature_of
from k3lab.races.controls import REPORTED, SILENT, mutation_sweep, registers_in_flight
from k3lab.races.kernel import copy_path, standard_input
from k3lab.races.lds import analyse, left_after, run, sufficient_waits
from k3lab.races.toolchain import add_toolchain, toolchain_path, toolchains
from k3lab.testing import random_call

triton = pytest.importorskip("triton", reason="Triton has no build for this platform")
FLA = "fla.ops.kda.wy_fast:recompute_w_u_fwd_kda_kernel"
INPUTS = ["full", "length1", "middle", "tail"]

# warps, stages, target, pointer_range, padding
ROWS = {
    "racy": (4, 4, "hip:gfx950", False, "undefined"),
    "skipped copy": (4, 3, "hip:gfx950", False, "undefined"),
    "zero": (4, 2, "hip:gfx950", False, "zero"),
    "undefined": (4, 2, "hip:gfx950", False, "undefined"),
    "buffer": (4, 2, "hip:gfx950", True, "undefined"),
    "buffer s4": (2, 4, "hip:gfx950", True, "undefined"),
    "gfx942": (4, 4, "hip:gfx942", True, "undefined"),
    "gfx942 racy": (4, 4, "hip:gfx942", False, "undefined"),
    "cuda": (4, 2, "cuda:90", False, "undefined"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    old = {k: os.environ.get(k) for k in ("K3LAB_ARTEFACTS", "TRITON_INTERPRET")}
    os.environ["K3LAB_ARTEFACTS"] = str(tmp_path_factory.mktemp("artefacts"))
    os.environ["TRITON_INTERPRET"] = "1"  # a notebook without a GPU has it set; it must not reach the compiler
    yield os.environ["K3LAB_ARTEFACTS"]
    for k, v in old.items():
        if v is None:
            del os.environ[k]
        else:
            os.environ[k] = v


@pytest.fixture(scope="module")
def built(folder) -> dict[str, Compiled]:
    call = random_call((64, 1), heads=12, dtype=torch.bfloat16)
    builds = [
        Build(RECOMPUTE_W_U, w, s, target, recompute_w_u_signature(call, padding), pointer_range=pr, async_copy=True)
        for w, s, target, pr, padding in ROWS.values()
    ]
    builds.append(replace(builds[0], async_copy=False))
    return dict(zip([*ROWS, "registers"], compile_builds(builds), strict=True))


def counts(c: Compiled) -> dict:
    return {r.input: (r.count("race"), r.count("uninitialised"), r.error) for r in analyse(c.kernel(), INPUTS)}


def test_every_row_is_built_and_keeps_its_artefacts(built):
    for name, c in built.items():
        assert not c.error, name
        assert "tt.func public @recompute_w_u_fwd_kernel" in c.text("ttgir")
        assert "recompute_w_u_fwd_kernel" in c.text("llir")
        assert json.loads(c.text("json"))["num_warps"] == c.build.num_warps
    assert ".target sm_90" in built["cuda"].text("ptx")
    assert 'gfx942"' in built["gfx942"].text("amdgcn")
    with pytest.raises(BadInput, match="no amdgcn"):
        built["cuda"].kernel()


def test_same_build_is_found_again_and_another_is_not(built, folder):
    before = set(os.listdir(folder))
    c = built["buffer"]
    (again,) = compile_builds([c.build])
    assert (again.folder, set(os.listdir(folder))) == (c.folder, before)
    assert len({x.folder for x in built.values()}) == len(built)


def test_racy_config_is_found_with_the_wait_that_suffices_per_input(built):
    """num_stages=4: the third copy is deleted after it was counted, so the wait is too weak at every input."""
    kernel = built["racy"].kernel()
    enough = {}
    for r in analyse(kernel, INPUTS):
        assert r.verdict == "race"
        race = next(f for f in r.findings if f.kind == "race")
        assert (race.tile, race.first.op, race.wait.counter) == ("v", "global_load_lds_dwordx4", "vmcnt")
        assert race.second.op.startswith("ds_read")
        assert r.count("missing copy") == 1
        acc = run(kernel, standard_input(kernel, r.input))
        fixes = sufficient_waits(acc, r.findings)
        assert left_after(acc, fixes) == 0
        enough[r.input] = min(f.enough for f in fixes)
    assert enough["length1"] < enough["full"]


def test_a_skipped_copy_makes_a_fixed_count_too_weak(built):
    """num_stages=3 is ordered where every row is there, and races where a wave's rows are all masked."""
    found = counts(built["skipped copy"])
    assert [found[i][0] > 0 for i in INPUTS] == [False, True, False, True]


def test_other_zero_initialises_what_undefined_leaves(built):
    undefined, zero = counts(built["undefined"]), counts(built["zero"])
    assert [undefined[i][1] > 0 for i in INPUTS] == [False, True, False, True]
    assert set(zero.values()) == {(0, 0, "")}


@pytest.mark.parametrize("name", ["buffer", "buffer s4", "gfx942", "registers"])
def test_ordered_builds_have_no_report(built, name):
    assert set(counts(built[name]).values()) == {(0, 0, "")}


def test_each_build_tells_its_copy_path(built):
    paths = {name: copy_path(built[name].kernel().program) for name in ("racy", "buffer", "registers")}
    assert paths == {"racy": "global_load_lds", "buffer": "buffer_load_lds", "registers": "registers"}


def test_dword_copies_of_gfx942_race_as_well_where_they_are_switched_on(built):
    kernel = built["gfx942 racy"].kernel()
    assert {n > 0 for n, _, _ in counts(built["gfx942 racy"]).values()} == {True}
    assert {a.width for a in run(kernel, standard_input(kernel, "full")).all if a.kind == "dma"} == {4}


@pytest.mark.parametrize("name", ["buffer", "zero"])
def test_removed_barriers_and_waits_are_reported_or_explained(built, name):
    """The control of the analysis: nothing silent without a class, and no register in flight in the kernel as built."""
    kernel = built[name].kernel()
    acc = run(kernel, standard_input(kernel, "tail"))
    assert registers_in_flight(acc) == []
    rows = mutation_sweep(kernel, ["full", "tail"])
    assert set(rows["outcome"]) <= {REPORTED, *SILENT}
    barriers = rows[rows["change"] == "barrier removed"]
    assert (barriers["outcome"] == REPORTED).mean() > 0.8
    assert (rows["outcome"] == REPORTED).sum() > len(barriers)
    # a wait that is neither reported nor held by a register must be rare, or the analysis is blind
    assert rows["outcome"].isin(["redundant wait", "nothing in flight"]).mean() < 0.2


USER = """
import triton
import triton.language as tl

@triton.heuristics({"HAS": lambda a: a["y"] is not None})
@triton.autotune(configs=[triton.Config({}, num_warps=w) for w in (1, 2)], key=["N"])
@triton.jit
def user_kernel(x, y, N, B: tl.constexpr, HAS: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    b = tl.load(x + o, mask=o < N)
    if HAS:
        b += tl.load(y + o, mask=o < N)
    tl.store(x + o, b, mask=o < N)

a_number = 3
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("user") / "user.py"
    path.write_text(USER)
    return str(path)


def test_kernel_of_a_file_with_autotune_and_heuristics(folder, user):
    given = signature_of({"x": torch.zeros(4), "y": None, "N": 4, "B": 64})
    kernel = f"{user}:user_kernel"
    signatures = [given, {**given, "y": "*fp32"}, {**given, "B": 48}]
    alone, both, wrong = compile_builds([Build(kernel, 1, 1, signature=s) for s in signatures])
    assert (alone.error, both.error) == ("", "")
    assert alone.text("amdgcn").count("buffer_load") < both.text("amdgcn").count("buffer_load")
    assert "power of 2" in wrong.error  # one bad row costs itself alone


def test_an_error_of_the_compiler_itself_says_what_it_is(folder):
    """Triton raises "PassManager::run failed" and prints the reason; 3.7.1 cannot lower an asynchronous copy of this kernel."""
    (c,) = compile_builds([Build("k3lab.kda.triton_chunk:intra_fwd_kernel", 4, 2, pointer_range=False, async_copy=True)])
    if triton.__version__ == "3.7.1":
        assert "PassManager" in c.error
    assert "PassManager" not in c.error or re.search(r"triton_chunk\.py:\d+:\d+: error: ", c.error)


def test_integers_are_specialised_as_a_launch_does_it(folder, user):
    """A multiple of 16 decides whether rows are copied asynchronously; 1 is no argument at all."""
    said = {"typed": "i32", "typed 16": "i32:16", "64": {"value": 64}, "40": {"value": 40}, "1": {"value": 1}}
    builds = [Build(f"{user}:user_kernel", 1, 1, signature={**FITS, "N": n}) for n in said.values()]
    heads = [re.search(r"tt.func public.*", c.text("ttgir"))[0] for c in compile_builds(builds)]
    found = [re.search(r"%N: i32( \{tt.divisibility = 16)?", h) for h in heads]
    assert [bool(m and m[1]) for m in found] == [False, True, True, False, False]
    assert [m is None for m in found] == [False, False, False, False, True]


@pytest.mark.slow
def test_fla_kernel_compiles_by_module_without_a_gpu(folder):
    pytest.importorskip("fla", reason="fla-core is a peer, not a requirement")
    (c,) = compile_builds([Build(FLA, 4, 4, pointer_range=False, async_copy=True)])
    assert c.error == ""
    assert {i: n > 0 for i, (n, _, _) in counts(c).items()} == dict.fromkeys(INPUTS, True)


FITS = {"x": "*fp32", "y": None, "N": "i32", "B": 64}


@pytest.mark.parametrize(
    ("name", "signature", "words"),
    [
        ("nothing", FITS, "its kernels: user_kernel"),
        ("a_number", FITS, "is a int, not a Triton kernel"),
        ("user_kernel", {**FITS, "zz": "*bf16"}, "zz, which are not arguments; they are x, y, N, B, HAS"),
        ("user_kernel", {**FITS, "B": "i32"}, "B is a constexpr and needs a value"),
        ("user_kernel", {**FITS, "x": "*bf17"}, r"x has the type '\*bf17'; known: "),
        ("user_kernel", {"x": "*fp32", "B": 64, "y": None}, 'no type or value for N; give a signature, e.g. {"N": '),
    ],
)
def test_a_kernel_or_signature_that_does_not_fit_is_refused(folder, user, name, signature, words):
    with pytest.raises(BadInput, match=words):
        compile_builds([Build(f"{user}:{name}", 4, 2, signature=signature)])


@pytest.mark.parametrize(
    ("kernel", "words"), [("no_such_module:kernel", "'no_such_module' is not installed"), ("no_such_file.py:k", "no file no_such_file.py")]
)
def test_a_missing_module_or_file_is_named(folder, kernel, words):
    with pytest.raises(BadInput, match=words):
        compile_builds([Build(kernel, 4, 2)])


def test_unknown_target_toolchain_and_name_are_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("K3LAB_TOOLCHAINS", str(tmp_path))
    with pytest.raises(BadInput, match="hip:gfx000"):
        compile_builds([Build(RECOMPUTE_W_U, 4, 2, "hip:gfx000")])
    with pytest.raises(BadInput, match=r"toolchain add 3\.8\.0"):
        compile_builds([Build(RECOMPUTE_W_U, 4, 2, toolchain="3.8.0")])
    with pytest.raises(BadInput, match="not module:kernel"):
        compile_builds([Build("recompute", 4, 2)])
    with pytest.raises(BadInput, match="not a version"):
        add_toolchain("../3.8")
    assert toolchains() == []
    (tmp_path / "triton-3.10.0" / "triton").mkdir(parents=True)
    (tmp_path / "triton-3.10.0" / "triton" / "__init__.py").touch()
    (tmp_path / "triton-3.9.0" / "triton").mkdir(parents=True)
    (tmp_path / "triton-3.9.0" / "triton" / "__init__.py").touch()
    assert toolchains() == ["3.9.0", "3.10.0"]
    assert add_toolchain("3.9.0") == toolchain_path("3.9.0")  # one that is there is kept, without pip
    with pytest.raises(BadInput, match="x: list is neither"):
        signature_of({"x": [1]})
