"""The calls of this package whose time the page states, at the sizes that matter."""

import functools

import torch

import moe_mlir
from moe_mlir.ops._expert_activation import ExpertActivation
from moe_mlir.ops.grouped_linear import grouped_linear
from moe_mlir.ops.token_rows import token_rows

from .recorded import Call, randint, randn

BF16, F32 = torch.bfloat16, torch.float32
SWIGLU = ExpertActivation("silu", gate="concatenated")


def topk(experts, k, dtype, size, recorder, **options):
    moe_mlir.topk_renorm(randn(size, experts, dtype=dtype), k, **options)


def grouped_choice(size, recorder):
    moe_mlir.grouped_topk(randn(size, 256), 8, n_group=8, topk_group=4, score="sigmoid",
                          bias=randn(256))


def mad(width, experts, size, recorder):
    h = randn(size, width)
    moe_mlir.mad_dispersion(h, randint(experts, size), experts)


def adjacency(experts, k, size, recorder):
    moe_mlir.adjacency_update(torch.ones(experts, experts), randint(experts, size, k))


def router(width, experts, k, size, recorder):
    h = randn(size, width, dtype=BF16)
    w = randn(experts, width, dtype=BF16, scale=width**-0.5)
    results = torch.empty(size, k), torch.empty(size, k, dtype=torch.int32)
    recorder.run_text(router_text(width, experts, k, "bf16"), "route", [h, w, *results])


def deepseek_router(size, recorder):
    """DeepSeek-V3's: sigmoid, a bias for the choice, 4 of 8 groups."""
    width, experts, k = 7168, 256, 8
    h = randn(size, width, dtype=BF16)
    w = randn(experts, width, dtype=BF16, scale=width**-0.5)
    results = torch.empty(size, k), torch.empty(size, k, dtype=torch.int32)
    recorder.run_text(deepseek_text(), "route", [h, w, randn(experts), *results])


def deepseek_text() -> str:
    text = router_text(7168, 256, 8, "bf16")
    text = text.replace(") -> (", ", %bias: tensor<256xf32>) -> (", 1)
    return text.replace("outs(%g0", "bias(%bias : tensor<256xf32>) outs(%g0").replace(
        "%i0 : tensor<?x8xf32>, tensor<?x8xi32>)",
        "%i0 : tensor<?x8xf32>, tensor<?x8xi32>) {score = #moe.score_function<sigmoid>, "
        "n_group = 8 : i64, topk_group = 4 : i64, eps = 1.0e-20 : f64, route_scale = 2.5 : f64}")


def router_text(width: int, experts: int, chosen: int, element: str) -> str:
    h, w = f"tensor<?x{width}x{element}>", f"tensor<{experts}x{width}x{element}>"
    z, g, i = f"tensor<?x{experts}xf32>", f"tensor<?x{chosen}xf32>", f"tensor<?x{chosen}xi32>"
    return f"""func.func @route(%h: {h}, %w: {w}) -> ({g}, {i}) {{
  %c0 = arith.constant 0 : index
  %n = tensor.dim %h, %c0 : {h}
  %z0 = tensor.empty(%n) : {z}
  %g0 = tensor.empty(%n) : {g}
  %i0 = tensor.empty(%n) : {i}
  %z = moe.router_logits ins(%h, %w : {h}, {w}) outs(%z0 : {z}) -> {z}
  %r:2 = moe.topk_renorm ins(%z : {z}) outs(%g0, %i0 : {g}, {i}) -> {g}, {i}
  return %r#0, %r#1 : {g}, {i}
}}"""


def attention(batch, heads, width, size, recorder):
    q, k, v = (randn(batch, heads, size, width, dtype=BF16) for _ in range(3))
    moe_mlir.attention(q, k, v, causal=False)


def attention_gradient(batch, heads, width, size, recorder):
    q, k, v = (randn(batch, heads, size, width, dtype=BF16).requires_grad_() for _ in range(3))
    out = moe_mlir.attention(q, k, v, causal=False)
    forget(recorder)
    out[0].sum().backward()


def similarity(batch, width, experts, size, recorder):
    u = randn(batch, size, width, dtype=BF16, scale=(8 / width) ** 0.5)
    moe_mlir.similarity_inform(u, randn(batch, size, experts, dtype=BF16).abs(), causal=False)


def similarity_gradient(batch, width, experts, size, recorder):
    u = randn(batch, size, width, dtype=BF16, scale=(8 / width) ** 0.5).requires_grad_()
    p = randn(batch, size, experts, dtype=BF16).abs().requires_grad_()
    out = moe_mlir.similarity_inform(u, p, causal=False)
    forget(recorder)
    (out[0] if isinstance(out, tuple) else out).float().sum().backward()


