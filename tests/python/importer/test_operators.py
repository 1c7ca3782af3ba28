"""Each family of operators against eager torch: import, compile, run."""

import pytest
import torch
import torch.nn.functional as F

import moe_mlir
from moe_mlir.importer import ImportFailed
from moe_mlir.importer.registry import Arguments, Unsupported


class Function(torch.nn.Module):
    """A Python function with some weights, as a module."""

    def __init__(self, function, *weights):
        super().__init__()
        self.function = function
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(w, requires_grad=w.is_floating_point()) for w in weights)

    def forward(self, *inputs):
        return self.function(*inputs, *self.weights)


def check(function, inputs, *weights, later=None, rtol=1e-5, atol=1e-6):
    """Compiles at `inputs`; runs there and at `later`, inputs of other sizes."""
    model = Function(function, *weights).eval()
    compiled = moe_mlir.compile(model, inputs)
    for tensors in (inputs, later or inputs):
        with torch.no_grad():
            expected = model(*tensors)
        found = compiled(*tensors)
        flat = torch.utils._pytree.tree_leaves
        assert len(flat(found)) == len(flat(expected))
        for ours, eager in zip(flat(found), flat(expected)):
            torch.testing.assert_close(ours, eager, rtol=rtol, atol=atol, equal_nan=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tokens(batch=2, count=3, width=8):
    return torch.randn(batch, count, width)


def test_unary_arithmetic():
    def function(x):
        return (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), torch.relu(x), x.sigmoid(),
                x.tanh(), x.exp(), F.softplus(x), x.abs().sqrt(), -x, x.cos() * x.sin(),
                x.reciprocal(), torch.log1p(x.abs()), x.erf())
    check(function, (tokens(),), later=(tokens(1, 7),))


def test_binary_arithmetic_with_numbers_and_broadcasting():
    def function(x, w):
        return (x + w, x - w, x * w, x / w, 1 - x, x / 3, x // 0.3, x % 0.7, x ** 2, x ** 3,
                x ** 0.5, torch.maximum(x, w), x.clamp(-0.5, 0.5), x[:, :1] + w[0])
    check(function, (tokens().abs() + 0.1,), torch.randn(8), later=(tokens(1, 1).abs() + 0.1,))


def test_comparisons_and_selection():
    def function(x):
        positive = x > 0
        return (torch.where(positive & (x < 1), x, -x), x.masked_fill(~positive, -torch.inf),
                torch.where(x[:, :, :1] >= 0, 1.0, x), (x == x.amax(-1, keepdim=True)).float())
    check(function, (tokens(),), later=(tokens(5, 1),))


def test_conversions():
    def function(x):
        return (x.to(torch.float16), x.long(), x.double(), (x > 0).float(),
                x.double().to(torch.float32))
    check(function, (tokens() * 10,), rtol=0, atol=0)


def test_conversions_between_half_and_bfloat():
    def function(x):
        half, brain = x.to(torch.float16), x.to(torch.bfloat16)
        return half.to(torch.bfloat16), brain.to(torch.float16), half + brain
    check(function, (tokens() * 1e4,), rtol=0, atol=0)


