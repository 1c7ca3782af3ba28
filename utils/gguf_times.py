#!/usr/bin/env python
"""Times whole models with weights of 4 and 8 bits beside llama.cpp, on the same GGUF file.

    PYTHONPATH=build/python python utils/gguf_times.py --ggml LIB [--model Qwen3-MoE] [--layers 6]
        [--types Q4_0,Q4_K_M,Q8_0,MXFP4] [--threads 1] [--peer llama.cpp=./ggml-model]

Models have real widths and random weights, which libggml-base.so of the folder LIB rounds; types
are mixed as llama.cpp mixes them. moe_mlir reads the file, or, of an architecture that
transformers does not read from GGUF, rounds a model of transformers to the same format. Each way is
a process of its own, all of them twice, in turns; the lesser times count. The program of a peer is
made of ggml_model.cpp.
"""

import argparse
import ctypes
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch

import moe_mlir
from moe_mlir._transformers.names import cache_call
from moe_mlir_bench.models.speed import SIZES, build

ARCHITECTURES = {"Qwen3-MoE": "qwen3moe", "Granite-1B": "granitemoe"}
# What rounds a model of transformers to the format of most weights of a file.
FORMATS = {"Q4_0": "int4", "Q4_K_M": "int4", "Q8_0": "int8", "MXFP4": "mxfp4"}
# Matrices of an expert that differ; the other experts repeat them.
_DISTINCT = 4


# ---- files --------------------------------------------------------------------------


def sizes_of(model: str, layers: int | None) -> dict:
    sizes = dict(SIZES[model][2])
    return sizes if layers is None else sizes | {"num_hidden_layers": layers}


