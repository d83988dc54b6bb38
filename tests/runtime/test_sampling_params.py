"""What may be asked of generation, and where the parameters in force come from."""

from typing import Any

import pytest

from compress.runtime.sampling_params import SamplingParams, child_seed, effective


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, r"min_tokens must be in \[0, max_tokens 4\], got 5"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 2**63}, "seed must fit 64 bits"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {3: float("-inf")}}, "logit_bias of token 3 .* bad_words"),
        ({"bad_words": ((3, 4), ())}, "bad_words"),
        ({"bad_words": (3,)}, "bad_words must be non-empty lists of token ids, got 3"),
        ({"stop": "end"}, "stop must be a tuple of strings"),
        ({"stop": ("a", "")}, "empty string"),
        ({"n": 0}, "n must be"),
        ({"n": 3, "best_of": 2}, "best_of must be at least n 3, got 2"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "beam_width 2 cannot give n 3"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature 0.5 has no meaning"),
        ({"beam_width": 2, "best_of": 2}, "best_of 2 has no meaning"),
        ({"beam_width": 2, "stop": ("x",)}, "has no meaning in a beam search"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_sampling_params_refuse_what_has_no_meaning(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**wrong)


def test_params_with_a_bias_can_be_hashed_and_compared() -> None:
    one, other = (SamplingParams(logit_bias={3: value}) for value in (1.0, 2.0))
    assert one != other
    assert len({one, other, SamplingParams(logit_bias={3: 1.0})}) == 2


def test_ending_ids_are_those_of_the_request_and_of_the_model() -> None:
    eos = frozenset({1, 2})
    assert SamplingParams(stop_token_ids=(5,)).ending_ids(eos) == {1, 2, 5}
    assert SamplingParams(stop_token_ids=(5,), ignore_eos=True).ending_ids(eos) == {5}


def test_child_seed_is_the_seed_for_the_first_and_differs_for_the_rest() -> None:
    for seed in (0, 17, -(2**63), 2**63 - 1):
        seeds = [child_seed(seed, i) for i in range(130)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 130
        assert all(-(2**63) <= s < 2**63 for s in seeds)
    # Neighbouring seeds do not share children.
    assert not {child_seed(5, i) for i in range(130)} & {child_seed(6, i) for i in range(130)}


LLAMA3 = {
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "max_length": 4096,
}


def test_effective_takes_the_request_then_the_file_then_the_default() -> None:
    found = effective(LLAMA3, {"top_p": 0.5, "max_tokens": 7})
    assert found.params == SamplingParams(temperature=0.6, top_p=0.5, max_tokens=7)
    file = "generation_config.json"
    assert found.sources["temperature"] == file
    assert found.sources["top_p"] == found.sources["max_tokens"] == "request"
    assert found.sources["top_k"] == found.sources["seed"] == "default"
    assert found.ignored == ()


@pytest.mark.parametrize("do_sample", [False, None, "absent"], ids=str)
def test_effective_is_greedy_where_the_file_does_not_sample(do_sample: Any) -> None:
    config = {"temperature": 0.6, "repetition_penalty": 1.1, "do_sample": do_sample}
    if do_sample == "absent":
        del config["do_sample"]
    found = effective(config, {})
    assert (found.params.temperature, found.params.repetition_penalty) == (0.0, 1.1)
    assert found.sources["temperature"] == "generation_config.json (do_sample is not true)"
    assert effective(config, {"temperature": 0.3}).params.temperature == 0.3


def test_effective_without_a_file_has_defaults_only() -> None:
    found = effective({}, {})
    assert found.params == SamplingParams()
    assert set(found.sources.values()) == {"default"}


def test_effective_reads_lengths_and_bad_words_by_their_other_names() -> None:
    config = {
        "do_sample": True,
        "max_new_tokens": 33,
        "min_new_tokens": 5,
        "bad_words_ids": [[3], [4, 5]],
        "min_p": 0.1,
    }
    found = effective(config, {})
    assert found.params == SamplingParams(
        temperature=1.0, max_tokens=33, min_tokens=5, bad_words=((3,), (4, 5)), min_p=0.1
    )
    assert found.sources["max_tokens"] == "generation_config.json (max_new_tokens)"
    assert effective(config, {"max_tokens": 2}).params.min_tokens == 2
    with pytest.raises(ValueError, match="min_tokens"):
        effective(config, {"max_tokens": 2, "min_tokens": 3})


def test_effective_says_what_it_ignores_and_refuses_unknown_names() -> None:
    config = {"num_beams": 4, "no_repeat_ngram_size": 0, "typical_p": 0.5, "guidance_scale": None}
    assert effective(config, {}).ignored == ("num_beams=4",)
    sampled = effective(config | {"do_sample": True}, {})
    assert sampled.ignored == ("num_beams=4", "typical_p=0.5")
    with pytest.raises(ValueError, match="'max_new_tokens' is not a sampling parameter"):
        effective({}, {"max_new_tokens": 5})


def test_effective_covers_the_generation_config_of_transformers() -> None:
    """Every key of a real GenerationConfig that changes greedy or sampled tokens is known here."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, top_p=0.8).to_dict()
    found = effective({k: v for k, v in config.items() if v is not None}, {})
    assert found.params == SamplingParams(temperature=0.7, top_k=20, top_p=0.8)
    assert found.ignored == ()
