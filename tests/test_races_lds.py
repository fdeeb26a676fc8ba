"""The LDS analysis on small handwritten AMDGCN: every class of finding, the order rules, and refusals that name the instruction."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3lab.errors import BadInput, Unsupported
from k3lab.races import gfx
from k3lab.races.alu import SALU, VALU, VALU_CARRY, U
from k3lab.races.asm import parse
from k3lab.races.kernel import Input, load_kernel, make_kernel, read_input, standard_input, ttgir_copies
from k3lab.races.lds import analyse, left_after, run, sufficient_waits

HEAD = """\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
\t.text
demo:
\t.file 1 "/src" "demo.py"
"""
TAIL = """\ts_endpgm
\t.section .rodata
\t.amdhsa_kernel demo
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.end_amdhsa_kernel
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
    .max_flat_workgroup_size: 128
"""
TTGIR = """tt.func public @demo(%v: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("v"(#loc)), %n: i32 loc("n"(#loc))) attributes {a} {
  %0 = ttg.async_copy_global_to_local %a, %b : tensor<64x8x!tt.ptr<bf16>, #b> -> <64x8xbf16, #s, #smem, mutable> loc(#loc3)
  %1 = ttg.async_copy_global_to_local %a, %b : tensor<64x8x!tt.ptr<bf16>, #b> -> <64x8xbf16, #s, #smem, mutable> loc(#loc3)
}
#loc2 = loc("/src/demo.py":7:3)
#loc3 = loc("b_v"(#loc2))
"""
# 16 bytes per lane from v, into LDS at m0: wave w fills bytes 1024 w .. 1024 w + 1023
COPY = """\t.loc 1 7 0
\ts_load_dwordx2 s[4:5], s[0:1], 0x0
\ts_waitcnt lgkmcnt(0)
\tv_readfirstlane_b32 s6, v0
\ts_lshl_b32 s6, s6, 4
\ts_mov_b32 m0, s6
\tv_lshlrev_b32_e32 v1, 4, v0
\tglobal_load_lds_dwordx4 v1, s[4:5]
"""
# every lane reads the 16 bytes that the same lane of the other wave copied
READ_OTHER = """\t.loc 1 9 0
\tv_xor_b32_e32 v2, 64, v0
\tv_lshlrev_b32_e32 v2, 4, v2
\tds_read_b128 v[4:7], v2
\ts_waitcnt lgkmcnt(0)
"""


def kernel(body, ttgir=""):
    return make_kernel(HEAD + body + TAIL, ttgir, {"shared": 8192}, "demo.amdgcn")


def reports(body, ttgir="", **given):
    return analyse(kernel(body, ttgir), [Input("here", **given)])[0]


def test_copy_waited_for_and_barrier_is_ordered():
    assert reports(COPY + "\ts_waitcnt vmcnt(0)\n\ts_barrier\n" + READ_OTHER).verdict == "ordered"


def test_no_barrier_is_a_race_between_waves():
    r = reports(COPY + "\ts_waitcnt vmcnt(0)\n" + READ_OTHER, ttgir=TTGIR.replace("%1", ""))
    assert r.verdict == "race"
    (race,) = [f for f in r.findings if f.kind == "race"]
    assert (race.first.op, race.second.op, race.relation) == ("global_load_lds_dwordx4", "ds_read_b128", "other wave")
    assert (race.first.source, race.second.source, race.tile) == ("demo.py:7", "demo.py:9", "v")
    assert (race.bytes, race.span, race.waves) == (2048, (0, 2047), ((0, 1), (1, 0)))
    assert race.wait.reason == "no barrier"


def test_weak_wait_is_named_with_the_value_that_suffices():
    body = COPY + "\tglobal_load_dword v20, v1, s[4:5]\n\ts_waitcnt vmcnt(2)\n\ts_barrier\n" + READ_OTHER
    k = kernel(body)
    (r,) = analyse(k, [Input("here")])
    (race,) = r.findings
    assert (race.wait.reason, race.wait.allows, race.wait.enough) == ("too weak", 2, 1)
    assert "it needs vmcnt(1) or less" in race.message
    assert f"line {race.first.line} (demo.py:7) global_load_lds_dwordx4" in race.message
    acc = run(k, Input("here"))
    (fix,) = sufficient_waits(acc, r.findings)
    assert (fix.enough, fix.pairs) == (1, {2: 1, 1: 0})
    assert left_after(acc, [fix]) == 0
    tightened = body.replace("vmcnt(2)", "vmcnt(1)")
    assert reports(tightened).verdict == "ordered"


def test_missing_wait_is_placed_before_the_barrier():
    r = reports(COPY + "\ts_barrier\n" + READ_OTHER)
    (race,) = r.findings
    assert (race.wait.reason, race.wait.before.op, race.wait.enough) == ("none", "s_barrier", 0)


def test_a_wave_races_with_its_own_copy():
    own = READ_OTHER.replace("v_xor_b32_e32 v2, 64, v0", "v_mov_b32_e32 v2, v0")
    r = reports(COPY + own)
    assert [f.relation for f in r.findings] == ["same wave"]
    assert reports(COPY + "\ts_waitcnt vmcnt(0)\n" + own).verdict == "ordered"


def test_a_copy_over_bytes_still_being_read_is_a_race():
    start = COPY + "\ts_waitcnt vmcnt(0)\n\ts_barrier\n" + READ_OTHER.replace("\ts_waitcnt lgkmcnt(0)\n", "")
    again = "\ts_barrier\n\tglobal_load_lds_dwordx4 v1, s[4:5]\n\ts_waitcnt vmcnt(0) lgkmcnt(0)\n"
    r = reports(start + again)
    (race,) = [f for f in r.findings if f.kind == "race"]
    assert (race.first.op, race.second.op, race.wait.counter) == ("ds_read_b128", "global_load_lds_dwordx4", "lgkmcnt")
    assert reports(start + "\ts_waitcnt lgkmcnt(0)\n" + again).verdict == "ordered"


def test_ds_accesses_of_one_wave_are_in_order():
    body = "\tv_lshlrev_b32_e32 v1, 2, v0\n\tds_write_b32 v1, v0\n\tds_read_b32 v3, v1\n\ts_waitcnt lgkmcnt(0)\n"
    assert reports(body).verdict == "ordered"


def test_one_store_of_a_replicated_tile_by_two_waves_is_no_race():
    """Both waves keep the same 64 words and store them by one instruction; other bytes, or another instruction, do conflict."""
    same = "\tv_and_b32_e32 v1, 63, v0\n\tv_cvt_f32_u32_e32 v3, v1\n\tv_lshlrev_b32_e32 v1, 2, v1\n"
    assert reports(same + "\tds_write_b32 v1, v1\n").verdict == "ordered"
    assert reports(same + "\tds_write_b32 v1, v3\n").verdict == "ordered"
    assert reports(same + "\tds_write_b32 v1, v3\n\tds_write_b32 v1, v3\n").verdict == "race"
    shifted = "\tv_lshrrev_b32_e32 v1, 6, v0\n\tv_lshlrev_b32_e32 v1, 7, v1\n\tv_and_b32_e32 v2, 63, v0\n\tv_lshl_add_u32 v1, v2, 2, v1\n"
    assert reports(shifted + "\tds_write_b32 v1, v0\n").verdict == "race"


def test_one_store_by_two_waves_is_a_race_if_lanes_or_known_values_differ():
    """v0 is the thread number, known to differ; mirrored: wave 1 stores the same 64 words in the opposite lane order."""
    same = "\tv_and_b32_e32 v1, 63, v0\n\tv_lshlrev_b32_e32 v1, 2, v1\n"
    assert reports(same + "\tds_write_b32 v1, v0\n").verdict == "race"
    mirror = "\tv_cvt_f32_u32_e32 v3, v0\n\tv_bfe_i32 v2, v0, 6, 1\n\tv_and_b32_e32 v2, 63, v2\n\tv_xor_b32_e32 v2, v2, v0\n"
    mirror += "\tv_and_b32_e32 v2, 63, v2\n\tv_lshlrev_b32_e32 v1, 2, v2\n\tds_write_b32 v1, v3\n"
    assert reports(mirror).verdict == "race"
    assert reports(mirror.replace("v_xor_b32_e32 v2, v2, v0", "v_mov_b32_e32 v2, v0")).verdict == "ordered"


AGAIN = "\tglobal_load_lds_dwordx4 v1, s[4:5]\n"
OTHER_HALF = AGAIN.join(["\ts_xor_b32 s6, s6, 0x400\n\ts_mov_b32 m0, s6\n", ""])
LOOP = """\ts_movk_i32 s8, 3
.LBB0_1:
\tglobal_load_lds_dwordx4 v1, s[4:5]
\ts_waitcnt vmcnt(0)
\ts_barrier
\tds_read_b128 v[4:7], v2
\ts_waitcnt lgkmcnt(0)
\ts_barrier
\ts_addk_i32 s8, 0xffff
\ts_cmpk_gt_i32 s8, 0xfffe
\ts_cbranch_scc1 .LBB0_1
"""
SWAP = "\tv_xor_b32_e32 v2, 64, v0\n\tv_lshlrev_b32_e32 v2, 4, v2\n"
WAITED = "\ts_waitcnt vmcnt(0)\n\ts_barrier\n"
OVERWRITE = "\ts_barrier\n\tv_lshlrev_b32_e32 v12, 4, v0\n\tds_write_b128 v12, v[8:11]\n"


@pytest.mark.parametrize(
    ("hazard", "body", "mended"),
    [
        ("a wait on the other counter", COPY + WAITED.replace("vmcnt", "lgkmcnt") + READ_OTHER,
         (WAITED.replace("vmcnt", "lgkmcnt"), WAITED)),
        ("a copy after the last barrier", COPY + WAITED + READ_OTHER + AGAIN, (READ_OTHER, READ_OTHER + "\ts_barrier\n")),
        ("a copy over another wave's copy", COPY + OTHER_HALF + WAITED, (OTHER_HALF, WAITED + OTHER_HALF)),
        ("a loop whose next copy overtakes the reads", COPY.replace(AGAIN, SWAP) + LOOP.replace("lgkmcnt(0)\n\ts_barrier", "lgkmcnt(0)"),
         ("lgkmcnt(0)\n\ts_addk", "lgkmcnt(0)\n\ts_barrier\n\ts_addk")),
        ("a wait before the copy, not after it", COPY.replace(AGAIN, "\ts_waitcnt vmcnt(0)\n" + AGAIN) + "\ts_barrier\n" + READ_OTHER,
         ("\ts_barrier", WAITED.rstrip("\n"))),
        ("a write over a read in flight across the barrier", COPY + WAITED + READ_OTHER.replace("lgkmcnt", "vmcnt") + OVERWRITE,
         ("vmcnt(0)\n" + OVERWRITE, "lgkmcnt(0)\n" + OVERWRITE)),
    ],
)  # fmt: skip
def test_planted_hazard_is_found_and_its_mended_twin_is_ordered(hazard, body, mended):
    assert mended[0] in body
    assert reports(body).verdict == "race", hazard
    assert reports(body.replace(*mended)).verdict == "ordered", hazard


def test_sixteen_bit_constants_are_signed():
    """LLVM prints s_addk_i32 s8, -1 as 0xffff: the loop of 3 runs down to -2, five times."""
    acc = run(kernel(COPY.replace(AGAIN, SWAP) + LOOP), Input("here"))
    assert sum(a.kind == "dma" for a in acc.all) == 2 * 5
    body = "\ts_movk_i32 s8, 0xffc0\n\ts_mulk_i32 s8, 0xffff\n\tv_mov_b32_e32 v1, s8\n\tds_write_b32 v1, v0\n"
    assert {int(x) for a in run(kernel(body), Input("here")).all for x in a.starts} == {64}


def test_inline_assembly_in_column_0_is_read():
    body = COPY + WAITED.replace("\ts_barrier", "s_barrier") + READ_OTHER
    assert reports(body).verdict == "ordered"


def test_scalar_loads_do_not_push_ds_operations_out():
    """lgkmcnt(1) after a DS write and a scalar load says nothing of the DS write: the load may have finished first."""
    body = (
        "\tv_lshlrev_b32_e32 v1, 2, v0\n\tds_write_b32 v1, v0\n\ts_load_dword s8, s[0:1], 0x8\n\ts_waitcnt lgkmcnt(1)\n\ts_barrier\n"
        "\tv_xor_b32_e32 v2, 0x100, v1\n\tds_read_b32 v3, v2\n\ts_waitcnt lgkmcnt(0)\n"
    )
    assert reports(body).verdict == "race"
    assert reports(body.replace("lgkmcnt(1)", "lgkmcnt(0)")).verdict == "ordered"


MASKED = """\tv_cmp_gt_u32_e32 vcc, 16, v0
\ts_and_saveexec_b64 s[8:9], vcc
\ts_cbranch_execz .LBB0_1
\tglobal_load_lds_dwordx4 v1, s[4:5]
.LBB0_1:
\ts_or_b64 exec, exec, s[8:9]
"""


def test_masked_lanes_leave_lds_uninitialised_and_the_branch_parts_the_waves():
    """Wave 1 skips the copy altogether, wave 0 copies 16 of its 64 lanes."""
    body = COPY.replace("\tglobal_load_lds_dwordx4 v1, s[4:5]\n", MASKED) + "\ts_waitcnt vmcnt(0)\n\ts_barrier\n" + READ_OTHER
    r = reports(body)
    assert r.verdict == "uninitialised"
    (f,) = r.findings
    assert (f.second.op, f.bytes, f.waves) == ("ds_read_b128", 2048 - 16 * 16, (0, 1))


BUFFER = """\ts_mov_b32 s10, 0x100
\ts_mov_b32 s11, 0x27000
\ts_mov_b64 s[8:9], s[4:5]
\tbuffer_load_dwordx4 v1, s[8:11], 0 offen lds
"""


def test_out_of_bounds_buffer_copy_fills_with_zeros():
    body = COPY.replace("\tglobal_load_lds_dwordx4 v1, s[4:5]\n", BUFFER)
    read = "\ts_waitcnt vmcnt(0)\n\ts_barrier\n" + READ_OTHER
    assert reports(body + read).verdict == "ordered"
    k = kernel(body + read)
    copies = [a for a in run(k, Input("here")).all if a.kind == "dma"]
    assert [a.zero_filled for a in copies] == [48, 64]  # 256 bytes are in bounds: 16 lanes of wave 0


def test_copy_that_nobody_reads_is_noted_and_is_no_hazard():
    r = reports(COPY + "\ts_waitcnt vmcnt(0)\n", TTGIR)
    assert r.verdict == "ordered"
    assert [(f.kind, f.tile, f.is_hazard) for f in r.findings] == [("unread copy", "v", False)]


def test_ttgir_copy_without_a_dma_is_noted():
    assert ttgir_copies(TTGIR) == [("demo.py:7", 1024), ("demo.py:7", 1024)]
    body = COPY + "\ts_waitcnt vmcnt(0)\n\ts_barrier\n" + READ_OTHER
    assert reports(body, TTGIR).count("missing copy") == 0  # 2 waves of 1024 bytes
    three = TTGIR.replace("}\n#loc2", TTGIR.split("\n")[1] + "\n}\n#loc2")
    (f,) = reports(body, three).findings
    assert (f.kind, f.bytes, f.pairs) == ("missing copy", 1024, 1)


def test_a_copy_in_an_inlined_helper_is_named_by_the_line_of_the_kernel():
    """Both sides of the comparison must: else every copy through one helper would count as the same."""
    inlined = "\t.loc 1 3 5 ; ops.py:3:5 @[ /src/middle.py:4:1 @[ demo.py:7:9 ] ]\n"
    body = COPY.replace("\t.loc 1 7 0\n", inlined) + WAITED + READ_OTHER
    called = TTGIR.replace('#loc3 = loc("b_v"(#loc2))', '#loc3 = loc(callsite(#loc4 at #loc2))\n#loc4 = loc("/src/ops.py":3:5)')
    assert ttgir_copies(called) == [("demo.py:7", 1024), ("demo.py:7", 1024)]
    assert [i.source for i in kernel(body).program.instructions if "lds" in i.op] == ["demo.py:7"]
    assert reports(body, called).count("missing copy") == 0


def test_barrier_count_mismatch_is_a_hazard():
    body = "\tv_cmp_gt_u32_e32 vcc, 64, v0\n\ts_cbranch_vccz .LBB0_1\n\ts_barrier\n.LBB0_1:\n\ts_nop 0\n"
    r = reports(body)
    assert (r.verdict, [f.kind for f in r.findings]) == ("race", ["barrier count"])


def test_scalar_arguments_and_loops_are_followed():
    """The loop runs n times and writes n different words per lane: the trace must contain them all."""
    body = """\ts_load_dword s8, s[0:1], 0x8
\tv_lshlrev_b32_e32 v1, 2, v0
\ts_waitcnt lgkmcnt(0)
.LBB0_1:
\tds_write_b32 v1, v0
\tv_add_u32_e32 v1, 0x200, v1
\ts_add_i32 s8, s8, -1
\ts_cmp_lg_u32 s8, 0
\ts_cbranch_scc1 .LBB0_1
"""
    acc = run(kernel(body, TTGIR), Input("here", scalars={"n": 5}))
    assert len(acc.all) == 2 * 5
    assert sorted(int(a.starts[0]) for a in acc.all if a.wave == 1) == [256 + 512 * i for i in range(5)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("\tv_frobnicate_b32 v1, v0\n", r"v_frobnicate_b32 v1, v0: instruction not known"),
        ("\ts_frobnicate_b32 s8, s9\n", r"s_frobnicate_b32 s8, s9: instruction not known"),
        ("\tds_add_u32 v1, v0\n", r"ds_add_u32 v1, v0: instruction not known"),
        ("\tv_cvt_f32_u32_e32 v1, v0\n\tds_write_b32 v1, v0\n", r"ds_write_b32 v1, v0: the LDS address depends on data"),
        (COPY + "\tglobal_load_dword v9, v1, s[4:5]\n\tds_read_b32 v8, v9\n", r"the LDS address depends .*comes from v;"),
        ("\ts_load_dword s8, s[0:1], 0x8\n\ts_cmp_eq_u32 s8, 0\n\ts_cbranch_scc1 .LBB0_1\n.LBB0_1:\n", r"s_cbranch_scc1 .*comes from n;"),
        ("\tv_lshlrev_b32_e32 v1, 9, v0\n\tds_write_b32 v1, v0\n", r"outside the 8192 bytes of LDS"),
        ("\tv_cmpx_gt_u16_e32 vcc, v0, v0\n", r"v_cmpx_gt_u16_e32 .*exec depends on data"),
        ("\tv_add_co_u32_sdwa v1, vcc, v0, v0\n\ts_cbranch_vccz .LBB0_1\n.LBB0_1:\n", r"s_cbranch_vccz .*the branch depends on data"),
        ("\tv_add_u32_e64 v1, v0, v0 clamp\n", r"clamp: integer result with clamp"),
        ("\tbuffer_store_lds_dword s[8:11], 0\n", r"buffer_store_lds_dword .*instruction not known"),
        ("\tglobal_load_lds_ushort v1, s[4:5]\n", r"global_load_lds_ushort .*instruction not known"),
        ("\tds_write_b32 v0, v0 gds\n", r"gds: instruction not known"),
        (".LBB0_1:\n\ts_branch .LBB0_1\n", r"a loop that this input does not end"),
    ],
)
def test_what_cannot_be_followed_is_an_error_that_names_the_instruction(body, words, monkeypatch):
    monkeypatch.setattr(gfx, "MAX_STEPS", 1000)
    r = reports(body, TTGIR)
    assert r.verdict == "error"
    with pytest.raises(Unsupported, match=words):
        run(kernel(body, TTGIR), Input("here"))


def test_report_states_its_assumptions():
    text = str(reports(COPY + "\ts_waitcnt vmcnt(0)\n\ts_barrier\n" + READ_OTHER))
    assert "vmcnt counts vector memory operations" in text
    assert "out of bounds writes zeros" in text
    assert "m0 + offset + lane * width" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not AMDGCN"),
        ("hello\nworld", "not AMDGCN"),
        (HEAD.replace("gfx950", "gfx1100") + TAIL, "gfx1100"),
        (HEAD + TAIL * 2, "holds 2 kernels"),
    ],
)
def test_foreign_text_is_refused(text, words):
    with pytest.raises((BadInput, Unsupported), match=words):
        parse(text, "some.file")


@pytest.mark.parametrize(
    "target", ["amdgcn-amd-amdhsa--gfx950", "amdgcn-amd-amdhsa--gfx942:sramecc+", "amdgpu9.50-amd-amdhsa-unknown-gfx950"]
)
def test_every_spelling_of_the_target_is_read(target):
    assert parse(HEAD.replace("amdgcn-amd-amdhsa--gfx950", target) + TAIL).arch in target


def test_bad_files_name_themselves(tmp_path):
    path = tmp_path / "k.amdgcn"
    with pytest.raises(BadInput, match=r"k\.amdgcn"):
        load_kernel(path)
    path.write_text(HEAD + COPY + TAIL)
    assert load_kernel(path).warps == 2
    (tmp_path / "k.json").write_text("{")
    with pytest.raises(BadInput, match=r"k\.json.*not JSON"):
        load_kernel(path)
    (tmp_path / "k.json").write_text(json.dumps({"num_warps": 3000}))
    with pytest.raises(BadInput, match="3000 waves"):
        load_kernel(path)


@pytest.mark.parametrize(
    "line",
    [
        "v_add_u32_e32 v1", "s_add_u32 s0", "ds_read_b128 v[0:3]", "ds_read_b32 v0, v1 offset:x", "ds_bpermute_b32 v0",
        "s_load_dwordx4 s[4:7]",
        "v_mov_b32_e32 v999, 0", "v_bitop3_b32 v0, v1, v2, v3 bitop3:x", "global_load_lds_dwordx4 v1", "v_mad_u64_u32 v0, vcc",
        "buffer_load_dwordx4 v0 lds", "s_branch",
        f"v_mov_b32_e32 v0{', v0' * 9999}", "v_add_u32_e32 v1, , v2", f"s_mov_b32 s0, {'9' * 5000}", f"v_mov_b32_e32 v0, v{'9' * 5000}",
    ],
)  # fmt: skip
def test_operands_that_an_instruction_does_not_have_are_refused_by_line(line):
    """No compiler writes them; a damaged file has them."""
    with pytest.raises(Unsupported, match="line 5"):
        run(kernel(f"\t{line}\n"), Input("here"))


@pytest.mark.parametrize(
    "text", ['{"num_warps": [4]}', '{"num_warps": "4"}', '{"shared": {}}', '{"shared": -1}', "[" * 100_000, f'{{"shared": {"9" * 5000}}}']
)
def test_launch_metadata_of_another_type_is_refused(tmp_path, text):
    (tmp_path / "k.amdgcn").write_text(HEAD + COPY + TAIL)
    (tmp_path / "k.json").write_text(text)
    with pytest.raises(BadInput, match=r"k\.(json|amdgcn)"):
        load_kernel(tmp_path / "k.amdgcn")


def test_numbers_and_texts_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(BadInput, match="a number of the descriptor"):
        kernel(COPY + f"\t.amdhsa_x {'9' * 5000}\n")
    (tmp_path / "k.amdgcn").write_text(HEAD + COPY + TAIL)
    (tmp_path / "k.ttgir").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="cannot be read as text"):
        load_kernel(tmp_path / "k.amdgcn")
    with pytest.raises(BadInput, match="no i32"):
        run(kernel(COPY, TTGIR.replace("<bf16>", "<i32>", 1)), Input("here", buffers={"v": [2**40]}))
    (tmp_path / "in.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match=r"in\.json"):
        read_input(tmp_path / "in.json")


def test_bad_inputs_name_themselves(tmp_path):
    k = kernel(COPY, TTGIR)
    with pytest.raises(BadInput, match="'middling'"):
        standard_input(k, "middling")
    with pytest.raises(BadInput, match="'x' is not an argument"):
        run(k, Input("here", buffers={"x": [1]}))
    with pytest.raises(BadInput, match="element type bf16"):
        run(k, Input("here", buffers={"v": [1]}))
    path = tmp_path / "in.json"
    for text in ("[", "[1]", '{"lengths": 3}', '{"workgroup": [1]}', '{"buffers": {"v": 3}}', '{"scalars": {"n": "x"}}'):
        path.write_text(text)
        with pytest.raises(BadInput, match=r"in\.json"):
            read_input(path)
    path.write_text('{"scalars": {"n": 7}, "workgroup": [1, 2, 3]}')
    assert read_input(path) == Input("in", {}, {"n": 7}, (1, 2, 3))


word = st.integers(0, 2**32 - 1)


def bits32(x):
    return x & 0xFFFFFFFF


def s32(x):
    return x - (1 << 32) if x >> 31 else x


@given(word, word, word)
def test_integer_instructions_agree_with_plain_integers(a, b, c):
    x, y, z = (np.full((1, 1), v, U) for v in (a, b, c))

    def v(name, *args):
        return int(VALU[name][2](*args).flat[0]) & 0xFFFFFFFF

    assert v("v_mul_hi_u32", x, y) == a * b >> 32
    assert v("v_mul_hi_i32", x, y) == bits32(s32(a) * s32(b) >> 32)
    assert v("v_ashrrev_i32", x, y) == bits32(s32(b) >> (a & 31))
    assert v("v_bfe_u32", x, y, z) == a >> (b & 31) & ((1 << (c & 31)) - 1)
    width = c & 31
    field = a >> (b & 31) & ((1 << width) - 1)
    assert v("v_bfe_i32", x, y, z) == bits32(field - (1 << width) if width and field >> (width - 1) else field)
    assert v("v_bfrev_b32", x) == int(f"{a:032b}"[::-1], 2)
    assert v("v_min_i32", x, y) == bits32(min(s32(a), s32(b)))
    assert int(SALU["s_bitset1_b32"][2](x, z).flat[0]) == a | 1 << (c & 31)
    assert int(SALU["s_bitset0_b64"][2](x, z).flat[0]) == a & ~(1 << (c & 63))
    total, carry = VALU_CARRY["v_addc_co_u32"](x, y, z & U(1))
    assert int(total.flat[0]) + (int(carry.flat[0]) << 32) == a + b + (c & 1)
    diff, borrow = VALU_CARRY["v_sub_co_u32"](x, y)
    assert (int(diff.flat[0]), int(borrow.flat[0])) == (bits32(a - b), int(b > a))
    total, over = SALU["s_add_i32"][2](x, y)
    assert (bits32(int(total.flat[0])), bool(over.flat[0])) == (bits32(a + b), not -(2**31) <= s32(a) + s32(b) < 2**31)
    control = (c & 31) | (b & 31) << 16
    got = int(SALU["s_bfe_i32"][2](x, np.full((1, 1), control, U)).flat[0])
    width = b & 31
    field = a >> (c & 31) & ((1 << width) - 1)
    assert bits32(got) == bits32(field - (1 << width) if width and field >> (width - 1) else field)
