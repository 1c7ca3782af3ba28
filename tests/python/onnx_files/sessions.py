"""Runs ONNX files in onnxruntime, on the CPU."""

from collections import Counter

import pytest
import torch

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason=f"{package} is not installed; requirements.txt pins it")

import onnx  # noqa: E402
import onnxruntime  # noqa: E402


class File:
    """A file as a function of tensors, positional or by the names of its inputs."""

    def __init__(self, path):
        self.path = path
        self.nodes = Counter(node.op_type for node in onnx.load(
            path, load_external_data=False).graph.node)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options,
                                                    providers=["CPUExecutionProvider"])
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]

    def __call__(self, *tensors, **named):
        feed = {**dict(zip(self.inputs, tensors)), **named}
        found = self.session.run(None, {name: x.numpy() for name, x in feed.items()})
        return dict(zip(self.outputs, map(torch.from_numpy, found), strict=True))


def error(found, expected):
    """The largest difference, relative to the largest number."""
    return ((found - expected).abs().max() / expected.abs().max()).item()
