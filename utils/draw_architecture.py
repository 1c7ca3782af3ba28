"""Draws docs/architecture.svg: the way of a model through the compiler.

    python utils/draw_architecture.py docs/architecture.svg

The picture is data: a stage is (title, what happens there, where its code
lives). It is kept in the tree because readers look at it on the web.
"""

import sys
from xml.sax.saxutils import escape

STAGES = [
    ("torch model", "torch.export, torch.compile", "user code", "#f3e8ff"),
    ("FX graph, routers raised", "one matcher, anchored on top-k",
     "python/moe_mlir/raising", "#f3e8ff"),
    ("moe + linalg on tensors", "what the model means; verifiers, canonical forms",
     "lib/Dialect, python/moe_mlir/importer", "#dbeafe"),
    ("moe, tiled and fused", "one scf.forall a kernel, by interfaces alone",
     "lib/Transforms", "#dbeafe"),
    ("moe on buffers", "one-shot bufferization, destinations passed in",
     "lib/Dialect/MoE/Interfaces", "#dbeafe"),
]
BRANCHES = [
    [("vector, scf, llvm", "16 tokens a vector; online softmax; threads",
      "lib/Conversion/MoEToCPU", "#dcfce7"),
     ("object code", "LLVM for this CPU", "lib/Target", "#dcfce7"),
     ("runs in process", "torch tensors, zero copy", "lib/CAPI, python/src",
      "#dcfce7")],
    [("gpu, nvvm", "blocks, warps, workgroup memory",
      "lib/Conversion/MoEToGPU", "#fef3c7"),
     ("PTX", "sm_80 and later", "lib/Pipelines, lib/Target", "#fef3c7"),
     ("simulator, ptxas, GPU", "executed and checked without a GPU",
      "simulator", "#fef3c7")],
]
WIDTH, BOX, STEP, TOP = 760, 62, 84, 20


def box(x, y, width, stage):
    title, what, where, colour = stage
    middle = x + width / 2
    return "\n".join([
        f'<rect x="{x}" y="{y}" width="{width}" height="{BOX}" rx="8" '
        f'fill="{colour}" stroke="#334155"/>',
        f'<text x="{middle}" y="{y + 20}" class="t">{escape(title)}</text>',
        f'<text x="{middle}" y="{y + 37}" class="w">{escape(what)}</text>',
        f'<text x="{middle}" y="{y + 53}" class="p">{escape(where)}</text>',
    ])


def arrow(x1, y1, x2, y2):
    return (f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#334155" '
            'stroke-width="1.5" marker-end="url(#head)"/>')


def draw() -> str:
    parts, width = [], 400
    left = (WIDTH - width) / 2
    for i, stage in enumerate(STAGES):
        y = TOP + i * STEP
        parts.append(box(left, y, width, stage))
        if i:
            parts.append(arrow(WIDTH / 2, y - STEP + BOX, WIDTH / 2, y - 2))
    start = TOP + len(STAGES) * STEP
    for column, branch in enumerate(BRANCHES):
        x = 20 + column * 370
        for i, stage in enumerate(branch):
            y = start + i * STEP
            parts.append(box(x, y, 350, stage))
            source = (WIDTH / 2, y - STEP + BOX) if i == 0 else (
                x + 175, y - STEP + BOX)
            parts.append(arrow(*source, x + 175, y - 2))
    height = start + 3 * STEP
    return f'''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">
<style>text{{text-anchor:middle;fill:#0f172a}}.t{{font-size:14px;font-weight:bold}}.w{{font-size:12px}}.p{{font-size:11px;font-family:monospace;fill:#475569}}</style>
<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#334155"/></marker></defs>
<rect width="{WIDTH}" height="{height}" fill="white"/>
{chr(10).join(parts)}
</svg>
'''


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write(draw())
