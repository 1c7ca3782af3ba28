"""mad_dispersion and adjacency_update as kernels, executed in the PTX simulator."""

import numpy as np
import pytest
import torch
from gpu_kernels import compile_function, shaped

sim = pytest.importorskip("moe_mlir.sim")

LAUNCHES = [{"seed": 1}, {"seed": 2}, {"seed": 3, "policy": 1}]


def launch(function, inputs, outs):
    """Launches under every seed and policy; the results must not depend on them."""
    results = []
    for options in LAUNCHES:
        for out in outs:
            out.fill_(77)
        for report in function(*inputs, *outs, **options):
            assert not report.findings, report.findings[:3]
        results.append([out.clone() for out in outs])
    for other in results[1:]:
        for expected, found in zip(results[0], other):
            assert torch.equal(expected, found)
    return results[0]


# ---- mad_dispersion -------------------------------------------------------------


def dispersion_text(d, e, dtype, index_dtype, measure, mask):
    h = shaped("tensor", (None, d), dtype)
    assign = shaped("tensor", (None,), index_dtype)
    parameter = ", %mask: tensor<?xi1>" if mask else ""
    clause = " mask(%mask : tensor<?xi1>)" if mask else ""
    outs = f"tensor<{e}x{d}xf32>, tensor<{e}x{d}xf32>, tensor<{e}xi32>"
    return f"""
func.func @disperse(%h: {h}, %assign: {assign}{parameter}) -> ({outs}) {{
  %s = tensor.empty() : tensor<{e}x{d}xf32>
  %m = tensor.empty() : tensor<{e}x{d}xf32>
  %c = tensor.empty() : tensor<{e}xi32>
  %r:3 = moe.mad_dispersion ins(%h, %assign : {h}, {assign}){clause}
      outs(%s, %m, %c : {outs}) {{measure = #moe.dispersion_measure<{measure}>}}
      -> {outs}
  return %r#0, %r#1, %r#2 : {outs}
}}"""


def dispersion_reference(h, assign, e, measure):
    """One cluster at a time, in float64."""
    s, mean, count = np.zeros((e, h.shape[1])), np.zeros((e, h.shape[1])), np.zeros(e)
    for cluster in range(e):
        rows = h[assign == cluster]
        count[cluster] = len(rows)
        if not len(rows):
            continue
        mean[cluster] = rows.mean(axis=0)
        if measure == "pairwise":
            pairs = np.abs(rows[:, None] - rows[None]).sum(axis=(0, 1))
            s[cluster] = pairs / len(rows) ** 2
        else:
            deviation = np.abs(rows - mean[cluster])
            s[cluster] = (
                deviation if measure == "mad" else deviation**2
            ).mean(axis=0)
    return s, mean, count


