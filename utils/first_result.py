#!/usr/bin/env python3
"""From an installed moe-mlir to the first tokens of a checkpoint, with the seconds of each step.

    python utils/first_result.py

The checkpoint is a small Mixtral with random weights, so that nothing is downloaded. Fails if the
compiled model's tokens are not eager's, or if a model that changes is not compiled again.
"""

import os
import platform
import sys
import tempfile
import time

began = time.perf_counter()


def step(name: str) -> None:
    global began
    print(f"{time.perf_counter() - began:6.1f} s  {name}", flush=True)
    began = time.perf_counter()


def save_checkpoint(folder: str) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = MixtralConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, num_local_experts=8, max_position_embeddings=512)
    MixtralForCausalLM(config).save_pretrained(folder)


def check_changes() -> None:
    """CPython says in another way in each version that an attribute was set."""
    import torch

    import moe_mlir

    class ScaleConfig:  # whose attributes are followed, by its name
        scale = 2.0

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = ScaleConfig()

        def forward(self, x):
            return x * self.config.scale

    net, x = Net(), torch.ones(2, 3)
    with torch.no_grad():
        compiled = moe_mlir.compile(net, (x,))
        for scale in (2.0, 2.0, 5.0, 5.0):
            net.config.scale = scale
            if not torch.equal(compiled(x), net(x)):
                sys.exit("error: expected what the changed model computes, found another result")


def main() -> None:
    import torch

    step(f"import torch {torch.__version__}")
    import moe_mlir

    step(f"import moe_mlir {moe_mlir.__version__}")
    gates, indices = moe_mlir.topk_renorm(torch.randn(1000, 64), 8)
    assert gates.shape == indices.shape == (1000, 8)
    step("an op, compiled")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_checkpoint(folder)
        step("write the checkpoint of a small Mixtral (imports transformers)")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder)
        step("load it")
        ids = torch.randint(3, 1024, (1, 32))
        options = dict(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = model.generate(ids, **options)
        step("16 tokens with eager")
        compiled = moe_mlir.compile(model, (ids,), kwargs=dict(use_cache=True))
        step("compile it")
        found = compiled.generate(ids, **options)
        step("16 tokens with the compiled model")
    check_changes()
    step("a changed model is noticed")
    if not torch.equal(found, expected):
        sys.exit(f"error: expected eager's tokens {expected.tolist()}, found {found.tolist()}")
    libc = " ".join(platform.libc_ver())
    print(f"ok: the tokens of eager; Python {platform.python_version()}, {libc}, "
          f"{len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
