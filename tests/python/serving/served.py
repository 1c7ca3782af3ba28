"""Serves small checkpoints with vLLM in this process, and says what it made of them."""

import contextlib
import gc
import os

# vLLM reads these when it is imported: the engine in this process, and no memory for users.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PROMPTS = [[5, 17, 3, 79, 20], list(range(1, 40)), [60]]
NEW = 8


@contextlib.contextmanager
def serving(folder, dtype="float32", **options):
    """vLLM with a checkpoint; tests compare numbers, so that prompts are not cached."""
    options = {"enforce_eager": True, "max_model_len": 64, "max_logprobs": -1,
               "enable_prefix_caching": False, **options}
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype=dtype, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm):
    """The tokens after each prompt, and the logarithms of all probabilities at each of them."""
    parameters = SamplingParams(max_tokens=NEW, temperature=0, detokenize=False, ignore_eos=True,
                                logprobs=-1)
    answers = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], parameters,
                           use_tqdm=False)
    for answer in answers:
        output = answer.outputs[0]
        rows = [[row[token].logprob for token in sorted(row)] for row in output.logprobs]
        yield list(output.token_ids), torch.tensor(rows)


@torch.no_grad()
def worst_error(llm, model):
    """How far the served probabilities are from a model of transformers that reads the same tokens.

    The norm of the difference of logits, relative to that of the logits, of the worst prompt.
    """
    worst = 0.0
    for prompt, (tokens, found) in zip(PROMPTS, generate(llm)):
        ids = torch.tensor([prompt + list(tokens[:-1])])
        expected = model(ids, use_cache=False).logits[0, len(prompt) - 1:].double().log_softmax(-1)
        center = expected.mean(-1, keepdim=True)
        worst = max(worst, ((found - expected).norm() / (expected - center).norm()).item())
    return worst


def modules(llm, kind):
    """Those of a served model that are of a class, by name."""
    def find(model):
        return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
    return dict(llm.apply_model(find)[0])