def test_numbers_are_rounded_to_half_by_way_of_float32():
    """As torch does: a bit above a tie is lost on the way."""
    def function(x, count):
        return (x.to(torch.float16), x.to(torch.bfloat16), count.to(torch.bfloat16),
                count.to(torch.float16))
    ties = torch.tensor([1 + 2**-11, 1 + 2**-8, 1.0], dtype=torch.float64) + 2**-40
    counts = torch.tensor([2**33 + 2**25 + 1, 2**24 + 1, 12345])
    assert ties.half()[0] == 1 and counts.bfloat16()[0] == 2**33
    check(function, (ties.expand(5, 3), counts.expand(5, 3)), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_compute_in_float32(dtype):
    def function(x, weight):
        return F.linear(x, weight), x.exp() * x, x.sum(-1)
    check(function, (tokens().to(dtype),), torch.randn(5, 8).to(dtype), rtol=1e-2, atol=1e-2)


def test_reductions():
    def function(x):
        return (x.sum(), x.mean(1), x.amax(-1), x.argmax(-1), x.max(-1), x.var(-1),
                (x > 0).sum(1), x.cumsum(1), x.norm(dim=-1), x.norm(p=1, dim=1),
                x.amin((0, 2), keepdim=True))
    check(function, (tokens(),), later=(tokens(4, 2),))


def test_softmax_is_stable_for_large_and_masked_scores():
    def function(x):
        return (F.softmax(x * 1e4, -1), F.log_softmax(x * 100, 1),
                F.softmax(x.masked_fill(x < 0, -torch.inf), -1))
    check(function, (tokens(),), later=(tokens(1, 6),))


def test_norms():
    def function(x, weight, bias):
        rms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
        return F.layer_norm(x, (8,), weight, bias), rms
    check(function, (tokens() + 100,), torch.randn(8), torch.randn(8), rtol=1e-4, atol=1e-4)


def test_gathers():
    def function(i, table):
        return (F.embedding(i, table), table[i], table[:, i[0]], torch.gather(table, 1, i),
                table.index_select(1, i[0]), table[i, i])
    check(function, (torch.randint(0, 5, (6, 3)),), torch.randn(6, 5))


def test_negative_indices_count_from_the_end():
    check(lambda i, table: table[i], (torch.tensor([[-1, 0], [2, -6]]),), torch.randn(6, 5))


def test_slices_and_concatenation():
    def function(x):
        return (x[1:, ::2], x[:, -1], torch.cat([x, x * 2], 1), torch.stack([x, x]),
                x.repeat(2, 1, 1), F.pad(x, (1, 2)), x.split(3, -1), x.chunk(2, -1))
    check(function, (tokens(),), later=(tokens(3, 4),))


def test_concatenation_of_several_types():
    def function(x, i, flags):
        parts = (x, x.half() / 3, x.bfloat16() / 3, i, flags)
        return (torch.cat(parts, 1), torch.cat(parts[1:], -1), torch.cat((i, flags)),
                torch.cat((flags, i.int(), i.to(torch.uint8))), torch.cat((x.bfloat16(), x.half()[:0])),
                torch.cat((x.double(), i)), torch.stack((flags, ~flags)))
    numbers = torch.tensor([[0, 1, 200], [7, -1, 3]])
    check(function, (torch.randn(2, 3), numbers, numbers > 1),
          later=(torch.randn(5, 3), torch.arange(15).view(5, 3), torch.arange(15).view(5, 3) % 2 == 0))


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_slices_and_paddings_by_open_sizes(count):
    """Places that are negative; paddings that are crops for some sizes."""
    def function(x, y):
        n = x.shape[1]
        full = torch.cat((y, x), 1)
        return (full[:, -n:], full[:, :-n], full[:, -n - 2:-n],
                full[:, -n], F.pad(x, (0, 0, 6 - n, 1)), F.pad(x, (-2, 1, 1, -1)))
    check(function, (tokens(2, 3), tokens(2, 3)), later=(tokens(2, count), tokens(2, 3)))


def test_rolls():
    def function(x):
        return (x.roll(-1, -1), x.roll(11, 2), x.roll((1, -2), (2, 2)), x.roll(0, -1),
                x.roll((0, 8), (-1, -1)))
    check(function, (tokens(),), later=(tokens(1, 4),))


def test_views_and_permutations():
    def function(x):
        b, n, d = x.shape
        heads = x.view(b, n, 2, d // 2).transpose(1, 2)
        return (x.reshape(-1, d), heads.reshape(b * 2, n, -1), x.flatten(1),
                x.permute(2, 0, 1).contiguous(), x.transpose(0, 1).reshape(-1, d),
                x.unsqueeze(1).expand(-1, 3, -1, -1))
    check(function, (tokens(),), later=(tokens(1, 5),))


def test_new_tensors():
    def function(x):
        n = x.shape[1]
        return (torch.arange(n), torch.zeros_like(x), torch.full((n,), 2.5), x.new_ones(3),
                F.one_hot(x.argmax(-1), 8))
    check(function, (tokens(),), later=(tokens(1, 9),))


def test_contractions():
    def function(x, weight, bias):
        return (F.linear(x, weight, bias), x @ weight.t(), x @ x.transpose(-1, -2),
                torch.einsum("bnd,ed->bne", x, weight), x[0] @ x[0].t(),
                torch.bmm(x, x.transpose(1, 2)))
    check(function, (tokens(),), torch.randn(4, 8), torch.randn(4), later=(tokens(1, 5),))


def test_causal_attention():
    def function(q):
        n = q.shape[-2]
        hidden = torch.arange(n)[None, :] > torch.arange(n)[:, None]
        scores = (q @ q.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ q, F.scaled_dot_product_attention(q, q, q, is_causal=True)
    check(function, (torch.randn(2, 3, 6, 4),), later=(torch.randn(1, 3, 1, 4),))


def mixes(function, *inputs):
    """How many attentions hold no matrix of tokens by tokens once imported."""
    return moe_mlir.export(Function(function), inputs).text.count("moe.softmax_mix")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_one_pass(dtype):
    def function(q):
        heads = F.scaled_dot_product_attention(q, q[:, :, :3], 2 * q[:, :, :3], scale=0.3)
        return heads, F.scaled_dot_product_attention(q, q, q, is_causal=True)

    inputs, later = ((torch.randn(*s, 4).to(dtype),) for s in ((2, 3, 6), (1, 3, 70)))
    near = 1e-5 if dtype == torch.float32 else 2e-2
    check(function, inputs, later=later, rtol=near, atol=near)
    assert mixes(function, *inputs) == 2


def test_attention_with_masks():
    """Torch gives 0 to a query that sees no key, and so does our op."""
    def function(q, pairs, keys):
        bias = q[..., :1] - q[..., 1:2].mT
        masks = [pairs[:, None], pairs[0], keys[:, None, None], bias, bias[0, 0], bias[:, :1]]
        return [F.scaled_dot_product_attention(q, q, q, attn_mask=mask) for mask in masks]

    def inputs(batch, n):
        pairs = torch.rand(batch, n, n) > 0.5
        pairs[:, -1] = False
        return torch.randn(batch, 3, n, 4), pairs, torch.rand(batch, n) > 0.3

    check(function, inputs(2, 6), later=inputs(3, 40))
    assert mixes(function, *inputs(2, 6)) == 6


def test_attention_that_the_op_has_not_is_decomposed():
    def function(q, wide):
        grouped = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True)
        shorter = F.scaled_dot_product_attention(q[:, :, :2], q, q, is_causal=True)
        flat = F.scaled_dot_product_attention(q[0], q[0], q[0])
        return grouped, shorter, flat, F.scaled_dot_product_attention(wide, wide, wide)

    inputs = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4).double()
    check(function, inputs)
    assert mixes(function, *inputs) == 0


def test_buffers_that_a_model_updates_are_written_back():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(8))

        def forward(self, x):
            self.total.add_(x.sum((0, 1)))
            return x * 2

    model, x = Counter(), tokens()
    compiled = moe_mlir.compile(model, (x,))
    compiled(x)
    compiled(x)
    torch.testing.assert_close(model.total, 2 * x.sum((0, 1)))


