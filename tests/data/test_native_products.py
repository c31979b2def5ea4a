"""Products with packed weights, for every instruction set, against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.config import Quantization
from charonia.data.ops.quantize import group_bounds, quantize_int8, quantize_rows, w8a8_linear
from support.kernels import ISAS, TOLERANCE, both_dtypes, kernels_for, matrix_of, native_ops
from support.weights import QUANTIZATIONS, random_matrix

pytestmark = pytest.mark.parametrize("isa", ISAS)
in_8_bits = pytest.mark.parametrize("quantization", ["int8", "w8a8"])


@both_dtypes
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 60) | st.sampled_from([191, 192, 193, 400]),
    inputs=st.integers(1, 70).map(lambda half: 2 * half) | st.sampled_from([600, 1026, 2100]),
    outputs=st.integers(1, 100),
    has_bias=st.booleans(),
    quantization=st.sampled_from(QUANTIZATIONS),
    as_float32=st.booleans(),
)
def test_a_product_of_any_size_equals_torch(
    isa: str,
    dtype: torch.dtype,
    seed: int,
    rows: int,
    inputs: int,
    outputs: int,
    has_bias: bool,
    quantization: Quantization | None,
    as_float32: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight, bias = vars(random_matrix(generator, outputs, inputs, has_bias, dtype)).values()
    wide = weight.double()
    if quantization is not None:
        whole, steps = quantize_int8(weight)
        wide = whole.double() * steps.double()[:, None]
    rows_of_x = x.double()
    if quantization == "w8a8":
        numbers, steps = quantize_rows(x)
        sizes = torch.tensor(group_bounds(inputs)).diff()
        rows_of_x = numbers.double() * steps.double().repeat_interleave(sizes, dim=1)
    expected = rows_of_x @ wide.T + (0 if bias is None else bias.double())
    actual = matrix_of(isa, weight, bias, quantization)(x, as_float32)
    assert actual.dtype == (torch.float32 if as_float32 else dtype)
    # In float32 nothing is rounded but the sum itself, whatever the inputs are.
    tolerance = 2e-5 if as_float32 else TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@both_dtypes
@in_8_bits
@pytest.mark.parametrize("inputs", [2, 30, 32, 34, 64, 96, 600])
def test_all_whole_numbers_of_int8_are_exact(
    isa: str, dtype: torch.dtype, quantization: Quantization, inputs: int
) -> None:
    """Every output holds the largest one, so that a step is 1, at another place."""
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randint(-127, 128, (300, inputs), generator=generator).to(dtype)
    weight[torch.arange(300), torch.arange(300) % inputs] = 127.0
    assert inputs < 30 or weight.unique().numel() == 255
    rows = 127 * torch.eye(inputs, dtype=dtype)  # so that a step of these is 1, too
    product = matrix_of(isa, weight, None, quantization)(rows, True)
    assert torch.equal(product.T, 127 * weight.float())


@in_8_bits
def test_the_largest_weight_of_an_output_and_its_opposite_are_exact_in_int8(
    isa: str, quantization: Quantization
) -> None:
    weight = torch.tensor([[0.5, -0.5, 0.0, 0.25], [0.0, 0.0, 0.0, 0.0], [-3e-5, 0, 3e-5, 0]])
    product = matrix_of(isa, weight, None, quantization)(torch.eye(4), False)
    assert product[:, 1].tolist() == [0.0] * 4
    assert product[:3, 0].tolist() == pytest.approx([0.5, -0.5, 0.0], rel=1e-6)
    assert product[3, 0].item() == pytest.approx(64 / 127 / 2, rel=1e-6)  # 63.5 is rounded to even
    assert product[:, 2].tolist() == pytest.approx([-3e-5, 0.0, 3e-5, 0.0], rel=1e-6)


@both_dtypes
@in_8_bits
def test_an_output_with_a_weight_that_is_not_finite_is_nan_and_the_others_are_not(
    isa: str, dtype: torch.dtype, quantization: Quantization
) -> None:
    """As whole numbers such weights would be zeros, and nobody would notice."""
    weight, rows = torch.randn(70, 96).to(dtype), torch.randn(3, 96).to(dtype)
    expected = matrix_of(isa, weight, None, quantization)(rows, True)
    weight[0, 0], weight[1, 95], weight[2, 40] = torch.nan, torch.inf, -torch.inf
    actual = matrix_of(isa, weight, None, quantization)(rows, True)
    assert actual[:, :3].isnan().all()
    assert torch.equal(actual[:, 3:], expected[:, 3:])


@both_dtypes
@pytest.mark.parametrize("inputs", [48, 1026, 2100])
def test_rows_are_rounded_group_by_group_and_sums_added_up_in_order(
    isa: str, dtype: torch.dtype, inputs: int
) -> None:
    """Halves of a step are rounded to even, and one huge number spoils its own group alone."""
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(70, inputs, generator=generator).to(dtype)
    rows = torch.randn(40, inputs, generator=generator).to(dtype)
    rows[:, 1], rows[:, 2] = rows.abs().amax(1), rows.abs().amax(1) / 2
    rows[3], rows[5, 7] = 0, 1e4
    second = group_bounds(inputs)[1]
    weight[:30, :second] = 0
    actual = matrix_of(isa, weight, None, "w8a8")(rows, True)
    expected = w8a8_linear(weight, None)(rows.float())
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(actual[3], torch.zeros(70))
    exact = (rows.double() @ weight.double().T)[:, :30]
    error = (actual[:, :30] - exact).abs()
    assert error.max() < 0.05 * max(1.0, exact.abs().max().item())


@both_dtypes
@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_a_row_is_multiplied_as_it_is_alone(
    isa: str, dtype: torch.dtype, quantization: Quantization | None
) -> None:
    """Three groups of inputs, all heights of tiles, and more rows than are multiplied at once."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = vars(random_matrix(generator, 70, 2100, True, dtype)).values()
    x = torch.randn(1100, 2100, generator=generator).to(dtype)
    matrix = matrix_of(isa, weight, bias, quantization)
    alone = torch.cat([matrix(row[None], True) for row in x])
    for num_threads in (1, 2, 3):
        native_ops(isa, num_threads)  # sets the threads of the kernels
        for rows in (1, 2, 4, 5, 6, 7, 11, 12, 13, 16, 17, 32, 33, 49, 193, 400, 769, 1100):
            assert torch.equal(matrix(x[:rows], True), alone[:rows])


