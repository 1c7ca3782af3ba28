"""Exported torch programs, changed inside of their archive, through moe-compile.

Compiling one starts Python and torch, so these inputs are few. What torch itself says of a file
that it cannot read is passed on; a traceback of ours, or an end without an error message, is a
finding.
"""

import io
import json
import random
import subprocess
import tempfile
import zipfile
from pathlib import Path

SECONDS_PER_PROGRAM = 120


def save_seeds(folder: Path) -> list:
    """Programs of a few operators, one with a router."""
    import torch

    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(8, 4, bias=False)

        def forward(self, h):
            gates, indices = torch.softmax(self.gate(h), -1).topk(2, -1)
            return gates, indices

    class Arithmetic(torch.nn.Module):
        def forward(self, x, y):
            return (x * 2 + y.sum(0, keepdim=True)).reshape(-1, 2), x.argmax(-1)

    torch.manual_seed(0)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    programs = [
        torch.export.export(Router().eval(), (torch.randn(4, 8),), dynamic_shapes=({0: tokens},)),
        torch.export.export(Arithmetic(), (torch.randn(4, 2), torch.randn(4, 2)))]
    paths = []
    for i, program in enumerate(programs):
        paths.append(folder / f"program{i}.pt2")
        torch.export.save(program, paths[-1])
    return paths


def _edit_json(text: str, draw: random.Random) -> str:
    """One place of a document changed: another value, another member, none."""
    document = json.loads(text)
    places = []

    def collect(value):
        if isinstance(value, (dict, list)) and value:
            places.append(value)
            for child in value.values() if isinstance(value, dict) else value:
                collect(child)

    collect(document)
    for _ in range(draw.choice([1, 1, 2, 4])):
        place = draw.choice(places)
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
        donor = draw.choice(places)
        values = list(donor.values()) if isinstance(donor, dict) else donor
        choices = [None, -1, 0, 2**63, 1e30, "", "aten.relu.default", [], {}, True]
        place[key] = draw.choice([draw.choice(choices), draw.choice(values or [0])])
        if draw.random() < 0.2:
            del place[key]
            places = [p for p in places if p]
        if not places:
            break
    try:
        return json.dumps(document)
    except (ValueError, RecursionError):  # A value put into itself.
        return text[: draw.randrange(len(text))]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Members of the archive changed, left out or cut, or bytes of the file itself."""
    if draw.random() < 0.15:
        changed = bytearray(data)
        for _ in range(draw.choice([1, 8, 64])):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed[: draw.choice([len(changed), draw.randrange(len(changed))])])
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        names = source.namelist()
        documents = [n for n in names if n.endswith(".json")]
        chosen = draw.choice(documents if draw.random() < 0.8 else names)
        for name in names:
            content = source.read(name)
            if name == chosen:
                if name in documents and draw.random() < 0.9:
                    content = _edit_json(content.decode(), draw).encode()
                elif draw.random() < 0.3:
                    continue
                else:
                    content = content[: draw.randrange(len(content) + 1)]
            target.writestr(name, content)
    return out.getvalue()


def judge(done) -> str | None:
    """What is wrong with an end, or None."""
    if done.returncode == 0:
        return None
    if done.returncode not in (1, 2):
        return f"exit status {done.returncode}"
    if "Traceback" in done.stderr:
        return "a traceback: " + done.stderr.strip().splitlines()[-1]
    if "error" not in done.stderr:
        return "refused without an error message"
    return None


def fuzz(compiler: Path, runs: int, seed: int, out: Path, expired) -> tuple:
    """(programs, how many compiled, findings)"""
    done, accepted, findings = 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        seeds = [path.read_bytes() for path in save_seeds(Path(folder))]
        while done < runs and not expired():
            draw = random.Random(f"{seed}:{done}")
            path = Path(folder) / "input.pt2"
            path.write_bytes(mutate(draw.choice(seeds), draw))
            done += 1
            try:
                result = subprocess.run(
                    [compiler, path, "-o", Path(folder) / "output", "--target=cpu"],
                    capture_output=True, text=True, errors="replace", timeout=SECONDS_PER_PROGRAM)
                what = judge(result)
                accepted += result.returncode == 0
            except subprocess.TimeoutExpired:
                result, what = None, f"no end within {SECONDS_PER_PROGRAM} s"
            if what:
                findings.append(what)
                (out / f"pt2-{seed}-{done}.pt2").write_bytes(path.read_bytes())
                (out / f"pt2-{seed}-{done}.log").write_text(result.stderr if result else what)
                print(f"finding: pt2: {what}", flush=True)
    return done, accepted, findings
