"""The instructions that kernels rely on, as `vectors`: functions, conversions, matrices.

The bounds of approximate functions are those of the PTX ISA.
"""

import re

import numpy as np

from .ptx import encode, kernel
from .vectors import _LANES, Vectors
from .wgmma import wgmma_vectors

# ---------------------------------------------------------------- one result a thread

# Instruction -> (relative, absolute) error that the PTX ISA allows; of .ftz, a subnormal.
_TINY = 2.0**-126
FUNCTIONS = {
    "ex2.approx.ftz.f32": (2**-22, _TINY), "ex2.approx.f32": (2**-22, 2.0**-149),
    "lg2.approx.ftz.f32": (2**-22, 2**-22), "lg2.approx.f32": (2**-22, 2**-22),
    "rcp.approx.ftz.f32": (2**-23, _TINY), "rsqrt.approx.ftz.f32": (2**-22.9, _TINY),
    "sqrt.approx.ftz.f32": (2**-22, _TINY), "tanh.approx.f32": (2**-10.9, 2.0**-149),
    "sqrt.rn.f32": (0, 0), "rcp.rn.f32": (0, 0), "abs.ftz.f32": (0, 0), "neg.ftz.f32": (0, 0),
}
PAIRS = {
    "div.full.f32": (2**-22, _TINY), "div.rn.f32": (0, 0), "min.f32": (0, 0), "max.f32": (0, 0),
    "max.NaN.f32": (0, 0), "min.ftz.f32": (0, 0), "add.rn.f32": (0, 0), "add.rn.ftz.f32": (0, 0),
    "mul.rn.f32": (0, 0), "mul.rn.ftz.f32": (0, 0), "sub.rn.ftz.f32": (0, 0),
}
# To 16 bits the word has two of them, or 0 above.
CONVERSIONS = {
    "cvt.rn.bf16x2.f32": ("bf16", 2), "cvt.rn.f16x2.f32": ("f16", 2),
    "cvt.rna.tf32.f32": ("f32", 1), "cvt.rni.f32.f32": ("f32", 1), "cvt.rzi.f32.f32": ("f32", 1),
    "cvt.rmi.ftz.f32.f32": ("f32", 1), "cvt.rni.s32.f32": ("words", 1),
    "cvt.rzi.s32.f32": ("words", 1), "cvt.rzi.u32.f32": ("words", 1),
}
# Of halves; the chip that has them first.
HALVES = {
    "add.rn.f16x2": ("f16", "sm_80"), "mul.rn.f16x2": ("f16", "sm_80"),
    "max.f16x2": ("f16", "sm_80"), "max.bf16x2": ("bf16", "sm_80"),
    "max.NaN.bf16x2": ("bf16", "sm_80"), "min.bf16x2": ("bf16", "sm_80"),
    "add.rn.bf16x2": ("bf16", "sm_90"), "mul.rn.bf16x2": ("bf16", "sm_90"),
}


