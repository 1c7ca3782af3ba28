"""Models from GGUF files: the numbers of the package gguf, which transformers loads, too."""

import io

import numpy as np
import pytest
import torch
import transformers

import moe_mlir
from moe_mlir._support.progress import Clock
from moe_mlir._transformers.gguf import GGUFWeights, open_file, read_config
from moe_mlir._transformers.gguf_blocks import BLOCK_TYPES
from moe_mlir.experts.quantized_weight import QuantizedWeight
from moe_mlir.ops._quantized import FORMATS, dequantize_codes, unpack_codes
from moe_mlir.quantization import QuantizedLinear

gguf = pytest.importorskip("gguf")

# Where the f16 of a block are, by their first byte.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
          "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
          "MXFP4": (), "IQ4_NL": (0,)}  # fmt: skip


def blocks_of(name, rows, count, rng, scale=1.0):
    """Random bytes, whose scales are finite numbers of about `scale`."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    data = rng.integers(0, 256, (*rows, count, size), dtype=np.uint8)
    for first in HALVES[name]:
        halves = rng.normal(scale=scale, size=(*rows, count, 1)).astype(np.float16)
        data[..., first:first + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        data[..., 0] = 127 + round(np.log2(scale)) + rng.integers(-3, 4, (*rows, count))
    return data.reshape(*rows, -1)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_the_numbers_of_the_package(name):
    data = blocks_of(name, (5,), 3, np.random.default_rng(0))
    block_type = BLOCK_TYPES[name]
    codes, scales, zeros = block_type.weight(torch.from_numpy(data))
    format, group, _ = block_type.quantization
    assert codes.max().item() < 2 ** FORMATS[format].bits
    found = dequantize_codes(codes, scales, zeros, format, group)
    wanted = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[name]).copy())
    # A weight `d q + m` is d (q + m / d), which rounds once more; of two levels it is exact.
    tolerance = 2e-7 * wanted.abs().max().item() if name in ("Q4_1", "Q5_1") else 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


def test_a_group_without_a_scale_is_its_minimum():
    data = blocks_of("Q4_K", (1,), 2, np.random.default_rng(0)).reshape(2, -1)
    data[0, 4:16] = 0           # no scales, no minima
    data[1, 4:8] &= 0xC0        # four scales are 0, their minima are not
    codes, scales, zeros = BLOCK_TYPES["Q4_K"].weight(torch.from_numpy(data))
    wanted = gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_K)
    found = dequantize_codes(codes, scales, zeros, "int4", 32)
    torch.testing.assert_close(found, torch.from_numpy(wanted.copy()), rtol=0,
                               atol=2e-7 * abs(wanted).max())
    assert (wanted[0] == 0).all() and (wanted[1, :128] != 0).any()


def test_scales_that_are_none_are_an_error():
    data = blocks_of("Q4_1", (1,), 1, np.random.default_rng(0))
    data[0, :2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="expected finite scales, found NaN or infinity"):
        BLOCK_TYPES["Q4_1"].weight(torch.from_numpy(data))


# ---- files ------------------------------------------------------------------------

WIDTH, HIDDEN, EXPERTS, VOCABULARY = 256, 512, 4, 96


def write(path, types, *, layers=2, architecture="qwen3moe", tokens=0):
    """A model of random weights; `types` has the type of a tensor by the end of its name."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_block_count(layers)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_rope_dimension_count(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"word {i}" for i in range(tokens)])
        writer.add_token_types([1] * tokens)
        writer.add_token_merges(["w o", "wo r"])
        writer.add_eos_token_id(7)
        writer.add_pad_token_id(5)
    else:
        writer.add_vocab_size(VOCABULARY)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(HIDDEN)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
    for name, shape in shapes(architecture, layers).items():
        kind = next((kind for end, kind in types.items() if name.endswith(end)), "F32")
        if kind == "F32" or len(shape) == 1:
            values = rng.normal(size=shape, scale=0.05).astype(np.float32)
            writer.add_tensor(name, values + (1 if "norm" in name else 0))
            continue
        size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        data = blocks_of(kind, shape[:-1], shape[-1] // size, rng,
                         scale=0.002 if "_K" in kind else 0.02)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shapes(architecture, layers):
    found = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,),
             "output": (VOCABULARY, WIDTH)}
    of_layer = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (256, WIDTH),
                "attn_k": (128, WIDTH), "attn_v": (128, WIDTH), "attn_output": (WIDTH, 256)}
    if architecture == "qwen3moe":
        of_layer |= {"attn_q_norm": (64,), "attn_k_norm": (64,), "ffn_gate_inp": (EXPERTS, WIDTH),
                     "ffn_gate_exps": (EXPERTS, HIDDEN, WIDTH),
                     "ffn_up_exps": (EXPERTS, HIDDEN, WIDTH),
                     "ffn_down_exps": (EXPERTS, WIDTH, HIDDEN)}
    else:
        of_layer |= {"ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH),
                     "ffn_down": (WIDTH, HIDDEN)}
    for layer in range(layers):
        found |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