@both_dtypes
def test_long_rows_are_multiplied_by_many_panels_as_by_each(isa: str, dtype: torch.dtype) -> None:
    """More panels than take turns with a block of inputs, and some."""
    generator = torch.Generator().manual_seed(0)
    weight = random_matrix(generator, 1210, 2100, False, dtype).weight
    x = torch.randn(500, 2100, generator=generator).to(dtype)
    matrix = matrix_of(isa, weight, None, None)
    alone = torch.cat([matrix(row[None], True) for row in x])
    for num_threads in (1, 2, 3):
        native_ops(isa, num_threads)  # sets the threads of the kernels
        for rows in (33, 65, 128, 385, 500):
            assert torch.equal(matrix(x[:rows], True), alone[:rows])


@both_dtypes
def test_rows_of_what_is_no_number_stay_alone_and_give_none(isa: str, dtype: torch.dtype) -> None:
    rows = torch.ones(4, 600, dtype=dtype)
    rows[1, 300], rows[2, 599] = float("nan"), float("inf")
    product = matrix_of(isa, torch.ones(3, 600, dtype=dtype), None, "w8a8")(rows, True)
    assert not product[1:3].isfinite().any()
    assert torch.equal(product[0], product[3])
    torch.testing.assert_close(product[0], torch.full((3,), 600.0), atol=1e-3, rtol=1e-5)


def test_a_matrix_with_an_odd_number_of_inputs_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="odd number of inputs"):
        kernels_for(isa).Matrix(torch.zeros(4, 3), None)


def test_another_dtype_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match=r"float32 and bfloat16, not .*Half"):
        kernels_for(isa).Matrix(torch.zeros(4, 2, dtype=torch.float16), None)
