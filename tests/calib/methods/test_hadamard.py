import pytest
import torch

from compress.calib.methods.hadamard import flatness, paley, random_orthogonal

HADAMARD_SIZES = [1, 2, 4, 8, 64, 128, 512, 12, 36, 60, 96, 576, 896]
HIDDEN_SIZES = [960, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 5120, 5376, 6656, 8192]


def build(size: int, seed: int = 0) -> torch.Tensor:
    return random_orthogonal(size, torch.Generator().manual_seed(seed)).dense()


@pytest.mark.parametrize("size", [*HADAMARD_SIZES, 3, 6, 9, 17, 18, 33, 130, 333])
def test_random_orthogonal_is_orthogonal(size: int) -> None:
    Q = build(size)
    torch.testing.assert_close(Q @ Q.T, torch.eye(size, dtype=Q.dtype), atol=1e-13, rtol=0)


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_random_orthogonal_is_flat_where_a_hadamard_matrix_is_known(size: int) -> None:
    assert flatness(build(size)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("size", HIDDEN_SIZES)
def test_factors_are_flat_for_the_hidden_sizes_of_common_models(size: int) -> None:
    factors = random_orthogonal(size, torch.Generator()).factors
    assert torch.Size(len(factor) for factor in factors).numel() == size
    for factor in factors:
        assert flatness(factor) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("size", [3, 9, 18, 33, 130, 333])
def test_random_orthogonal_is_nearly_flat_elsewhere(size: int) -> None:
    assert 1 < flatness(build(size)) <= 2**0.5 + 1e-12


@pytest.mark.parametrize("order", [4, 8, 12, 20, 24, 28, 36, 44, 60, 76, 84, 108, 180])
def test_paley_gives_hadamard_matrices(order: int) -> None:
    H = paley(order)
    assert set(H.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(H @ H.T, order * torch.eye(order, dtype=H.dtype))


@pytest.mark.parametrize("order", [6, 10, 52, 92])
def test_paley_names_an_order_that_it_cannot_build(order: int) -> None:
    with pytest.raises(ValueError, match=f"size {order}"):
        paley(order)


@pytest.mark.parametrize("size", [12, 33, 576])
def test_of_rows_is_the_product_with_the_dense_matrix(size: int) -> None:
    matrix = random_orthogonal(size, torch.Generator().manual_seed(3))
    x = torch.randn(7, size, generator=torch.Generator().manual_seed(4))
    expected = (x.double() @ matrix.dense()).float()
    torch.testing.assert_close(matrix.of_rows(x), expected)
    torch.testing.assert_close(matrix.of_rows(x.bfloat16()), matrix.of_rows(x.bfloat16().float()))
    transposed = x.T.contiguous().T
    assert torch.equal(matrix.of_rows(transposed), matrix.of_rows(x))


def test_of_rows_of_many_rows_goes_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_orthogonal(12, torch.Generator().manual_seed(3))
    x = torch.randn(17, 12)
    expected = matrix.of_rows(x)
    monkeypatch.setattr("compress.calib.methods.hadamard._CHUNK_ELEMENTS", 40)
    torch.testing.assert_close(matrix.of_rows(x), expected)


def test_signs_follow_the_seed() -> None:
    assert torch.equal(build(12, 1), build(12, 1))
    assert not torch.equal(build(12, 1), build(12, 2))


def test_random_orthogonal_needs_a_positive_size() -> None:
    with pytest.raises(ValueError, match="got 0"):
        random_orthogonal(0, torch.Generator())