def grouped(experts, width, features, activation, size, recorder):
    """Sorted rows times the weights of their experts, each of which has as many."""
    offsets = torch.arange(experts + 1) * (size // experts)
    x, w = randn(size, width, dtype=BF16), randn(experts, features, width, dtype=BF16)
    grouped_linear(x, w, None, offsets, activation=activation)


def forget(recorder) -> None:
    """Only what follows counts."""
    recorder.launched.clear()
    recorder.buffers.clear()


def dispatch(experts, k, size, recorder):
    moe_mlir.dispatch(randint(experts, size, k), experts)


def topk_and_dispatch(experts, k, size, recorder):
    topk(experts, k, BF16, size, recorder)
    moe_mlir.dispatch(randint(experts, size, k, dtype=torch.int32), experts)


def slots(k, size):
    return torch.randperm(size * k).view(size, k)


def tokens_of_rows(k, size, recorder):
    token_rows(slots(k, size))


def combine(width, k, size, recorder):
    gates = randn(size, k)
    moe_mlir.combine(randn(size * k, width, dtype=BF16), gates, slots(k, size))


def attention_work(batch, heads, width, tokens, products=2):
    return 2.0 * products * batch * heads * tokens**2 * width


part = functools.partial
CALLS = (
    Call("topk_renorm 16384x128 k8 bf16", part(topk, 128, 8, BF16), 16384, (1024,)),
    Call("topk_renorm 8192x256 k8 bf16", part(topk, 256, 8, BF16), 8192, (1024,)),
    Call("grouped_topk 8192x256 sigmoid, bias, 4 of 8 groups, f32", grouped_choice, 8192, (1024,)),
    Call("adjacency_update 16384 k8 E64", part(adjacency, 64, 8), 16384),
    Call("mad_dispersion 16384x512 E64", part(mad, 512, 64), 16384),
    Call("router 32x7168 E256 k8 bf16", part(router, 7168, 256, 8), 32),
    Call("router 1x7168 -> 256 sigmoid, bias, 4 of 8 groups, bf16", deepseek_router, 1),
    Call("router 32x7168 -> 256 sigmoid, bias, 4 of 8 groups, bf16", deepseek_router, 32),
    Call("router 16384x7168 E256 k8 bf16", part(router, 7168, 256, 8), 16384, (512,)),
    Call("grouped_linear 8192x2048 to 1024 E8 bf16", part(grouped, 8, 2048, 1024, None), 8192,
         chip="sm_90a", operations=2 * 8192 * 2048 * 1024, working=256 / 296),
    Call("grouped_linear 16384x2048 to 1536 E16 swiglu bf16", part(grouped, 16, 2048, 1536, SWIGLU),
         16384, chip="sm_90a", operations=2 * 16384 * 2048 * 1536),
    Call("attention 4x16x4096x64 bf16", part(attention, 4, 16, 64), 4096, (256, 512),
         "sm_90a", attention_work(4, 16, 64, 4096)),
    Call("attention 4x16x4096x128 bf16", part(attention, 4, 16, 128), 4096, (256, 512),
         "sm_90a", attention_work(4, 16, 128, 4096)),
    Call("similarity_inform 48x512x352 E16 bf16", part(similarity, 48, 352, 16), 512, (256, 512),
         "sm_90a", 2 * 48 * 512**2 * (352 + 16)),
    Call("similarity_inform 8x4096x512 E32 bf16", part(similarity, 8, 512, 32), 4096, (256, 512),
         "sm_90a", 2 * 8 * 4096**2 * (512 + 32)),
    Call("gradient of attention 4x16x4096x128 bf16", part(attention_gradient, 4, 16, 128), 4096,
         (256, 512), "sm_90a", attention_work(4, 16, 128, 4096, 5)),
    Call("gradient of similarity_inform 8x4096x512 E32 bf16", part(similarity_gradient, 8, 512, 32),
         4096, (256, 512), "sm_90a", 2 * 8 * 4096**2 * (3 * 512 + 2 * 32)),
    Call("dispatch 64 k8 E256", part(dispatch, 256, 8), 64),
    Call("dispatch 8192 k8 E128", part(dispatch, 128, 8), 8192),
    Call("dispatch 16384 k8 E256", part(dispatch, 256, 8), 16384),
    Call("topk_renorm, dispatch 8192x128 k8 bf16", part(topk_and_dispatch, 128, 8), 8192),
    Call("token_rows 16384 k8", part(tokens_of_rows, 8), 16384),
    Call("combine 64x2048 k8 bf16", part(combine, 2048, 8), 64),
    Call("combine 2048x2048 k8 bf16", part(combine, 2048, 8), 2048),
)
