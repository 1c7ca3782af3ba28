"""Text that ships with Python: its documentation topics and library sources."""

import hashlib
import pathlib
import sysconfig

import torch

_DOCUMENTS = ("pydoc_data/topics.py", "*.py", "asyncio/*.py", "email/*.py", "json/*.py",
              "logging/*.py", "unittest/*.py", "xml/etree/*.py")
_MAX_BYTES = 4_000_000
_VALIDATION_SHARE = 0.05


class Corpus:
    """Bytes of the text, split into a training and a validation part."""

    def __init__(self, text: bytes) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)
        cut = int(len(data) * (1 - _VALIDATION_SHARE))
        self.train, self.validation = data[:cut], data[cut:]
        self.digest = hashlib.sha256(text).hexdigest()

    def batch(self, generator: torch.Generator, batch: int,
              tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows of the training part: inputs and the bytes that follow."""
        starts = torch.randint(len(self.train) - tokens - 1, (batch,), generator=generator)
        windows = torch.stack([self.train[s:s + tokens + 1] for s in starts])
        return windows[:, :-1], windows[:, 1:]

    def validation_batch(self, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same windows each time, spread over the validation part."""
        stride = (len(self.validation) - tokens - 1) // batch
        windows = torch.stack([self.validation[i * stride:i * stride + tokens + 1]
                               for i in range(batch)])
        return windows[:, :-1], windows[:, 1:]


def load_corpus() -> Corpus:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for pattern in _DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            text = path.read_bytes()
            parts.append(text[:_MAX_BYTES - size])
            size += len(parts[-1])
            if size >= _MAX_BYTES:
                return Corpus(b"".join(parts))
    if size < 100_000:
        raise FileNotFoundError(
            f"expected the sources of Python's standard library in {root}, found {size} bytes of "
            "them; install the full standard library of this Python")
    return Corpus(b"".join(parts))
