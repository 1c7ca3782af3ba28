#!/usr/bin/env python
"""Times onnxruntime's QMoE on the layer of quantized_times.py, as a peer of it.

    python quantized_times.py --peer onnxruntime=utils/qmoe_layer.py:int4,int8
    python qmoe_layer.py TYPE THREADS TOKENS D HIDDEN EXPERTS K

Needs the packages onnx and onnxruntime. TYPE is int4 or int8, with a scale for each 32 features.
The weights are random codes, and rows are float32, which is all that its CPU kernel takes. Each
call needs other experts than the one before it. The last line is the mean of the calls' least
times, in milliseconds.
"""

import sys
import time

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

BLOCK = 32


def session(bits: int, threads: int, d: int, hidden: int, experts: int, k: int):
    """A model of one node."""
    rng = np.random.default_rng(0)

    def codes(out, width):
        return rng.integers(0, 256, (experts, out, width * bits // 8), dtype=np.uint8)

    def scales(out, width):
        return np.full((experts, out, width // BLOCK), 0.01, np.float32)
    constants = {"w_in": codes(2 * hidden, d), "scales_in": scales(2 * hidden, d),
                 "w_out": codes(d, hidden), "scales_out": scales(d, hidden)}
    node = helper.make_node(
        "QMoE", ["x", "logits", "w_in", "scales_in", "", "w_out", "scales_out", ""], ["y"],
        domain="com.microsoft", k=k, activation_type="swiglu", swiglu_fusion=1,
        normalize_routing_weights=1, expert_weight_bits=bits, block_size=BLOCK)

    def info(name, width):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, width])
    graph = helper.make_graph(
        [node], "layer", [info("x", d), info("logits", experts)], [info("y", d)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()])
    model = helper.make_model(graph, ir_version=10, opset_imports=[
        helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options,
                                        providers=["CPUExecutionProvider"])


def calls_of(tokens: int, d: int, experts: int, k: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    count = max(8, experts // k)
    turns = np.concatenate([rng.permutation(experts) for _ in range(-(-count * k // experts))])
    calls = []
    for chosen in turns[:count * k].reshape(count, k):
        logits = rng.standard_normal((tokens, experts), np.float32)
        if tokens == 1:
            logits[0, chosen] += 20
        calls.append({"x": rng.standard_normal((tokens, d), np.float32), "logits": logits})
    return calls


def main() -> None:
    of_type, *sizes = sys.argv[1:]
    threads, tokens, d, hidden, experts, k = map(int, sizes)
    layer = session({"int4": 4, "int8": 8}[of_type], threads, d, hidden, experts, k)
    calls = calls_of(tokens, d, experts, k)
    best = [float("inf")] * len(calls)
    for _ in range(max(5, 60 // tokens)):
        for number, inputs in enumerate(calls):
            begin = time.perf_counter()
            layer.run(None, inputs)
            best[number] = min(best[number], time.perf_counter() - begin)
    print(1e3 * sum(best) / len(best))


if __name__ == "__main__":
    main()
