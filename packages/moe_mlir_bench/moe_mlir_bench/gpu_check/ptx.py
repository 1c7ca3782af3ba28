"""PTX of small kernels on words, and words of numbers."""

from collections.abc import Sequence

import numpy as np

HEADER = ".version {version}\n.target {chip}\n.address_size 64\n"


def kernel(inputs: Sequence[int], outputs: int, body: str, *, registers: str = "",
           chip: str = "sm_80", version: str = "8.0") -> str:
    """PTX of a kernel whose threads read `inputs` words of each operand, and write `outputs`.

    Operand j of a thread is in registers vj_0, vj_1, ..; its results are r0, r1, ..
    """
    count = len(inputs)
    parameters = ", ".join(f".param .u64 p{j}" for j in range(count + 1))
    lines = [".reg .b64 %at, %far;", ".reg .b32 %i, %n, %c;", registers,
             "mov.u32 %c, %ctaid.x;", "mov.u32 %n, %ntid.x;", "mov.u32 %i, %tid.x;",
             "mad.lo.u32 %i, %c, %n, %i;"]
    for j, words in enumerate(inputs):
        lines += [f".reg .b32 {', '.join(f'v{j}_{w}' for w in range(words))};", *_address(j, words)]
        lines += [f"ld.global.b32 v{j}_{w}, [%at+{4 * w}];" for w in range(words)]
    lines += [f".reg .b32 {', '.join(f'r{w}' for w in range(outputs))};", body,
              *_address(count, outputs)]
    lines += [f"st.global.b32 [%at+{4 * w}], r{w};" for w in range(outputs)]
    text = "\n".join(line for line in lines if line)
    return (HEADER.format(version=version, chip=chip)
            + f".visible .entry k({parameters})\n{{\n{text}\nret;\n}}\n")


def _address(operand, words):
    return [f"ld.param.u64 %at, [p{operand}];", f"mul.wide.u32 %far, %i, {4 * words};",
            "add.u64 %at, %at, %far;"]


def encode(values: np.ndarray, form: str) -> np.ndarray:
    """The words of numbers in a format; of 16 bits two are in a word."""
    values = np.asarray(values, np.float32)
    if form == "f16":
        return values.astype(np.float16).view(np.uint32)
    words: np.ndarray = values.view(np.uint32)
    if form == "bf16":
        return np.ascontiguousarray((words >> 16).astype(np.uint16)).view(np.uint32)
    return words & 0xFFFFE000 if form == "tf32" else words