def test_rotary_pairs_as_complex_numbers():
    def function(x, angle):
        turn = torch.polar(torch.ones_like(angle), angle) * 0.5
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs[:, 1:] * turn[None, 1:]).flatten(2)
    check(function, (tokens(), torch.randn(3, 4)), later=(tokens(5, 4), torch.randn(4, 4)))


def test_complex_numbers_that_are_no_rotations_are_told():
    def function(x):
        return torch.view_as_complex(x.reshape(-1, 2)).abs()
    with pytest.raises(ValueError, match=r"aten.abs.default: complex numbers: 1 use, first at "
                                         r".*test_operators.py:\d+"):
        moe_mlir.export(Function(function), (tokens(),))


def test_writing_into_slices():
    def function(x):
        y = x.clone()
        y[..., 0::2] = x[..., 1::2]
        y[:, 1:] = x[:, :1].to(torch.bfloat16)
        return y
    check(function, (tokens(),), later=(tokens(1, 5),))


def test_an_empty_slice_behind_the_end():
    def function(x):
        y = x[..., :1].clone()
        y[..., 2:9:3] = x[..., 8:] * 3
        return torch.cat([x[..., :8] * 2, x[..., 8:]], dim=-1), y
    check(function, (tokens(),), later=(tokens(1, 5),))


def test_whole_quotients_are_those_of_the_numbers_themselves():
    """1 / 0.1 rounds to 10, and the largest whole number of tenths in 1 is 9."""
    def function(x):
        return x // 0.1, x % 0.1, torch.div(x, -0.1, rounding_mode="floor"), x % -0.1
    check(function, (torch.tensor([1.0, 0.5, 0.3, -0.3, 7.0, 0.05]),), rtol=0, atol=0)


def test_arguments_that_decide_about_places():
    def function(x):
        return (x[-100:], x[:, -3:], torch.arange(0.5, 4.0, 0.75), (x > 0).amax(-1),
                (x > 0).amin(-1), torch.arange(2, 9, 3))
    check(function, (tokens(),), later=(tokens(5, 2),))


@pytest.mark.parametrize("function", [
    lambda x: x.sum(-1, dtype=torch.bfloat16), lambda x: x.mean(-1, dtype=torch.bfloat16),
    lambda x: x.half().sum(-1, dtype=torch.bfloat16)])
def test_a_type_that_rounds_the_operand_first_is_told(function):
    with pytest.raises(ImportFailed, match="would be rounded first"):
        moe_mlir.export(Function(function), (tokens(),))


def test_an_argument_that_is_not_read_is_told():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.add.Tensor, (x, x), {"alpha": 2})
    arguments = Arguments(node)
    assert arguments.self is x and arguments.other is x
    with pytest.raises(Unsupported, match="argument 'alpha' = 2"):
        arguments.check_read()
    assert arguments.alpha == 2
    arguments.check_read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_a_layer_norm_have_the_dtype_of_eager(dtype):
    check(lambda x: torch.native_layer_norm(x, [8], x[0, 0], None, 1e-5), (tokens().to(dtype),), rtol=1e-2, atol=1e-2)
