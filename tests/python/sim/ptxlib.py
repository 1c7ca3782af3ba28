"""Small hand-written PTX kernels around the instructions under test."""

import re

import numpy as np

from moe_mlir import sim

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def entry(params, registers, body, name="k", shared=""):
    """A module with one kernel; `params` and `registers` are name -> type."""
    declared = ", ".join(f".param .{t} {p}" for p, t in params.items())
    files = "\n".join(f".reg .{t} {r};" for r, t in registers.items())
    return (f"{HEADER}\n.visible .entry {name}({declared})\n{{\n{files}\n"
            f"{shared}\n{body}\nret;\n}}\n")


def bits(dtype):
    return 8 * np.dtype(dtype).itemsize


def evaluate(code, out, *inputs, block=32, grid=None, checked=True, **options):
    """Runs `code` on every element: $0 is the result of type `out`, $1... the
    inputs; registers p, q (predicates) and t0... t3 (32 bits) are free.

    With a tuple for `out` the results are $0, $01, $02... and come as a list.
    """
    outs = [np.dtype(o) for o in (out if isinstance(out, tuple) else (out,))]
    inputs = [np.ascontiguousarray(i) for i in inputs]
    n = len(inputs[0]) if inputs else block * (grid or 1)
    names = [f"o{i}" for i in range(len(outs))]
    registers = {"p": "pred", "q": "pred", "at": "b64", "i": "b32",
                 "n": "b32", "x": "b32"}
    registers |= {f"t{i}": "b32" for i in range(4)}
    body = ["mov.u32 i, %ctaid.x;", "mov.u32 x, %ntid.x;",
            "mov.u32 n, %tid.x;", "mad.lo.u32 i, i, x, n;"]
    params = {}
    for index, array in enumerate(inputs):
        params[f"in{index}"] = "u64"
        registers[f"v{index}"] = f"b{max(16, bits(array.dtype))}"
        body += address(f"in{index}", array.itemsize)
        body.append(f"ld.global.{memory_type(array)} v{index}, [at];")
        code = re.sub(rf"\${index + 1}(?!\d)", f"v{index}", code)
    for index, (name, dtype) in enumerate(zip(names, outs)):
        params[name] = "u64"
        registers[f"r{index}"] = f"b{max(16, bits(dtype))}"
        code = re.sub(rf"\$0{index or ''}(?!\d)", f"r{index}", code)
    body.append(code)
    results = [np.zeros(n, dtype) for dtype in outs]
    for index, (name, array) in enumerate(zip(names, results)):
        body += address(name, array.itemsize)
        body.append(f"st.global.{memory_type(array)} [at], r{index};")
    assert n % block == 0, "every thread of a block has its element"
    report = sim.launch(entry(params, registers, "\n".join(body)), "k",
                        n // block, block, [*inputs, *results], **options)
    if checked:
        assert report.ok, str(report)
    return results if isinstance(out, tuple) else results[0]


def address(param, size):
    return [f"ld.param.u64 at, [{param}];",
            f"{{ .reg .b64 far; mul.wide.u32 far, i, {size}; "
            "add.u64 at, at, far; }"]


def memory_type(array):
    kind = "u" if array.itemsize == 1 else "b"
    return f"{kind}{bits(array.dtype)}"


def fill(values, dtype, multiple=32):
    """The values as an array, repeated up to a multiple of the warp."""
    values = np.asarray(values, dtype)
    return np.resize(values, -(-len(values) // multiple) * multiple)


def pairs(values, dtype):
    """Every pair of the values, as two arrays."""
    values = np.asarray(values, dtype)
    a, b = np.meshgrid(values, values)
    return fill(a.ravel(), dtype), fill(b.ravel(), dtype)
