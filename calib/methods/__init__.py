"""The methods that turn float weights into codes. One table, one file per method."""

from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import Field

from compress.artifacts import QuantizedLinear
from compress.calib.methods.gptq import GPTQ, round_gptq
from compress.calib.methods.rtn import RTN, round_rtn


class Rounder(NamedTuple):
    """`fn(weight, statistics, scheme, method, scale_dtype)`: codes, and a note on any fallback.

    `needs_second_moment` asks for the whole matrix X^T X of the inputs, not only its diagonal.
    """

    fn: Callable[..., tuple[QuantizedLinear, str | None]]
    needs_second_moment: bool


Method = Annotated[RTN | GPTQ, Field(discriminator="kind")]

ROUNDERS: dict[str, Rounder] = {
    "rtn": Rounder(round_rtn, needs_second_moment=False),
    "gptq": Rounder(round_gptq, needs_second_moment=True),
}