def write(path: Path, model: str, sizes: dict, type_name: str, ggml: str) -> None:
    """A file with random weights of a model."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES[model])
    write_sizes(writer, sizes)
    library = ctypes.CDLL(str(Path(ggml) / "libggml-base.so"))
    rng = np.random.default_rng(0)
    for name, shape in shapes_of(sizes).items():
        type_of_tensor = type_in_file(name, type_name, sizes["num_hidden_layers"])
        if len(shape) == 1 or type_of_tensor == "F32":
            ones = np.ones if "norm" in name else np.zeros
            writer.add_tensor(name, ones(shape, np.float32)
                              + 0.02 * rng.standard_normal(shape, np.float32))
            continue
        count = 1 if len(shape) == 2 else min(_DISTINCT, shape[0])
        matrices = 0.02 * rng.standard_normal((count, *shape[-2:]), np.float32)
        data = np.stack([rounded(library, matrix, type_of_tensor) for matrix in matrices])
        data = data[0] if len(shape) == 2 else data[np.arange(shape[0]) % count]
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[type_of_tensor])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(library, matrix: np.ndarray, type_name: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[type_name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, width = matrix.shape
    data = np.empty((rows, width // block * size), np.uint8)
    library.ggml_quantize_chunk(
        ctypes.c_int(kind), matrix.ctypes.data_as(ctypes.c_void_p),
        data.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(0), ctypes.c_int64(rows),
        ctypes.c_int64(width), None)
    return data


def type_in_file(name: str, type_name: str, layers: int) -> str:
    """The type of a tensor in a file that llama.cpp calls by this name."""
    if "ffn_gate_inp" in name:
        return "F32"
    if type_name == "MXFP4":
        return "MXFP4" if "_exps" in name else "Q8_0"
    if type_name == "Q8_0":
        return "Q8_0"
    if name.startswith("output."):
        return "Q6_K"
    if type_name == "Q4_0":
        return "Q4_0"
    if "attn_v" in name or "ffn_down" in name:
        layer = int(name.split(".")[1])
        eighth = layers // 8
        more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        return "Q6_K" if more else "Q4_K"
    return "Q4_K"


def write_sizes(writer: gguf.GGUFWriter, sizes: dict) -> None:
    heads = sizes["num_attention_heads"]
    head = sizes.get("head_dim", sizes["hidden_size"] // heads)
    writer.add_context_length(4096)
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(sizes["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_expert_count(experts_of(sizes))
    writer.add_expert_used_count(sizes["num_experts_per_tok"])
    if "moe_intermediate_size" in sizes:
        writer.add_expert_feed_forward_length(sizes["moe_intermediate_size"])
    if "attention_multiplier" in sizes:
        writer.add_attention_scale(sizes["attention_multiplier"])
        writer.add_embedding_scale(sizes["embedding_multiplier"])
        writer.add_residual_scale(sizes["residual_multiplier"])
        writer.add_logit_scale(sizes["logits_scaling"])


def experts_of(sizes: dict) -> int:
    return sizes.get("num_experts") or sizes["num_local_experts"]


def shapes_of(sizes: dict) -> dict[str, tuple[int, ...]]:
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head = sizes.get("head_dim", width // heads)
    hidden = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
    experts, keys = experts_of(sizes), head * sizes["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {
        "token_embd": (sizes["vocab_size"], width), "output_norm": (width,)}
    if not sizes.get("tie_word_embeddings"):
        found["output"] = (sizes["vocab_size"], width)
    of_layer = {"attn_norm": (width,), "ffn_norm": (width,), "attn_q": (heads * head, width),
                "attn_k": (keys, width), "attn_v": (keys, width),
                "attn_output": (width, heads * head), "ffn_gate_inp": (experts, width),
                "ffn_gate_exps": (experts, hidden, width), "ffn_up_exps": (experts, hidden, width),
                "ffn_down_exps": (experts, width, hidden)}
    if "head_dim" in sizes:
        of_layer |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    for layer in range(sizes["num_hidden_layers"]):
        found |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


# ---- runs ---------------------------------------------------------------------------


def load(path: str, model: str, sizes: dict, type_name: str, activations: str):
    if ARCHITECTURES[model] == "qwen3moe":
        return moe_mlir.from_pretrained(path, activations=activations, dtype=torch.bfloat16)
    made = build(model, "bf16", sizes)
    moe_mlir.quantize(made, FORMATS[type_name], activations=activations)
    return made


@torch.no_grad()
def run_ours(arguments) -> None:
    """Prints what a peer prints."""
    import transformers

    torch.set_num_threads(arguments.threads)
    begin = time.perf_counter()
    model = load(arguments.run, arguments.model, sizes_of(arguments.model, arguments.layers),
                 arguments.types, arguments.activations)
    loaded = time.perf_counter() - begin
    ids = torch.tensor([[3 + i * 7919 % 997 for i in range(arguments.prompt)]])
    cache = transformers.StaticCache(config=model.config,
                                     max_cache_len=arguments.prompt + arguments.steps + 1)
    keywords = dict(**cache_call(model, cache), logits_to_keep=1)
    compiled = moe_mlir.compile(model, (ids,), kwargs=keywords)
    compiled(ids, **keywords)
    print(f"first token after {time.perf_counter() - begin - loaded:.1f} s", file=sys.stderr)
    prompt, step, tokens = float("inf"), float("inf"), []
    for _ in range(arguments.rounds):
        cache.reset()
        begin = time.perf_counter()
        tokens = [int(compiled(ids, **keywords).logits[0, -1].argmax())]
        prompt = min(prompt, time.perf_counter() - begin)
        times = []
        for _ in range(arguments.steps):
            begin = time.perf_counter()
            logits = compiled(torch.tensor([[tokens[-1]]]), **keywords).logits
            tokens.append(int(logits[0, -1].argmax()))
            times.append(time.perf_counter() - begin)
        step = min(step, statistics.median(times))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{loaded:.4f} {prompt:.5f} {step:.6f} {peak}", *tokens)


def commands(arguments, path: Path, type_name: str) -> Iterator[tuple[str, list[str]]]:
    sizes = [str(n) for n in (arguments.threads, arguments.prompt, arguments.steps,
                              arguments.rounds)]
    for activations in arguments.activations.split(","):
        own = ["--threads", sizes[0], "--prompt", sizes[1], "--steps", sizes[2], "--rounds",
               sizes[3], "--run", str(path), "--model", arguments.model, "--types", type_name,
               "--activations", activations]
        if arguments.layers:
            own += ["--layers", str(arguments.layers)]
        rows = "int8 rows" if activations == "int8" else "bfloat16 rows"
        yield f"moe_mlir, {rows}", [sys.executable, __file__, *own]
    for peer in arguments.peer:
        name, _, program = peer.partition("=")
        yield name, [program, str(path), *sizes]


def measure(arguments, path: Path, type_name: str) -> None:
    found: dict[str, list[list[float]]] = {}
    tokens = {}
    for _ in range(2):
        for name, command in commands(arguments, path, type_name):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            values = done.stdout.splitlines()[-1].split()
            found.setdefault(name, []).append([float(value) for value in values[:4]])
            tokens[name] = values[4:]
    size = path.stat().st_size / 2**20
    for name, runs in found.items():
        loaded, prompt, step, peak = (min(column) for column in zip(*runs))
        print(f"| {type_name} | {name} | {arguments.prompt / prompt:.1f} | {1 / step:.1f} | "
              f"{loaded:.1f} | {peak:.0f} ({peak / size:.2f}) |", tokens[name][:6], flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=ARCHITECTURES, default="Qwen3-MoE")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--types", default=",".join(FORMATS))
    parser.add_argument("--activations", default="int8,none", help="of moe_mlir")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ggml", help="the folder of libggml-base.so")
    parser.add_argument("--folder", help="where files are kept; default: a temporary one")
    parser.add_argument("--peer", action="append", default=[], help="NAME=PROGRAM")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.run:
        return run_ours(arguments)
    print("| file | way | prompt, tokens/s | steps, tokens/s | load, s | peak MiB (of the file) |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for type_name in arguments.types.split(","):
            path = Path(arguments.folder or folder) / f"{arguments.model}-{type_name}.gguf"
            if not path.exists():
                write(path, arguments.model, sizes_of(arguments.model, arguments.layers), type_name,
                      arguments.ggml)
            measure(arguments, path, type_name)
            if not arguments.folder:
                path.unlink()


if __name__ == "__main__":
    main()
