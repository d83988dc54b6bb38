"""What a checkpoint's generation_config.json makes of the sampling parameters."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.runtime.generation_config import describe_params, sampling_defaults
from compress.runtime.request import SamplingParams


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_without_a_file_decoding_is_greedy(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path).params == SamplingParams()


def test_temperature_counts_only_with_do_sample(tmp_path: Path) -> None:
    defaults = sampling_defaults(write(tmp_path, temperature=0.6, top_p=0.9))
    assert defaults.params.is_greedy
    assert defaults.ignored == ()
    write(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.9, max_new_tokens=33)
    assert sampling_defaults(tmp_path).params == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, max_tokens=33
    )
    assert sampling_defaults(write(tmp_path, do_sample=True)).params.temperature == 1.0


def test_keys_that_cannot_be_followed_are_named(tmp_path: Path) -> None:
    write(tmp_path, no_repeat_ngram_size=3, typical_p=0.7, num_beams=1, eos_token_id=2)
    assert sampling_defaults(tmp_path).ignored == ("no_repeat_ngram_size=3",)
    write(tmp_path, no_repeat_ngram_size=3, typical_p=0.7, do_sample=True)
    assert set(sampling_defaults(tmp_path).ignored) == {"no_repeat_ngram_size=3", "typical_p=0.7"}


def test_wrong_value_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p must be"):
        sampling_defaults(write(tmp_path, do_sample=True, top_p=1.5))


def test_description_shows_what_matters() -> None:
    greedy = SamplingParams(max_tokens=7, stop_token_ids=(3,))
    assert describe_params(greedy) == "greedy, max_tokens 7, stop_token_ids (3,)"
    drawn = SamplingParams(max_tokens=7, temperature=0.5, seed=0)
    text = describe_params(drawn, {"stop": ["a"], "n": None})
    assert text.startswith("sampling, max_tokens 7, temperature 0.5, top_k 0, top_p 1.0, seed 0")
    assert text.endswith("stop ['a']")