def check_dispersion(
    n, d, e, *, dtype=torch.float32, index_dtype=torch.int32, measure="mad", mask=False,
    chip="sm_90", launches=None,
):
    generator = torch.Generator().manual_seed(n + d + e)
    h = torch.randn(n, d, generator=generator).to(dtype)
    assign = torch.randint(-1, e + 1, (n,), generator=generator).to(index_dtype)
    inputs, real = [h, assign], assign.long().numpy()
    if mask:
        token_mask = torch.rand(n, generator=generator) > 0.3
        h[~token_mask] = float("nan")  # E11
        inputs.append(token_mask)
        real = np.where(token_mask.numpy(), real, -1)
    function = compile_function(
        dispersion_text(d, e, dtype, index_dtype, measure, mask), chip
    )
    outs = [torch.empty(e, d), torch.empty(e, d), torch.empty(e, dtype=torch.int32)]
    if launches is not None:
        assert len(function(*inputs, *outs)) == launches
    s, mean, count = launch(function, inputs, outs)
    expected = dispersion_reference(h.double().numpy(), real, e, measure)
    assert (count.numpy() == expected[2]).all()
    np.testing.assert_allclose(mean.double().numpy(), expected[1], rtol=0, atol=2e-6)
    np.testing.assert_allclose(s.double().numpy(), expected[0], rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("n", [0, 1, 65, 700])
def test_dispersion_of_any_number_of_tokens(n):
    check_dispersion(n, 40, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_dispersion_of_element_types(dtype, index_dtype):
    check_dispersion(150, 130, 8, dtype=dtype, index_dtype=index_dtype)


def test_dispersion_of_more_clusters_than_a_range():
    check_dispersion(300, 24, 130)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_dispersion_of_more_tokens_than_a_part(index_dtype):
    """Clusters of blocks that each leave a table: 8 blocks take 256 tokens each."""
    check_dispersion(2500, 24, 3, index_dtype=index_dtype, mask=True, launches=4)


def test_dispersion_of_as_many_tokens_as_a_part():
    check_dispersion(2048, 24, 3, launches=1)


@pytest.mark.parametrize("e", [1, 64])
def test_all_tokens_in_few_clusters(e):
    check_dispersion(257, 33, e, mask=True)


@pytest.mark.parametrize("n", [50, 1100])
@pytest.mark.parametrize("chip", ["sm_80", "sm_120"])
def test_dispersion_on_other_chips(chip, n):
    """Without clusters of blocks each block is a part."""
    check_dispersion(n, 40, 5, chip=chip)


@pytest.mark.parametrize("measure", ["variance", "pairwise"])
def test_dispersion_measures(measure):
    check_dispersion(90, 12, 4, measure=measure)


@pytest.mark.parametrize("measure", ["mad", "pairwise"])
def test_masked_tokens_are_in_no_cluster(measure):
    check_dispersion(90, 12, 4, measure=measure, mask=True)


# ---- adjacency_update -----------------------------------------------------------


def adjacency_text(e, k, index_dtype, norm, diagonal, mask):
    a, indices = f"tensor<{e}x{e}xf32>", shaped("tensor", (None, k), index_dtype)
    parameter = ", %mask: tensor<?xi1>" if mask else ""
    clause = " mask(%mask : tensor<?xi1>)" if mask else ""
    return f"""
func.func @update(%a: {a}, %indices: {indices}{parameter}) -> {a} {{
  %init = tensor.empty() : {a}
  %new = moe.adjacency_update ins(%a, %indices : {a}, {indices}){clause}
      outs(%init : {a})
      {{beta = 0.75 : f64, norm = #moe.adjacency_norm<{norm}>,
       diagonal = {str(diagonal).lower()}}} -> {a}
  return %new : {a}
}}"""


def adjacency_reference(a, indices, mask, norm, diagonal):
    e = len(a)
    counts, selected = np.zeros((e, e)), False
    for n, row in enumerate(indices):
        chosen = sorted({i for i in row if 0 <= i < e})
        if mask is not None and not mask[n]:
            continue
        selected |= bool(chosen)
        for i in chosen:
            for j in chosen:
                counts[i, j] += diagonal or i != j
    if not selected:
        return a
    divisor = {
        "row": counts.sum(axis=1, keepdims=True),
        "col": counts.sum(axis=0, keepdims=True),
        "eq7": np.diag(counts)[None],
    }[norm]
    share = np.divide(
        counts, divisor, out=np.zeros_like(counts), where=np.broadcast_to(divisor, counts.shape) != 0
    )
    return 0.75 * a + 0.25 * share


def check_adjacency(
    n, e, k, *, index_dtype=torch.int32, norm="row", diagonal=True, mask=False, chip="sm_90",
    is_static=True, launches=None,
):
    generator = torch.Generator().manual_seed(n + e + k)
    a = torch.rand(e, e, generator=generator)
    # Out of range and repeated indices select nothing further.
    indices = torch.randint(-1, e + 1, (n, k), generator=generator).to(index_dtype)
    inputs, token_mask = [a, indices], None
    if mask:
        token_mask = torch.rand(n, generator=generator) > 0.4
        inputs.append(token_mask)
    text = adjacency_text(e, k if is_static else None, index_dtype, norm, diagonal, mask)
    function = compile_function(text, chip)
    if launches is not None:
        assert len(function(*inputs, torch.empty(e, e))) == launches
    (new,) = launch(function, inputs, [torch.empty(e, e)])
    expected = adjacency_reference(
        a.double().numpy(), indices.numpy(), token_mask, norm, diagonal
    )
    np.testing.assert_allclose(new.double().numpy(), expected, rtol=0, atol=2e-7)
    return new


@pytest.mark.parametrize("n", [0, 1, 33, 500])
def test_adjacency_of_any_number_of_tokens(n):
    check_adjacency(n, 16, 2)


@pytest.mark.parametrize("norm", ["row", "col", "eq7"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_adjacency_norms(norm, index_dtype):
    check_adjacency(100, 12, 3, norm=norm, index_dtype=index_dtype)


@pytest.mark.parametrize("e, k", [(1, 1), (16, 8), (40, 33)])
def test_adjacency_of_any_number_of_choices(e, k):
    check_adjacency(70, e, k)


def test_adjacency_without_diagonal():
    check_adjacency(60, 9, 4, diagonal=False)


def test_adjacency_skips_masked_tokens():
    check_adjacency(80, 10, 2, mask=True)


def test_a_graph_that_fits_no_block_is_counted_in_place():
    check_adjacency(150, 160, 4)


@pytest.mark.parametrize("n, e, k, launches", [(70, 6, 0, 1), (70, 40, 33, 1), (600, 6, 2, 2)])
def test_adjacency_of_choices_of_unknown_number(n, e, k, launches):
    """As a program has it that is exported with k as an input's size."""
    check_adjacency(n, e, k, index_dtype=torch.int64, is_static=False, launches=launches)


@pytest.mark.parametrize("norm", ["row", "col", "eq7"])
def test_a_line_of_a_graph_that_a_warp_does_not_read_at_once(norm):
    check_adjacency(90, 290, 3, norm=norm)


@pytest.mark.parametrize("n, launches", [(503, 1), (504, 2), (4000, 2)])
@pytest.mark.parametrize("norm", ["row", "col", "eq7"])
def test_adjacency_of_more_tokens_than_a_part(norm, n, launches):
    """Clusters of blocks that each leave their counts: 4 blocks take 126 tokens each."""
    check_adjacency(n, 5, 1, norm=norm, launches=launches)


def test_adjacency_of_more_tokens_than_clusters_count_at_once():
    """64 clusters take several tiles a block; the others have no part."""
    check_adjacency(64 * 504 + 700, 3, 1)


def test_adjacency_with_bits_of_any_seed_and_chip():
    results = [check_adjacency(1300, 20, 6, chip=chip) for chip in ("sm_80", "sm_90", "sm_120")]
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("n", [20, 900])
@pytest.mark.parametrize("chip", ["sm_80", "sm_120"])
def test_adjacency_on_other_chips(chip, n):
    """Without clusters of blocks each block is a part."""
    check_adjacency(n, 8, 3, chip=chip)
