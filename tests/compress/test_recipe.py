from pathlib import Path

import pytest

from compress.calib.methods import ROUNDERS
from compress.calib.methods.gptq import GPTQ
from compress.lookup import lookup
from compress.recipe import load_recipe, shipped_recipes

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*"))


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("file", RECIPES, ids=[file.name for file in RECIPES])
def test_every_shipped_recipe_loads_and_resolves(file: Path) -> None:
    assert file.suffix == ".yaml"
    recipe = load_recipe(file.stem)
    assert lookup(ROUNDERS, recipe.method.kind, "method").fn is not None
    assert load_recipe(str(file)) == recipe


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_says_how_to_launch_it(name: str) -> None:
    text = shipped_recipes()[name]
    assert f"# compress quantize MODEL --recipe {name} -o OUT" in text.splitlines()[:3]


def test_set_overrides_and_keeps_the_rest() -> None:
    recipe = load_recipe(
        "gptq-w4a16",
        ["scheme.weights.bits=3", "method.damping=0.05", "ignore=['re:.*down_proj']"],
    )
    assert recipe.scheme.weights.bits == 3
    assert recipe.scheme.weights.group_size == 64
    assert isinstance(recipe.method, GPTQ)
    assert recipe.method.damping == 0.05
    assert recipe.ignore == ("re:.*down_proj",)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scheme.weights.bit=3", "scheme.weights.bit: unknown key"),
        ("method.dampign=1", "method.dampign: unknown key"),
        ("shceme.weights.bits=3", "shceme: unknown key"),
        ("scheme.weights.bits=9", "bits must be 2 to 8, got 9"),
        ("scheme.weights.group_size=0", "group_size must be positive or -1 .per channel., got 0"),
        ("method.kind=gtpq", "unknown method 'gtpq'; did you mean 'gptq'"),
        ("method.damping=-1", "damping must be positive and at most 1000.0, got -1"),
        ("method.scale.max_shrink=2", r"max_shrink must be in \[0, 1\), got 2"),
        ("dtype=int8", "dtype: Input should be"),
        ("scheme.weights.bits", "expected KEY.PATH=VALUE"),
        ("=3", "expected KEY.PATH=VALUE"),
        ("method.kind.x=3", "method.kind is not a mapping"),
        ("scheme.weights.bits=[3", "not a YAML value"),
    ],
)
def test_set_errors_name_the_key(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("gptq-w4a16", [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping"),
        ("- 1", "expected a mapping"),
        ("scheme: {}", "method: "),
        ("method: {kind: rtn}\nmethods: 1", "methods: unknown key"),
        ("method: {kind: [}", "not valid YAML"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(write(tmp_path, text))


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(FileNotFoundError):
        load_recipe("no/such/recipe.yaml")
    with pytest.raises(ValueError, match="unknown recipe 'gptq-w4a61'; did you mean 'gptq-w4a16'"):
        load_recipe("gptq-w4a61")
