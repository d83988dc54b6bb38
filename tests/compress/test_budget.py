from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.budget import Sensitivity, choose_bits, measure_sensitivity
from compress.calib.methods.scales import find_scales
from compress.models.checkpoint import open_checkpoint
from compress.models.family import family_of
from compress.plan import Plan, PlannedLinear, make_plan
from compress.recipe import Budget, Recipe, load_recipe
from compress.scheme import LinearScheme, WeightScheme, dequantize, round_to_codes
from tests.factory import tiny_model

CPU = torch.device("cpu")
RECIPE = ("scheme.weights.group_size=32", "dtype=auto", "budget.num_samples=3")


def planned(name: str, out_features: int, in_features: int) -> PlannedLinear:
    scheme = LinearScheme(weights=WeightScheme(group_size=32))
    shape = (out_features, in_features)
    return PlannedLinear(name=name, shape=shape, scheme=scheme, scale_dtype=torch.float16)


def sensitivity(name: str, weights: int, errors: Mapping[int, float]) -> Sensitivity:
    linear = planned(name, weights // 64, 64)
    return Sensitivity(
        linears=(linear,), errors=errors, costs={bits: bits * weights for bits in errors}
    )


def test_bits_go_where_they_lower_the_error_most() -> None:
    errors = {2: 1.0, 3: 0.3, 4: 0.1, 8: 0.0}
    rows = [
        sensitivity("sensitive", 640, {bits: 100 * error for bits, error in errors.items()}),
        sensitivity("robust", 640, errors),
    ]
    chosen = choose_bits(rows, Budget(bits_per_weight=3))
    assert {name: weights.bits for name, weights in chosen.items()} == {"sensitive": 4, "robust": 2}
    assert all(weights.group_size == 32 for weights in chosen.values())
    uniform = choose_bits(rows, Budget(bits_per_weight=3, choices=(3,)))
    assert {weights.bits for weights in uniform.values()} == {3}


def test_a_budget_below_the_fewest_bits_is_an_error_that_says_what_they_take() -> None:
    rows = [sensitivity("a", 640, {2: 1.0, 3: 0.5})]
    with pytest.raises(ValueError, match=r"bits_per_weight 1\.5: even the fewest bits take 2\.00"):
        choose_bits(rows, Budget(bits_per_weight=1.5, choices=(2, 3)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits_per_weight": 0}, "positive, got 0"),
        ({"bits_per_weight": 3, "choices": ()}, "different bit widths"),
        ({"bits_per_weight": 3, "choices": (3, 3)}, "different bit widths"),
        ({"bits_per_weight": 3, "num_samples": 0}, "num_samples must be positive"),
    ],
)
def test_budget_refuses_nonsense(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget(**values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Recipe, Plan, torch.Tensor, list[Sensitivity]]:
    source = tiny_model("Qwen3ForCausalLM", tmp_path_factory.mktemp("budget") / "m")
    recipe = load_recipe("mixed-w3.5", RECIPE)
    checkpoint = open_checkpoint(source)
    family = family_of(checkpoint.config)
    plan = make_plan(checkpoint, family, recipe, calibration_tokens=100)
    tokens = torch.randint(0, 331, (5, 17), generator=torch.Generator().manual_seed(0))
    rows = measure_sensitivity(
        checkpoint, family, recipe, plan, tokens, device=CPU, dtype=torch.float32, quiet=True
    )
    return source, recipe, plan, tokens, rows


def test_every_linear_is_in_one_set_and_fused_ones_together(
    measured: tuple[Path, Recipe, Plan, torch.Tensor, list[Sensitivity]],
) -> None:
    _, _, plan, _, rows = measured
    assert [linear for row in rows for linear in row.linears] == list(plan.linears)
    assert [len(row.linears) for row in rows] == [3, 1, 2, 1] * 2
    assert all([*row.errors] == [2, 3, 4, 8] for row in rows)
    for row in rows:
        assert row.errors[2] > row.errors[3] > row.errors[4] > row.errors[8] > 0
        assert row.costs[8] - row.costs[4] == 4 * sum(
            linear.shape[0] * linear.shape[1] for linear in row.linears
        )


def test_sensitivity_is_the_error_of_the_block_in_the_float_model(
    measured: tuple[Path, Recipe, Plan, torch.Tensor, list[Sensitivity]],
) -> None:
    from transformers import AutoModelForCausalLM

    source, recipe, _, tokens, rows = measured
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    outputs: list[torch.Tensor] = []
    block = model.model.layers[1]
    block.register_forward_hook(lambda *call: outputs.append(call[2]))
    seen: list[torch.Tensor] = []
    hook = block.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(tokens[:3])
        hook.remove()
        weight = block.mlp.down_proj.weight
        importance = seen[0].reshape(-1, weight.shape[1]).square().mean(0)
        scheme = WeightScheme(bits=3, group_size=32)
        scale, zero = find_scales(weight, importance, scheme, recipe.method.scale, torch.float32)
        codes = round_to_codes(weight, scale, zero, 3)
        weight.copy_(dequantize(QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=3)))
        model(tokens[:3])
    exact, rounded = outputs
    ratios = (exact - rounded).square().sum(-1) / exact.square().sum(-1)
    expected = float(ratios.mean())
    assert rows[-1].linears[0].name == "model.layers.1.mlp.down_proj"
    assert rows[-1].errors[3] == pytest.approx(expected, rel=1e-3)