# As llama.cpp mixes types in a file that it names Q4_K_M; and files of one type.
MIXED = {"attn_v.weight": "Q6_K", "ffn_down_exps.weight": "Q6_K", "output.weight": "Q6_K",
         "ffn_gate_inp.weight": "F32", "norm.weight": "F32", "weight": "Q4_K"}


def of_type(name):
    return {"ffn_gate_inp.weight": "F32", "norm.weight": "F32", "weight": name}


def by_transformers(folder):
    config = read_config(open_file(str(folder), "model.gguf"))
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", config=config, dtype=torch.float32).eval()


def check(folder):
    """The model of the file, which is transformers' in its weights and logits."""
    wanted = by_transformers(folder)
    model = moe_mlir.from_pretrained(folder / "model.gguf", dtype=torch.float32)
    assert isinstance(model.model.layers[0].self_attn.v_proj, QuantizedLinear)
    assert isinstance(model.lm_head, QuantizedLinear)
    for name, weight in model.named_modules():
        if isinstance(weight, QuantizedWeight):
            floats = wanted.get_parameter(name)
            torch.testing.assert_close(weight.dequantize(), floats, rtol=0,
                                       atol=2e-7 * floats.abs().max().item())
    ids = torch.arange(14).view(2, 7) * 5
    with torch.no_grad():
        logits, expected = model(ids).logits, wanted(ids).logits
    assert expected.isfinite().all()
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4 * expected.abs().max().item())
    return model


@pytest.mark.parametrize("types", [MIXED, of_type("Q8_0"), of_type("MXFP4"), of_type("Q5_K")],
                         ids=["Q4_K_M", "Q8_0", "MXFP4", "Q5_K"])
def test_a_model_is_that_of_transformers(tmp_path, types):
    write(tmp_path / "model.gguf", types)
    model = check(tmp_path)
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, QuantizedWeight)


def test_rows_that_llama_cpp_permutes(tmp_path):
    """Those of queries and keys: their scales move with their codes."""
    write(tmp_path / "model.gguf", of_type("Q4_K"), architecture="llama")
    model = check(tmp_path)
    assert isinstance(model.model.layers[1].self_attn.q_proj, QuantizedLinear)


def test_an_architecture_whose_weights_are_changed_is_refused(tmp_path):
    write(tmp_path / "model.gguf", of_type("Q8_0"), architecture="nemotron")
    with pytest.raises(ValueError, match="found 'nemotron'; load it by transformers"):
        moe_mlir.from_pretrained(tmp_path / "model.gguf")


def test_the_name_of_a_folder_and_of_a_file(tmp_path):
    write(tmp_path / "model.gguf", of_type("Q8_0"), layers=1)
    model = moe_mlir.from_pretrained(str(tmp_path), gguf_file="model.gguf", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.experts.down_proj.quantization.format == "int8"
    with pytest.raises(FileNotFoundError, match="expected other.gguf in .*, found none"):
        moe_mlir.from_pretrained(str(tmp_path), gguf_file="other.gguf")
    with pytest.raises(FileNotFoundError, match="expected a GGUF file at .*other.gguf, found none"):
        moe_mlir.from_pretrained(str(tmp_path / "other.gguf"))


def test_types_without_codes_are_floats(tmp_path):
    write(tmp_path / "model.gguf", {"ffn_down_exps.weight": "F32", **of_type("Q8_0")}, layers=1)
    with pytest.warns(UserWarning, match="gate_up_proj' is loaded as floats: the other weight"):
        model = moe_mlir.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    wanted = by_transformers(tmp_path)
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj,
                       wanted.model.layers[0].mlp.experts.gate_up_proj)
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted(ids).logits, rtol=1e-4, atol=1e-4)


def test_types_without_a_kernel_are_floats(tmp_path):
    write(tmp_path / "model.gguf", {"attn_v.weight": "IQ4_NL", **of_type("Q8_0")}, layers=1)
    with pytest.warns(UserWarning, match="v_proj.weight' is loaded as floats: no kernel reads IQ4_NL"):
        model = moe_mlir.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    assert torch.equal(model.model.layers[0].self_attn.v_proj.weight,
                       by_transformers(tmp_path).model.layers[0].self_attn.v_proj.weight)


@pytest.mark.parametrize("gone", ["ffn_up_exps", "attn_v", "output_norm"])
def test_a_file_without_a_weight_is_an_error(tmp_path, monkeypatch, gone):
    """transformers would give the model random numbers for it."""
    whole = shapes

    def without(*arguments):
        return {name: shape for name, shape in whole(*arguments).items()
                if not name.endswith(f"{gone}.weight")}
    monkeypatch.setitem(globals(), "shapes", without)
    write(tmp_path / "model.gguf", of_type("Q8_0"), layers=1)
    with pytest.raises(ValueError, match="expected a GGUF file with all weights of Qwen3Moe"):
        moe_mlir.from_pretrained(tmp_path / "model.gguf")