def _words(seed, count=4096) -> np.ndarray:
    """f32 words: specials, neighbours of powers of two, normal values, and any bits."""
    generator = np.random.default_rng(seed)
    special = np.array([0, -0.0, 1, -1, 0.5, 2, np.inf, -np.inf, np.nan, 1e-39, -1e-45, 1.4e-45,
                        1.1754944e-38, 3.4028235e38, -3.4028235e38, 65504, 65520, 2**31, -2**31,
                        2**24 + 2, 126, -126, -149.5, 127.9999, 0.49999997, 1.5, 2.5],
                       np.float32).view(np.uint32)
    powers = (np.arange(1, 255, dtype=np.uint32) << 23)[:, None] + np.array(
        [-1, 0, 1, 1 << 22], np.int64).astype(np.uint32)
    normal = (8 * generator.standard_normal(count // 2)).astype(np.float32).view(np.uint32)
    known = np.concatenate([special, powers.ravel(), normal])
    free = generator.integers(0, 2**32, count - len(known), dtype=np.uint64).astype(np.uint32)
    return np.concatenate([known, free])


def _one_result(instruction, operands, code, form, bounds, chip="sm_80"):
    # Each operand in an order of its own, so that specials meet all others.
    inputs = tuple(np.random.default_rng(j).permutation(_words(j)) for j in range(operands))
    text = kernel([1] * operands, 1, code, chip=chip)
    relative, absolute = bounds
    return Vectors(re.sub(r"\W", "_", instruction), text, inputs, (len(inputs[0]),),
                   len(inputs[0]) // _LANES, form, relative, absolute, chip=chip)


def _element_vectors():
    for instruction, bounds in FUNCTIONS.items():
        yield _one_result(instruction, 1, f"{instruction} r0, v0_0;", "f32", bounds)
    for instruction, bounds in PAIRS.items():
        yield _one_result(instruction, 2, f"{instruction} r0, v0_0, v1_0;", "f32", bounds)
    for instruction, (form, operands) in CONVERSIONS.items():
        names = ", ".join(f"v{j}_0" for j in range(operands))
        yield _one_result(instruction, operands, f"{instruction} r0, {names};", form, (0, 0))
    for kind in ("f16", "bf16"):
        code = f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, v0_0; cvt.u32.u16 r0, h; }}"
        yield _one_result(f"cvt.rn.{kind}.f32", 1, code, kind, (0, 0))
    for instruction, (form, chip) in HALVES.items():
        yield _one_result(instruction, 2, f"{instruction} r0, v0_0, v1_0;", form, (0, 0), chip)
    for instruction in ("fma.rn.f32", "fma.rn.ftz.f32"):
        yield _one_result(instruction, 3, f"{instruction} r0, v0_0, v1_0, v2_0;", "f32", (0, 0))


# ---------------------------------------------------------------- matrices of a warp

# Shape and types -> words of A, B, C a thread, and the format of A and B.
PRODUCTS = {
    "m16n8k16.row.col.f32.bf16.bf16.f32": (4, 2, 4, "bf16"),
    "m16n8k16.row.col.f32.f16.f16.f32": (4, 2, 4, "f16"),
    "m16n8k8.row.col.f32.tf32.tf32.f32": (4, 2, 4, "tf32"),
}
_SIGNS = {"bf16": 0x7FFF7FFF, "f16": 0x7FFF7FFF, "tf32": 0x7FFFFFFF, "f32": 0x7FFFFFFF}


def _operand(seed, threads, words, form):
    """A quarter of the warps each: normal, of many magnitudes, whole numbers, nearly cancelling."""
    generator = np.random.default_rng(seed)
    count = words * (2 if form in ("bf16", "f16") else 1)
    x = generator.standard_normal((threads, count))
    wide = 2.0 ** generator.integers(-9, 9, x.shape)
    kind: np.ndarray = np.arange(threads)[:, None] // 32 % 4
    x = np.select([kind == 1, kind == 2, kind == 3],
                  [x * wide, np.round(4 * x), np.sign(x) * (1 + x / 256)], x)
    return encode(x, form).reshape(threads, words)


def _product_vectors():
    threads = 16 * _LANES
    for name, (a, b, c, form) in PRODUCTS.items():
        groups = ", ".join("{" + ", ".join(f"{stem}{w}" for w in range(n)) + "}"
                           for stem, n in (("r", c), ("v0_", a), ("v1_", b), ("v2_", c)))
        inputs = tuple(_operand(seed, threads, words, kind) for seed, (words, kind) in
                       enumerate(((a, form), (b, form), (c, "f32"))))
        signless = tuple(x & np.uint32(_SIGNS[kind])
                         for x, kind in zip(inputs, (form, form, "f32")))
        yield Vectors("mma_" + re.sub(r"\W", "_", name),
                      kernel([a, b, c], c, f"mma.sync.aligned.{name} {groups};"), inputs,
                      (threads, c), threads // _LANES, relative=2**-20, absolute=2.0**-140,
                      magnitude=signless)


def _layout_vectors():
    words = np.arange(4 * _LANES, dtype=np.uint32).reshape(_LANES, 4) * np.uint32(0x10003)
    shared = (".shared .align 16 .b8 tile[2048];\n.reg .b32 %t, %s, %a;\n")
    store = ("mov.u32 %t, %tid.x; mov.u32 %s, tile; shl.b32 %a, %t, 4; add.u32 %a, %a, %s;\n"
             "st.shared.v4.b32 [%a], {v0_0, v0_1, v0_2, v0_3};\nbar.sync 0;\n")
    for form in ("", ".trans"):
        code = store + f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{r0, r1, r2, r3}}, [%a];"
        yield Vectors("ldmatrix_x4" + form.replace(".", "_"),
                      kernel([4], 4, code, registers=shared), (words,), words.shape,
                      format="words")
    yield Vectors("movmatrix_trans", kernel(
        [4], 1, "movmatrix.sync.aligned.m8n8.trans.b16 r0, v0_0;"), (words,), (_LANES, 1),
        format="words")


def all_vectors() -> list[Vectors]:
    return [*wgmma_vectors(), *_product_vectors(), *_layout_vectors(), *_element_vectors()]
