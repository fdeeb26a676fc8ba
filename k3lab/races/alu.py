"""Integer instructions of gfx9 as functions of uint64 arrays; results are cut to their width by whoever stores them.

Source: AMD Instinct MI300 and CDNA4 instruction set architecture manuals.
"""

import re
from collections.abc import Callable

import numpy as np

U = np.uint64
M32, M64 = U(0xFFFFFFFF), U(0xFFFFFFFFFFFFFFFF)


def signed(a: np.ndarray, bits: int = 32) -> np.ndarray:
    sign = U(1 << (bits - 1))
    a = a if bits == 64 else a & U((1 << bits) - 1)
    return ((a ^ sign) - sign).view(np.int64)


def _extend(a: np.ndarray, bits: int = 32) -> np.ndarray:
    return signed(a, bits).view(U)


def _field(a: np.ndarray, offset: np.ndarray, width: np.ndarray, is_signed: bool) -> np.ndarray:
    offset, width = offset & U(31), width & U(31)
    value = (a >> offset) & ((U(1) << width) - U(1))
    if not is_signed:
        return value
    negative = (value >> (np.maximum(width, U(1)) - U(1))) & U(1)
    return np.where((negative == 1) & (width > 0), value | (M64 << width), value)


def _reverse(a: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for bit in range(32):
        out |= ((a >> U(bit)) & U(1)) << U(31 - bit)
    return out


def _carry(f: Callable) -> Callable:
    return lambda *x: (lambda r: (r & M32, (r >> U(32)) & U(1)))(f(*x))  # bit 32 is the carry of a sum and the borrow of a difference


LOW5, LOW6, LOW24 = U(31), U(63), U(0xFFFFFF)
# name: (source widths in dwords, result width in dwords, function)
VALU: dict[str, tuple[str, int, Callable]] = {
    "v_mov_b32": ("1", 1, lambda a: a),
    "v_mov_b64": ("2", 2, lambda a: a),
    "v_accvgpr_write_b32": ("1", 1, lambda a: a),
    "v_accvgpr_read_b32": ("1", 1, lambda a: a),
    "v_accvgpr_mov_b32": ("1", 1, lambda a: a),
    "v_not_b32": ("1", 1, lambda a: ~a),
    "v_bfrev_b32": ("1", 1, _reverse),
    "v_add_u32": ("11", 1, lambda a, b: a + b),
    "v_sub_u32": ("11", 1, lambda a, b: a - b),
    "v_subrev_u32": ("11", 1, lambda a, b: b - a),
    "v_lshlrev_b32": ("11", 1, lambda a, b: b << (a & LOW5)),
    "v_lshrrev_b32": ("11", 1, lambda a, b: b >> (a & LOW5)),
    "v_ashrrev_i32": ("11", 1, lambda a, b: (signed(b) >> (a & LOW5).view(np.int64)).view(U)),
    "v_and_b32": ("11", 1, lambda a, b: a & b),
    "v_or_b32": ("11", 1, lambda a, b: a | b),
    "v_xor_b32": ("11", 1, lambda a, b: a ^ b),
    "v_xnor_b32": ("11", 1, lambda a, b: ~(a ^ b)),
    "v_min_u32": ("11", 1, np.minimum),
    "v_max_u32": ("11", 1, np.maximum),
    "v_min_i32": ("11", 1, lambda a, b: np.minimum(signed(a), signed(b)).view(U)),
    "v_max_i32": ("11", 1, lambda a, b: np.maximum(signed(a), signed(b)).view(U)),
    "v_mul_lo_u32": ("11", 1, lambda a, b: a * b),
    "v_mul_hi_u32": ("11", 1, lambda a, b: (a * b) >> U(32)),
    "v_mul_hi_i32": ("11", 1, lambda a, b: (_extend(a) * _extend(b)) >> U(32)),
    "v_mul_u32_u24": ("11", 1, lambda a, b: (a & LOW24) * (b & LOW24)),
    "v_mul_hi_u32_u24": ("11", 1, lambda a, b: ((a & LOW24) * (b & LOW24)) >> U(32)),
    "v_mul_i32_i24": ("11", 1, lambda a, b: _extend(a, 24) * _extend(b, 24)),
    "v_mad_u32_u24": ("111", 1, lambda a, b, c: (a & LOW24) * (b & LOW24) + c),
    "v_mad_i32_i24": ("111", 1, lambda a, b, c: _extend(a, 24) * _extend(b, 24) + c),
    "v_add3_u32": ("111", 1, lambda a, b, c: a + b + c),
    "v_add_lshl_u32": ("111", 1, lambda a, b, c: (a + b) << (c & LOW5)),
    "v_lshl_add_u32": ("111", 1, lambda a, b, c: (a << (b & LOW5)) + c),
    "v_lshl_or_b32": ("111", 1, lambda a, b, c: (a << (b & LOW5)) | c),
    "v_and_or_b32": ("111", 1, lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("111", 1, lambda a, b, c: a | b | c),
    "v_xad_u32": ("111", 1, lambda a, b, c: (a ^ b) + c),
    "v_bfe_u32": ("111", 1, lambda a, b, c: _field(a, b, c, False)),
    "v_bfe_i32": ("111", 1, lambda a, b, c: _field(a, b, c, True)),
    "v_bfi_b32": ("111", 1, lambda a, b, c: (a & b) | (~a & c)),
    "v_alignbit_b32": ("111", 1, lambda a, b, c: ((a << U(32)) | b) >> (c & LOW5)),
    "v_lshlrev_b64": ("12", 2, lambda a, b: b << (a & LOW6)),
    "v_lshrrev_b64": ("12", 2, lambda a, b: b >> (a & LOW6)),
    "v_ashrrev_i64": ("12", 2, lambda a, b: (b.view(np.int64) >> (a & LOW6).view(np.int64)).view(U)),
    "v_lshl_add_u64": ("212", 2, lambda a, b, c: (a << (b & LOW6)) + c),
}
# carry in and out: (vdst, mask out, a, b[, mask in])
VALU_CARRY = {
    "v_add_co_u32": _carry(lambda a, b: a + b),
    "v_sub_co_u32": _carry(lambda a, b: a - b),
    "v_subrev_co_u32": _carry(lambda a, b: b - a),
    "v_addc_co_u32": _carry(lambda a, b, c: a + b + c),
    "v_subb_co_u32": _carry(lambda a, b, c: a - b - c),
    "v_subbrev_co_u32": _carry(lambda a, b, c: b - a - c),
}
VALU_MAD64 = {
    "v_mad_u64_u32": lambda a, b, c: a * b + c,
    "v_mad_i64_i32": lambda a, b, c: _extend(a) * _extend(b) + c,
}
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lg": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
# vector instructions whose result is float, packed or permuted data: opaque
OPAQUE = re.compile(
    r"v_(mfma|smfmac|exp|log|rcp|rsq|sqrt|sin|cos|cvt|pk_|fma|fmac|mac|mul_f|mul_legacy|add_f|sub_f|subrev_f|max_f|min_f|max3_f|min3_f|med3_f|"
    r"maximum3_f|minimum3_f|perm_b32|permlane|ldexp|rndne|trunc_f|floor_f|ceil_f|fract|dot|alignbyte|div_|frexp|prng)|v_\w+_(sdwa|dpp)$|v_\w+16$"
)


def _overflow(f: Callable) -> Callable:
    def op(a: np.ndarray, b: np.ndarray) -> tuple:
        r = f(signed(a), signed(b))
        return r.view(U), (r < -(1 << 31)) | (r >= 1 << 31)

    return op


def _scalar_field(bits: int, is_signed: bool) -> Callable:
    def op(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        offset, width = b & U(bits - 1), (b >> U(16)) & U(127)
        value = (a >> offset) & ((U(1) << np.minimum(width, U(63))) - U(1))
        if is_signed:
            negative = (value >> (np.maximum(width, U(1)) - U(1))) & U(1)
            value = np.where((negative == 1) & (width > 0), value | (M64 << np.minimum(width, U(63))), value)
        return value

    return op


def _salu() -> dict[str, tuple[str, int, Callable, str]]:
    """name: (source widths, result width, function, what scc becomes: "" kept, "nz" result is not zero, "own" second result)."""
    table: dict = {}
    logic = {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
    }  # fmt: skip
    for bits, n, low in ((32, "1", LOW5), (64, "2", LOW6)):
        w = int(n)
        for name, f in logic.items():
            table[f"s_{name}_b{bits}"] = (n + n, w, f, "nz")
        table[f"s_mov_b{bits}"] = (n, w, lambda a: a, "")
        table[f"s_not_b{bits}"] = (n, w, lambda a: ~a, "nz")
        table[f"s_lshl_b{bits}"] = (n + "1", w, lambda a, b, low=low: a << (b & low), "nz")
        table[f"s_lshr_b{bits}"] = (n + "1", w, lambda a, b, low=low: a >> (b & low), "nz")
        table[f"s_ashr_i{bits}"] = (
            n + "1", w, lambda a, b, low=low, bits=bits: (signed(a, bits) >> (b & low).view(np.int64)).view(U), "nz",
        )  # fmt: skip
        table[f"s_bitset0_b{bits}"] = (n + "1", w, lambda a, b, low=low: a & ~(U(1) << (b & low)), "")
        table[f"s_bitset1_b{bits}"] = (n + "1", w, lambda a, b, low=low: a | (U(1) << (b & low)), "")
        table[f"s_bfe_u{bits}"] = (n + "1", w, _scalar_field(bits, False), "nz")
        table[f"s_bfe_i{bits}"] = (n + "1", w, _scalar_field(bits, True), "nz")
    for k in (1, 2, 3, 4):
        table[f"s_lshl{k}_add_u32"] = ("11", 1, _carry(lambda a, b, k=k: (a << U(k)) + b), "own")
    table |= {
        # assembly prints the 16 bits of an SOPK constant as they are: -128 is 0xff80
        "s_movk_i32": ("1", 1, lambda a: _extend(a, 16), ""),
        "s_sext_i32_i16": ("1", 1, lambda a: _extend(a, 16), ""),
        "s_sext_i32_i8": ("1", 1, lambda a: _extend(a, 8), ""),
        "s_brev_b32": ("1", 1, _reverse, ""),
        "s_abs_i32": ("1", 1, lambda a: np.abs(signed(a)).view(U), "nz"),
        "s_add_u32": ("11", 1, _carry(lambda a, b: a + b), "own"),
        "s_sub_u32": ("11", 1, _carry(lambda a, b: a - b), "own"),
        "s_addc_u32": ("11c", 1, _carry(lambda a, b, c: a + b + c), "own"),
        "s_subb_u32": ("11c", 1, _carry(lambda a, b, c: a - b - c), "own"),
        "s_add_i32": ("11", 1, _overflow(lambda a, b: a + b), "own"),
        "s_sub_i32": ("11", 1, _overflow(lambda a, b: a - b), "own"),
        "s_addk_i32": ("11", 1, _overflow(lambda a, b: a + signed(b.view(U), 16)), "own"),
        "s_mul_i32": ("11", 1, lambda a, b: a * b, ""),
        "s_mulk_i32": ("11", 1, lambda a, b: a * _extend(b, 16), ""),
        "s_mul_hi_u32": ("11", 1, lambda a, b: (a * b) >> U(32), ""),
        "s_mul_hi_i32": ("11", 1, lambda a, b: (_extend(a) * _extend(b)) >> U(32), ""),
        "s_min_u32": ("11", 1, lambda a, b: (np.minimum(a, b), a < b), "own"),
        "s_max_u32": ("11", 1, lambda a, b: (np.maximum(a, b), a > b), "own"),
        "s_min_i32": ("11", 1, lambda a, b: (np.minimum(signed(a), signed(b)).view(U), signed(a) < signed(b)), "own"),
        "s_max_i32": ("11", 1, lambda a, b: (np.maximum(signed(a), signed(b)).view(U), signed(a) > signed(b)), "own"),
        "s_pack_ll_b32_b16": ("11", 1, lambda a, b: (a & U(0xFFFF)) | (b << U(16)), ""),
    }
    return table


SALU = _salu()
READS_RESULT = frozenset({"s_addk_i32", "s_mulk_i32", *(f"s_bitset{x}_b{bits}" for x in (0, 1) for bits in (32, 64))})  # as first source