def test_a_head_that_is_the_embedding_needs_no_tensor(tmp_path, monkeypatch):
    whole = shapes

    def without(*arguments):
        return {name: shape for name, shape in whole(*arguments).items() if name != "output.weight"}
    monkeypatch.setitem(globals(), "shapes", without)
    write(tmp_path / "model.gguf", of_type("Q8_0"), layers=1)
    model = moe_mlir.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, by_transformers(tmp_path)(ids).logits,
                                   rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [0, VOCABULARY])
@pytest.mark.parametrize("architecture", ["qwen3moe", "llama"])
def test_the_configuration_is_that_of_the_whole_file(tmp_path, caplog, architecture, tokens):
    """transformers is given a description, in which a vocabulary has two words."""
    write(tmp_path / "model.gguf", of_type("Q8_0"), layers=1, architecture=architecture,
          tokens=tokens)
    wanted = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    found = read_config(open_file(str(tmp_path), "model.gguf"))
    assert not caplog.messages
    assert found.vocab_size == VOCABULARY and found.name_or_path == str(tmp_path)
    assert found.eos_token_id == (7 if tokens else wanted.eos_token_id)
    # Which transformers leaves out.
    wanted.moe_intermediate_size = getattr(found, "moe_intermediate_size", None)
    found.moe_intermediate_size = wanted.moe_intermediate_size
    assert found.to_dict() == wanted.to_dict()


@pytest.mark.parametrize("at_once", [1024, 1 << 18])
@pytest.mark.parametrize("architecture", ["qwen3moe", "llama"])
def test_rows_are_where_the_processor_puts_whole_weights(tmp_path, monkeypatch, architecture, at_once):
    monkeypatch.setattr(moe_mlir.ops._quantized, "_AT_ONCE", at_once)
    write(tmp_path / "model.gguf", MIXED, layers=1, architecture=architecture)
    file = open_file(str(tmp_path), "model.gguf")
    config = read_config(file)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    weights = GGUFWeights(file, skeleton, lambda model, layer, name: "")
    assert {source.type_name for target in weights.targets for source in target.sources} >= {
        "Q4_K", "Q6_K"}
    for target in weights.targets:
        halves = "gate_up" in target.name
        whole = [BLOCK_TYPES[source.type_name].weight(file.read(source, 0, source.rows).view(
            *source.shape[:-1], -1)) for source in target.sources]
        found = weights.read(target, None, halves)
        out, width = target.shape[-2:]
        unpacked = unpack_codes(found.codes, out, width, target.quantization.format, halves=halves)
        for mine, parts in zip([unpacked, *found[1:]], zip(*whole, strict=True), strict=True):
            if mine is None:
                assert parts[0] is None
                continue
            wanted = weights._process(target, parts)
            assert torch.equal(mine.to(wanted.dtype).view(wanted.shape), wanted)


def test_floats_are_rounded_once(tmp_path):
    write(tmp_path / "model.gguf", MIXED, layers=1)
    model = moe_mlir.from_pretrained(tmp_path / "model.gguf", dtype=torch.bfloat16)
    wanted = by_transformers(tmp_path).to(torch.bfloat16)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight"):
        assert torch.equal(model.get_parameter(name), wanted.get_parameter(name))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_progress_is_shown_on_a_terminal(tmp_path, monkeypatch, stream):
    write(tmp_path / "model.gguf", of_type("Q8_0"), layers=1)
    monkeypatch.setattr(Clock.__init__, "__kwdefaults__", {"delay": 1e-3, "stream": None})
    monkeypatch.setattr(moe_mlir.ops._quantized, "_AT_ONCE", 1024)     # so that it takes a while
    monkeypatch.setattr("sys.stderr", written := stream())
    moe_mlir.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    # 2 of experts, 4 of attention and the head.
    assert ("of 7 quantized weights" in written.getvalue()) == (stream is Terminal)


def damaged(path, data):
    path.write_bytes(data)
    with pytest.raises(ValueError, match="expected a GGUF file that is whole, found .*model.gguf: "):
        moe_mlir.from_pretrained(path)


def test_a_damaged_file_is_an_error(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, of_type("Q8_0"), layers=1, tokens=VOCABULARY)
    data = path.read_bytes()
    for size in (0, 3, 10, 200, 1500, 3000, len(data) // 2, len(data) - 64):
        damaged(path, data[:size])
    damaged(path, b"GGML" + data[4:])
    damaged(path, data[:4] + b"\x09" + data[5:])                    # a version to come
    damaged(path, data[:16] + b"\xff" * 8 + data[24:])              # the number of keys
    damaged(path, data.replace(b"general.architecture", b"general.architectura"))
    damaged(path, data.replace(b"attn_k.weight", b"attn_q.weight"))  # twice
    first = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    damaged(path, data[:first] + b"\xff" * 8 + data[first + 8:])    # the number of words
    damaged(path, data[:first + 8] + b"\xff" * 8 + data[first + 16:])  # the length of a word
