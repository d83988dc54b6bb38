"""Recipes: what to quantize to, and how. A run is one recipe plus a model and calibration data.

A recipe is a YAML file with the fields of `Recipe`. The ones shipped lie in `recipes/`; they are
meant to be copied and edited. Unknown keys are errors, and errors name the key by its path.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from compress.calib.methods import Method
from compress.calib.methods.awq import AWQ
from compress.calib.methods.gptq import GPTQ
from compress.calib.methods.rotation import Rotation
from compress.calib.methods.smoothquant import SmoothQuant
from compress.export.formats import FORMATS
from compress.lookup import lookup
from compress.scheme import EmbeddingScheme, QuantScheme

BlockTransform = AWQ | SmoothQuant
Transform = Annotated[BlockTransform | Rotation, Field(discriminator="kind")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bits per weight to spend on the quantized Linears, scales and zero points included.

    The bits of each Linear are chosen among `choices`, by the error that each makes on
    `num_samples` calibration sequences; the rest of its scheme is `scheme.weights`.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    bits_per_weight: float
    choices: tuple[int, ...] = (2, 3, 4, 8)
    num_samples: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.bits_per_weight < inf:
            raise ValueError(f"bits_per_weight must be positive, got {self.bits_per_weight}")
        if not self.choices or len(set(self.choices)) < len(self.choices):
            raise ValueError(f"choices must be different bit widths, got {self.choices}")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be positive, got {self.num_samples}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What to quantize to, and how.

    transforms       applied to the float weights before rounding, in this order, rotation first
    budget           chooses the bits of each Linear, instead of `scheme.weights.bits` for all
    embedding        scheme of the embedding and the head, None to leave them in float
    true_sequential  Linears of a block see inputs from the quantized ones before them
    ignore           module names or `re:` patterns of Linears that stay in float
    format           in which the checkpoint is written
    dtype            of everything stored in float, scales included; `auto` keeps that of the source
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    scheme: QuantScheme = field(default_factory=QuantScheme)
    method: Method
    transforms: tuple[Transform, ...] = ()
    budget: Budget | None = None
    embedding: EmbeddingScheme | None = None
    true_sequential: bool = False
    ignore: tuple[str, ...] = ()
    format: str = "compressed-tensors"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"

    def __post_init__(self) -> None:
        lookup(FORMATS, self.format, "format")
        weights = (self.scheme.weights, *(o.weights for o in self.scheme.overrides))
        if isinstance(self.method, GPTQ) and any(w.type == "float" for w in weights):
            raise ValueError("method gptq rounds to integers; float weights need method rtn")
        if any(isinstance(transform, Rotation) for transform in self.transforms[1:]):
            raise ValueError(
                "transforms: a rotation comes first and once, it turns the whole model"
            )
        if self.budget is not None:
            self._check_budget()

    def _check_budget(self) -> None:
        if self.scheme.overrides:
            raise ValueError(
                "budget chooses the bits of every Linear, so leave out scheme.overrides"
            )
        if self.scheme.weights.type == "float" or self.scheme.activations is not None:
            raise ValueError(
                "budget needs integer weights with activations in float: otherwise every width is"
                " stored in whole bytes"
            )

    @property
    def rotation(self) -> Rotation | None:
        """The rotation of the whole model, if there is one; it comes before other transforms."""
        found = [item for item in self.transforms if isinstance(item, Rotation)]
        return found[0] if found else None

    @property
    def block_transforms(self) -> tuple[BlockTransform, ...]:
        """The transforms that work on one block at a time, in order."""
        return tuple(item for item in self.transforms if not isinstance(item, Rotation))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML, JSON and fingerprints."""
        return asdict(self)


@cache
def _adapter() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


def shipped_recipes() -> dict[str, str]:
    """Name -> YAML text of the recipes that come with the package."""
    files = resources.files("compress.recipes").iterdir()
    return {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in sorted(files, key=lambda file: file.name)
        if file.name.endswith(".yaml")
    }


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a shipped recipe by name, or a YAML file by path, with `key.path=value` overrides.

    Raises ValueError for an unknown name, key or value, FileNotFoundError for a missing file.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"recipe {name}: not UTF-8 text") from None
    else:
        text = lookup(shipped_recipes(), name, "recipe")
    try:
        values = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"recipe {name}: not valid YAML ({_one_line(error)})") from None
    if not isinstance(values, dict):
        raise ValueError(f"recipe {name}: expected a mapping with the key `method`")
    for override in overrides:
        _apply(values, override)
    return _validate(name, values)


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error, as an unknown one is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one `key.path=value` in nested `values`; the value is read as YAML."""
    path, separator, text = override.partition("=")
    keys = path.split(".")
    if not separator or not all(keys):
        raise ValueError(f"--set {override}: expected KEY.PATH=VALUE")
    node = values
    for depth, key in enumerate(keys[:-1], start=1):
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ValueError(f"--set {override}: {'.'.join(keys[:depth])} is not a mapping")
        node = child
    try:
        node[keys[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override}: not a YAML value ({_one_line(error)})") from None


def _validate(name: str, values: dict[str, Any]) -> Recipe:
    try:
        return _adapter().validate_python(values)
    except ValidationError as error:
        problems = "; ".join(_problem(item, values) for item in error.errors())
        raise ValueError(f"recipe {name}: {problems}") from None


def _problem(item: Any, values: dict[str, Any]) -> str:
    """One validation error as `key.path: message`."""
    parts = [str(part) for part in item["loc"]]
    chosen = values.get("method")
    if parts[:1] == ["method"] and isinstance(chosen, dict) and parts[1:2] == [chosen.get("kind")]:
        parts.pop(1)  # pydantic names the chosen alternative after the key; users did not write it
    if item["type"] == "union_tag_invalid":
        known = item["ctx"]["expected_tags"].replace("'", "").split(", ")
        try:
            noun = parts[0].removesuffix("s")
            lookup(dict.fromkeys(known), item["ctx"]["tag"], noun)
        except ValueError as error:
            return f"{'.'.join(parts)}.kind: {error}"
    if item["type"] == "unexpected_keyword_argument":
        return f"{'.'.join(parts)}: unknown key"
    message = item["msg"].removeprefix("Value error, ")
    if not parts:
        return str(message)
    given = "" if item["type"] in ("missing", "value_error") else f", got {item['input']!r}"
    return f"{'.'.join(parts)}: {message}{given}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
