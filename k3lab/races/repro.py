"""Is the pipelined copy of recompute_w_u's u loop waited for? Compiles the loop for an AMD target; needs Triton >= 3.5, no GPU.

Prints the asynchronous copies in TTGIR, the LDS-DMA instructions in the assembly, and for each group of LDS reads what the
waits before it leave in flight: for a full 64-row chunk, and for a chunk of one row, whose masked copies branch away.
Exit status 0 ordered, 1 race. vmcnt is taken to retire in the order of issue (gfx9).
"""

import itertools
import os
import re
import sys

WARPS, STAGES, ARCH, POINTER_RANGE, ASYNC_COPY, OTHER = 4, 4, "gfx950", False, "1", None
os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel cannot be compiled
os.environ |= {"TRITON_ALWAYS_COMPILE": "1"} | ({"TRITON_HIP_USE_ASYNC_COPY": ASYNC_COPY} if ASYNC_COPY else {})

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402


@triton.jit
def u_loop(v, beta, A, u, T, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, OTHER: tl.constexpr):
    i_t, i_h, o_t = tl.program_id(0), tl.program_id(1), tl.arange(0, BT)
    base, o_row, m_t = i_t * BT * H + i_h, o_t[:, None] * H, i_t * BT + o_t < T
    b_beta = tl.load(beta + base + o_t * H, mask=m_t, other=OTHER)
    b_A = tl.load(A + base * BT + o_row * BT + o_t[None, :], mask=m_t[:, None], other=OTHER)
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)[None, :]
        b_v = tl.load(v + base * V + o_row * V + o_v, mask=m_t[:, None], other=OTHER)
        b_u = tl.dot(b_A, (b_v * b_beta[:, None]).to(b_A.dtype))
        tl.store(u + base * V + o_row * V + o_v, b_u.to(u.dtype.element_ty), mask=m_t[:, None])


types = {"v": "*bf16", "beta": "*fp32", "A": "*bf16", "u": "*bf16", "T": "i32"}
values = {"H": 12, "V": 128, "BT": 64, "BV": 64, "OTHER": OTHER}
facts = {(n,): [["tt.divisibility", 16]] + [["tt.pointer_range", 32]] * POINTER_RANGE for n in range(4)}
signature, constants = types | dict.fromkeys(values, "constexpr"), {(5 + n,): x for n, x in enumerate(values.values())}
source = triton.compiler.ASTSource(u_loop, signature, constants, facts)
built = triton.compile(source, target=GPUTarget("hip", ARCH, 64), options={"num_warps": WARPS, "num_stages": STAGES})
copies = len(re.findall(r"ttg.async_copy_global_to_local|buffer_load_to_local", built.asm["ttgir"]))
lines = [x.split(";")[0].strip() for x in built.asm["amdgcn"].split("\n")]
labels = {x[:-1]: n for n, x in enumerate(lines) if x.endswith(":")}
is_dma = re.compile(r"global_load_lds|buffer_load.* lds$").search
dmas = [x for x in lines if is_dma(x)]
per_copy = 8192 // (64 * WARPS * (16 if dmas and "dwordx4" in dmas[0] else 4))  # a tile of 64 x 64 bf16, by 64 lanes a wave
found = len(dmas) / per_copy
print(f"Triton {triton.__version__}, {ARCH}, num_warps {WARPS}, num_stages {STAGES}, pointer_range {POINTER_RANGE}, async {ASYNC_COPY}")
print(f"copies in TTGIR: {copies}; LDS-DMA in the assembly: {len(dmas)}, which is {found:g} copies; deleted: {copies - found:g}")

race = False
for rows in (64, 1):
    flying, number, group, wait, at_barrier, at = [], 0, 0, "none", None, 0
    while not (x := lines[at]).startswith("s_endpgm"):
        at += 1
        if m := re.match(r"s_cbranch_exec(n?)z (\S+)", x):  # a block for the lanes whose rows exist
            inside, outside = (labels[m[2]] + 1, at) if m[1] else (at, labels[m[2]])
            body = itertools.takewhile(lambda y: not y.endswith(":") and not y.startswith("s_cbranch"), lines[inside:])
            skipped = any(map(is_dma, body)) and rows == 1 and number % per_copy  # wave 0 has row 0 in each copy's first
            number, at = number + bool(skipped), outside if skipped else inside
        elif x.startswith("s_branch"):
            at = labels[x.split()[1]]
        elif m := re.search(r"vmcnt\((\d+)\)", x):
            flying, wait = flying[max(0, len(flying) - int(m[1])) :], f"vmcnt({m[1]}) at line {at}"
        elif re.match(r"(global|buffer)_(load|store)", x):
            flying.append(number // per_copy if is_dma(x) else None)
            number += bool(is_dma(x))
        elif x == "s_barrier" and number:
            at_barrier, wait_then, wait = list(flying), wait, "none"
        elif x.startswith("ds_read") and at_barrier is not None:
            left = [k for k, c in enumerate(at_barrier) if c == group]
            state = f"IN FLIGHT, vmcnt({len(at_barrier) - 1 - left[-1]}) would do" if left else "has landed"
            print(f"rows {rows}: LDS read at line {at}, last wait before its barrier {wait_then}: copy {group} {state}")
            race, group, at_barrier = race or bool(left), group + 1, None
print("verdict:", "race" if race else "ordered")
sys.exit(int(race))
