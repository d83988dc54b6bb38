"""Running statistics of the inputs of Linears.

Legend: N tokens seen, I in_features. A row x (I,) is the input of the Linear for one token.

  second_moment   (I, I) fp32   sum of x x^T: the Hessian of the layer-wise squared error, up to a
                                factor (GPTQ, arXiv 2210.17323, eq. 3)
  mean_square     (I,)   fp32   its diagonal divided by N: how much an error in a column matters
  mean_abs        (I,)   fp32   mean of |x|: how large a channel usually is (AWQ, arXiv 2306.00978)
  absmax          (I,)   fp32   largest |x|: the outliers (SmoothQuant, arXiv 2211.10438)
  cross_moment    (I, I) fp32   sum of (x~ - x) x^T, x~ the input of the same token in the float
                                model (GPTAQ, arXiv 2504.02692)
  sample          (S, I)        some tokens of every batch, for measuring errors

Products are accumulated in fp32 whatever the dtype of the inputs: a second moment summed in bf16 is
not positive definite. Only blocks on and above the diagonal are multiplied, the rest is mirrored.
A diagonal alone is summed in fp64, so that no order of the batches changes its fp32 value.
"""

from dataclasses import dataclass, field

import torch

from compress.distributed import Ranks

_PANEL = 384  # columns per panel of the symmetric product: fewer flops below, longer products above
SAMPLE_TOKENS = 512  # enough for an error to two digits; the report should not cost seconds


@dataclass(slots=True)
class InputStatistics:
    """Accumulates over batches; `full` keeps the whole second moment, else only its diagonal.

    `magnitudes` adds mean_abs and absmax, `cross` the cross moment; both cost time.
    """

    in_features: int
    full: bool
    tokens_per_batch: int
    device: torch.device
    magnitudes: bool = True
    cross: bool = False
    num_tokens: int = 0
    _moment: torch.Tensor = field(init=False)
    _sum_abs: torch.Tensor = field(init=False)
    _absmax: torch.Tensor = field(init=False)
    _cross: torch.Tensor = field(init=False)
    _sample: list[torch.Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        shape = (self.in_features,) * (2 if self.full else 1)
        dtype = torch.float32 if self.full else torch.float64
        self._moment = torch.zeros(shape, dtype=dtype, device=self.device)
        self._sum_abs = torch.zeros(self.in_features, dtype=torch.float64, device=self.device)
        self._absmax = torch.zeros(self.in_features, dtype=torch.float32, device=self.device)
        square = (self.in_features if self.cross else 0,) * 2
        self._cross = torch.zeros(square, dtype=torch.float32, device=self.device)

    def add(self, inputs: torch.Tensor, float_inputs: torch.Tensor | None = None) -> None:
        """Count `inputs` (..., I), any float dtype. Raises ValueError if one is not finite.

        `float_inputs`, of the same shape, is what the float model has there; needed for `cross`.
        """
        rows = inputs.reshape(-1, self.in_features)
        chosen = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(0))
        self._sample.append(rows[chosen[: self.tokens_per_batch].to(rows.device)])
        rows = rows.float()
        if self.full:
            _add_outer_products(self._moment, rows)
            checked = self._moment.diagonal()
        else:
            checked = self._moment.add_(rows.square().sum(0, dtype=torch.float64))
        if not torch.isfinite(checked).all():
            column = int((~torch.isfinite(checked)).nonzero()[0])
            raise ValueError(f"calibration input is not finite in column {column}")
        if self.magnitudes:
            magnitudes = rows.abs()
            self._sum_abs += magnitudes.sum(0, dtype=torch.float64)
            torch.maximum(self._absmax, magnitudes.amax(0), out=self._absmax)
        if self.cross:
            assert float_inputs is not None, "the cross moment needs the inputs of the float model"
            ahead = float_inputs.reshape(-1, self.in_features).float().sub_(rows)
            self._cross.addmm_(ahead.T, rows)
        self.num_tokens += rows.shape[0]

    def divide(self, scale: torch.Tensor) -> None:
        """Make these the statistics of x / scale, in place; `scale` (I,) fp32, positive."""
        self._moment /= scale if self.full else scale.square()
        if self.full:
            self._moment /= scale[:, None]
        if self.cross:
            self._cross.div_(scale).div_(scale[:, None])
        self._sum_abs /= scale
        self._absmax /= scale
        self._sample = [(rows.float() / scale).to(rows.dtype) for rows in self._sample]

    def reduce(self, ranks: Ranks) -> None:
        """Make these the statistics of what all `ranks` have seen, in place."""
        if ranks.size == 1:
            return
        count = torch.tensor([self.num_tokens], dtype=torch.float64, device=self.device)
        for total in (count, self._moment, self._sum_abs, self._cross):
            ranks.add(total)
        ranks.maximum(self._absmax)
        self.num_tokens = int(count)
        self._sample = [ranks.concat(self.sample)]

    @property
    def second_moment(self) -> torch.Tensor:
        """(I, I) fp32, symmetric, a fresh copy. Only for statistics made with `full`."""
        assert self.full, "these statistics hold only the diagonal"
        upper = torch.triu(self._moment)
        return upper + torch.triu(upper, 1).T

    @property
    def mean_square(self) -> torch.Tensor:
        """(I,) fp32."""
        diagonal = self._moment.diagonal() if self.full else self._moment
        return (diagonal / max(self.num_tokens, 1)).float()

    @property
    def mean_abs(self) -> torch.Tensor:
        """(I,) fp32, a fresh copy. Only for statistics made with `magnitudes`."""
        assert self.magnitudes, "these statistics hold no magnitudes"
        return (self._sum_abs / max(self.num_tokens, 1)).float()

    @property
    def absmax(self) -> torch.Tensor:
        """(I,) fp32, a fresh copy. Only for statistics made with `magnitudes`."""
        assert self.magnitudes, "these statistics hold no magnitudes"
        return self._absmax.clone()

    @property
    def cross_moment(self) -> torch.Tensor:
        """(I, I) fp32. Only for statistics made with `cross`."""
        assert self.cross, "these statistics hold no cross moment"
        return self._cross

    @property
    def sample(self) -> torch.Tensor:
        """(S, I) in the dtype of the inputs."""
        return torch.cat(self._sample)


def _add_outer_products(moment: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows^T rows to the panels of `moment` (I, I) on and above its diagonal."""
    columns = rows.shape[1]
    for start in range(0, columns, _PANEL):
        stop = min(start + _PANEL, columns)
        moment[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
