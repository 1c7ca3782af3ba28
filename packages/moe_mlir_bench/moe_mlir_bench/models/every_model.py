"""Every model of transformers with experts, of few layers, without memory for its weights.

    python -m moe_mlir_bench.models.every_model [FOLDER ..]

prints how many routers of each `moe_mlir.hf.patch` replaces, and why it leaves the others. Sizes are
those of the default configurations: weights are on the device "meta".
"""

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LAYERS = 6
_LAYERS = re.compile(r"n_layers|num_layers|(num_)?(hidden|encoder|decoder)_layers")
# Lists with one entry a layer.
_OF_LAYERS = re.compile(r"(.*_)?layer_types|layers_block_type|no_rope_layers|.*_per_layer")
# Models whose experts are not on transformers' interface of experts.
_FURTHER = ("dbrx", "doge", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "step3p7",
            "switch_transformers", "vitpose_backbone")
# Folders whose experts nothing in the model chooses, and what does.
WITHOUT_ROUTER = {"vitpose_backbone": "experts are chosen by the data set of an image"}
# What the default configurations of some leave open, or switch off.
_SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": dict(num_experts_per_tok=6, topk_method="group_limited_greedy", n_group=8,
                        topk_group=3),
    "deepseek_ocr2": dict(num_experts_per_tok=6, mlp_layer_types=["dense"] + 5 * ["sparse"]),
    "diffusion_gemma": dict(num_experts=8, top_k_experts=2, moe_intermediate_size=64),
    "doge": dict(is_moe=True),
    "dots1": dict(n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2),
    "gemma4": dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=64),
    "hunyuan_v1_moe": dict(head_dim=128, num_experts=8, moe_topk=2),
    "lfm2_moe": dict(layer_types=3 * ["conv", "full_attention"]),
    "qwen4_exp": dict(indexer_budget=64, indexer_compress_ratio=4, indexer_n_heads=4,
                      indexer_kv_heads=1, indexer_head_dim=64),
    "vitpose_backbone": dict(num_experts=2),
}
# What a configuration asks for when it is made.
_GIVEN: dict[str, dict[str, Any]] = {
    # Of one expert, which is its default, the gate is 1 and the router has no gradient.
    "dbrx": dict(attn_config=dict(kv_n_heads=8, rope_theta=1e4), ffn_config=dict(moe_top_k=2)),
}


def folders() -> list[str]:
    """The folders of transformers that have a model with experts."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    found = [path.parent.name for path in models.glob("*/modeling_*.py")
             if "@use_experts_implementation" in path.read_text()]
    return sorted({*found, *(name for name in _FURTHER if (models / name).is_dir())})


def build(folder: str) -> torch.nn.Module:
    """A model of the folder with experts, in eval mode on the device "meta".

    Raises:
        ValueError: no model of the folder can be built; the reasons of all.
    """
    reasons = []
    for kind in _classes(folder):
        try:
            config = kind.config_class(**_GIVEN.get(folder, {}))
            _shrink(config, _SETTINGS.get(folder, {}))
            with torch.device("meta"):
                model = kind(config).eval()
        except Exception as error:  # whatever a configuration without sizes leads to
            reasons.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            continue
        if any("expert" in name for name, _ in model.named_modules()) or folder == "doge":
            return model
        reasons.append(f"{kind.__name__} has no experts")
    raise ValueError(f"expected a model with experts in '{folder}', found none: {reasons}")


def _classes(folder) -> Iterator[Any]:
    """The models of a folder, those without a head first."""
    from transformers import PreTrainedModel

    code = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    kinds: list[Any] = [kind for name, kind in vars(code).items()
                        if inspect.isclass(kind) and issubclass(kind, PreTrainedModel)
                        and kind.__module__ == code.__name__ and not name.endswith("PreTrainedModel")]
    return iter(sorted(kinds, key=lambda kind: not kind.__name__.endswith("Model")))


def _shrink(config, settings) -> None:
    """Few layers, and the settings where the configuration or a part of it has their names."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if name in settings:
            setattr(config, name, settings[name])
        elif isinstance(value, PreTrainedConfig):
            _shrink(value, settings)
        elif type(value) is int and _LAYERS.fullmatch(name):
            setattr(config, name, min(value, LAYERS))
        elif isinstance(value, list) and _OF_LAYERS.fullmatch(name):
            setattr(config, name, value[:LAYERS])


def main(names: list[str]) -> int:
    """Prints a line a model; returns 1 if a model could not be built."""
    from moe_mlir.hf import patch

    patched, failed = 0, False
    names = names or folders()
    for folder in names:
        if folder in WITHOUT_ROUTER:
            print(f"{folder}: no router, {WITHOUT_ROUTER[folder]}", flush=True)
            continue
        try:
            model = build(folder)
        except ValueError as error:
            print(f"{folder}: {error}", flush=True)
            failed = True
            continue
        with warnings.catch_warnings(record=True) as kept:
            warnings.simplefilter("always")
            count = patch(model)
        patched += count > 0
        reasons = [str(w.message) for w in kept if " stay" in str(w.message)]
        print(f"{folder}: {count} routers of {type(model).__name__} patched", *reasons, sep="\n  ",
              flush=True)
    print(f"routers of {patched} of {len(set(names) - set(WITHOUT_ROUTER))} models patched")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
