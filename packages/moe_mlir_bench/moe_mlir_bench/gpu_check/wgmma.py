"""wgmma on whole numbers, whose products are exact: operands in each layout of shared memory.

A kernel copies two images to shared memory, and one instruction reads them through
descriptors. Layouts are those of the PTX ISA's "Shared Memory Matrix Layout": `leading` and
`stride` are the descriptor's offsets in bytes, a swizzle of w bytes flips the 16-byte chunk of
an address with the number of its 128-byte row.
"""

from collections.abc import Iterator

import numpy as np

from .ptx import encode, kernel
from .vectors import Vectors

SWIZZLES = {16: 0, 128: 1, 64: 2, 32: 3}  # bytes -> code in a descriptor; 16 has none
_IMAGE_WORDS = 4096
_K = 16
_THREADS = np.arange(128)


def _place(mn, k, swizzle, transposed, leading, stride):
    """Byte offset of element k of row (or column) mn; transposed, elements run along mn."""
    chunks = swizzle // 16
    if transposed:
        chunk = mn // 8
        offset = (chunk % chunks * 16 + chunk // chunks * leading + k % 8 * swizzle
                  + k // 8 * stride + mn % 8 * 2) if chunks > 1 else (
            chunk * stride + k // 8 * leading + k % 8 * 16 + mn % 8 * 2)
    elif chunks > 1:
        offset = mn // 8 * stride + mn % 8 * swizzle + 2 * k
    else:
        offset = mn // 8 * stride + k // 8 * leading + mn % 8 * 16 + k % 8 * 2
    return offset ^ ((offset >> 7 & (chunks - 1)) << 4)


def _offsets(rows, swizzle, transposed):
    """(leading, stride) of an operand that is packed densely."""
    if not transposed:
        return (128, 256) if swizzle == 16 else (16, 8 * swizzle)
    return (rows // 8 * 128, 128) if swizzle == 16 else (16 * swizzle, 8 * swizzle)


def _image(matrix, form, swizzle, transposed):
    """The words of shared memory, and the descriptor without its address."""
    leading, stride = _offsets(len(matrix), swizzle, transposed)
    # What is no element is NaN, so that reading it shows.
    memory: np.ndarray = np.full(2 * _IMAGE_WORDS, 0xFFFF, np.uint16)
    mn, k = np.meshgrid(*map(np.arange, matrix.shape), indexing="ij")
    halves = encode(matrix, form).view(np.uint16).reshape(matrix.shape)
    memory[_place(mn, k, swizzle, transposed, leading, stride) // 2] = halves
    descriptor = (leading >> 4 << 16) | (stride >> 4 << 32) | (SWIZZLES[swizzle] << 62)
    return memory.view(np.uint32), descriptor


def _store(tile, operand):
    lines = [f"mov.u32 %s, {tile}; add.u32 %a, %s, %o;"]
    lines += [f"st.shared.v4.b32 [%a+{16 * i}], "
              f"{{{', '.join(f'v{operand}_{4 * i + w}' for w in range(4))}}};" for i in range(8)]
    return lines


def _describe(register, tile, descriptor):
    return [f"mov.u32 %s, {tile}; shr.u32 %s, %s, 4; cvt.u64.u32 {register}, %s;",
            f"add.u64 {register}, {register}, {descriptor:#x};"]


def _text(n, form, descriptors, transposed, a_words):
    registers = (".shared .align 1024 .b8 tile_a[16384];\n.shared .align 1024 .b8 tile_b[16384];\n"
                 ".reg .b32 %s, %a, %o;\n.reg .b64 %da, %db;\n.reg .pred %p;")
    body = ["shl.b32 %o, %i, 7;"]
    if a_words == 32:
        body += [*_store("tile_a", 0), *_describe("%da", "tile_a", descriptors[0])]
    body += [*_store("tile_b", 1), *_describe("%db", "tile_b", descriptors[1])]
    body += [f"mov.b32 r{w}, v2_{w};" for w in range(n // 2)]
    sums = ", ".join(f"r{w}" for w in range(n // 2))
    left, flags = ("%da", f"{int(transposed[0])}, {int(transposed[1])}") if a_words == 32 else (
        "{v0_0, v0_1, v0_2, v0_3}", f"{int(transposed[1])}")
    body += ["fence.proxy.async;", "bar.sync 0;", "setp.eq.u32 %p, 0, 0;",
             "wgmma.fence.sync.aligned;",
             f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{form}.{form} {{{sums}}}, {left}, %db, "
             f"%p, 1, 1, {flags};",
             "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    return kernel([a_words, 32, n // 2], n // 2, "\n".join(body), registers=registers,
                  chip="sm_90a")


def _fragment(matrix, words):
    """Rows of 64 as the words of 128 threads: register i of D, or of pairs of A."""
    rows = _THREADS // 32 * 16 + _THREADS % 32 // 4
    i = np.arange(words)
    return matrix[rows[:, None] + 8 * (i // 2 % 2),
                  8 * (i // 4) + _THREADS[:, None] % 4 * 2 + i % 2]


def _registers(a, form):
    """A as four words a thread: rows g and g + 8, columns 2t and 2t + 8."""
    halves = encode(a, form).view(np.uint16).reshape(a.shape)
    return np.ascontiguousarray(_fragment(halves, 8)).view(np.uint32)


def wgmma_case(n: int, form: str, swizzles: tuple[int, int] = (128, 128),
               transposed: tuple[bool, bool] = (False, False),
               in_registers: bool = False) -> Vectors:
    """64 x n sums over 16 products, added to what the accumulators hold."""
    generator = np.random.default_rng(n)
    a, b = (generator.integers(-4, 5, (rows, _K)) for rows in (64, n))
    c = generator.integers(-50, 50, (64, n))
    image_a, of_a = _image(a, form, swizzles[0], transposed[0])
    image_b, of_b = _image(b, form, swizzles[1], transposed[1])
    left = _registers(a, form) if in_registers else image_a
    fragment = np.ascontiguousarray(_fragment(c.astype(np.float32), n // 2)).view(np.uint32)
    expected = _fragment((a @ b.T + c).astype(np.float32), n // 2)

    def layout(which):
        return f"{'mn' if transposed[which] else 'k'}{swizzles[which]}"

    return Vectors(f"wgmma_n{n}_{form}_{'registers' if in_registers else layout(0)}_{layout(1)}",
                   _text(n, form, (of_a, of_b), transposed, 4 if in_registers else 32),
                   (left, image_b, fragment), fragment.shape, expected=expected, chip="sm_90a")


def wgmma_vectors() -> Iterator[Vectors]:
    # N that is no multiple of what a swizzle holds: nobody else makes these.
    for n in (8, 24, 40, 16, 64):
        for swizzle in SWIZZLES:
            yield wgmma_case(n, "bf16", (128, swizzle), (False, True))
    for swizzle in SWIZZLES:
        yield wgmma_case(64, "f16", (swizzle, swizzle))
    yield wgmma_case(128, "bf16")
    yield wgmma_case(64, "bf16", transposed=(True, True))
    for n in (24, 64):
        yield wgmma_case(n, "bf16", (128, 64), (False, True), in_registers=True)
