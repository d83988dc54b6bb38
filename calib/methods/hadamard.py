"""Randomized orthogonal matrices that spread every direction over all channels.

    Q = diag(signs) (F_1 x F_2 x ...)         x: the Kronecker product, signs +-1 from a seed

For x an outlier in one channel, x Q has magnitude |x| |Q_ij|: the flatter Q, the less is left of
the outlier. `flatness` is sqrt(n) max |Q_ij|: 1 for a Hadamard matrix (all entries +-1 / sqrt(n)),
which is the least possible, and sqrt(n) for the identity.

Hadamard matrices are known for far more sizes than powers of two. With q a prime,

    q = 3 mod 4     size q + 1       Paley I    (12, 20, 24, 44, 48, 60, 68, 72, 80, ...)
    q = 1 mod 4     size 2 (q + 1)   Paley II   (12, 28, 36, 60, 76, 84, ...)

and products of sizes. So 576 = 36 * 16, 896 = 28 * 32, 2560 = 20 * 128 and 3584 = 28 * 128 have one
although they are not powers of two. No Hadamard matrix exists for an odd size or twice an odd one:
there the odd factor gets the orthonormal DCT-II, of flatness at most sqrt(2); a block diagonal
matrix would leave outliers inside their blocks (flatness sqrt(size / block)).

Paley, "On orthogonal matrices", J. Math. Phys. 12 (1933). Everything is fp64.
"""

from dataclasses import dataclass
from math import isqrt, pi, sqrt

import torch

_CHUNK_ELEMENTS = 1 << 23
_LARGEST_SYLVESTER = 64  # a larger factor costs more to multiply by than its parts


@dataclass(frozen=True, kw_only=True, slots=True)
class OrthogonalMatrix:
    """Q (n, n), kept as `signs` (n,) and square `factors`, fp64 on the CPU."""

    signs: torch.Tensor
    factors: tuple[torch.Tensor, ...]

    @property
    def size(self) -> int:
        """n."""
        return self.signs.shape[0]

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x Q (M, n) fp32, computed in fp64, for `x` (M, n) of any float dtype."""
        out = torch.empty(x.shape, dtype=torch.float32)
        rows = max(1, _CHUNK_ELEMENTS // self.size)
        for start in range(0, x.shape[0], rows):
            out[start : start + rows] = self._times(x[start : start + rows].double())
        return out

    def dense(self) -> torch.Tensor:
        """Q (n, n) fp64."""
        return self._times(torch.eye(self.size, dtype=torch.float64))

    def _times(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.signs).view(x.shape[0], *(len(factor) for factor in self.factors))
        for axis, factor in enumerate(self.factors, start=1):
            y = torch.tensordot(y, factor, dims=([axis], [0])).movedim(-1, axis)
        return y.reshape(x.shape)


def random_orthogonal(size: int, generator: torch.Generator) -> OrthogonalMatrix:
    """A randomized Hadamard matrix of `size` if one can be built, else the flattest product."""
    if size < 1:
        raise ValueError(f"a rotation needs a positive size, got {size}")
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return OrthogonalMatrix(signs=signs, factors=tuple(_factors(size)))


def flatness(matrix: torch.Tensor) -> float:
    """sqrt(n) * max |Q_ij| of Q (n, n)."""
    return float(matrix.abs().max()) * sqrt(len(matrix))


def _factors(size: int) -> list[torch.Tensor]:
    """Orthogonal fp64 matrices whose Kronecker product has `size` rows."""
    parts, rest = [], size
    odd = size // (size & -size)
    if odd > 1:
        multiples = (odd << k for k in range(2, size.bit_length()))
        order = next((n for n in multiples if size % n == 0 and _paley_prime(n)), None)
        core = _dct(odd) if order is None else paley(order) / sqrt(order)
        parts, rest = [core], size // len(core)
    while rest > 1:
        part = min(rest, _LARGEST_SYLVESTER)
        parts.append(_sylvester(part) / sqrt(part))
        rest //= part
    return parts or [torch.ones(1, 1, dtype=torch.float64)]


def _paley_prime(order: int) -> tuple[int, bool] | None:
    """The prime behind a Paley matrix of `order`, and whether it is of type I; None if none is."""
    if order % 4:
        return None
    if _is_prime(order - 1):
        return order - 1, True
    half = order // 2 - 1
    return (half, False) if half % 4 == 1 and _is_prime(half) else None


def paley(order: int) -> torch.Tensor:
    """Hadamard matrix (order, order) of +-1, fp64. ValueError if Paley's constructions have none.

    With the quadratic character chi of the field of q elements and J_ij = chi(i - j), bordered by
    ones to a conference matrix C of size q + 1: H = 1 + C if C is skew (type I), and
    H = C x [[1, 1], [1, -1]] + 1 x [[1, -1], [-1, -1]] if C is symmetric (type II).
    """
    found = _paley_prime(order)
    if found is None:
        raise ValueError(f"no Paley construction of a Hadamard matrix of size {order}")
    q, skew = found
    squares = {i * i % q for i in range(1, q)}
    chi = torch.tensor(
        [0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)], dtype=torch.float64
    )
    index = torch.arange(q)
    C = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    C[0, 1:] = 1
    C[1:, 0] = -1 if skew else 1
    C[1:, 1:] = chi[(index[:, None] - index) % q]
    identity = torch.eye(q + 1, dtype=torch.float64)
    if skew:
        return identity + C
    core = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    corner = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(C, core) + torch.kron(identity, corner)


def _sylvester(size: int) -> torch.Tensor:
    """Hadamard matrix of +-1 of a `size` that is a power of two, fp64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    core = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, core)
    return matrix


def _dct(size: int) -> torch.Tensor:
    """Orthonormal DCT-II matrix (size, size), fp64."""
    k = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(pi / size * (k[:, None] + 0.5) * k) * sqrt(2 / size)
    matrix[:, 0] = 1 / sqrt(size)
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, isqrt(number) + 1))
