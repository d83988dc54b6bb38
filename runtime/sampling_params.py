"""What a request asks of generation, and what a checkpoint's generation_config.json says of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal

GREEDY = 0.0
_SEED_LIMIT = 2**63
_TOP_K_LIMIT = 2**31
_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen, when to stop, and what is reported.

    temperature 0 (or top_k 1) is greedy, ties to the lowest token id. `top_k` 0, `top_p` 1 and
    `min_p` 0 keep every token; `kernels/sampling.py` has the definitions. The noise of a token is a
    function of (seed, position, token id) alone; `seed` None is drawn when the request arrives.

    `repetition_penalty` 1 is off and looks at prompt and output; `presence_penalty` and
    `frequency_penalty` 0 are off and look at the output. `logit_bias` is added to the logits of the
    tokens it lists. Of each of `bad_words` (token ids) the last token is impossible where those
    before it end the sequence. Penalties, biases and bans come in this order, before temperature.

    Generation ends at `max_tokens`, at any of `stop_token_ids`, or at the end-of-sequence tokens of
    the model unless `ignore_eos`; the stopping token is part of the output. Before `min_tokens` all
    of these are impossible. `stop` strings are carried for whoever turns tokens into text.

    `n` outputs are returned, the most likely by mean log-probability of `best_of` that are
    generated (None: n). `beam_width` k > 1 is a beam search for the n best; a finished beam has the
    score log-probability / length ** `length_penalty`. It ends when no running beam can become
    better: `early_stopping` False compares at the present length, "never" at the most favourable
    one, and True ends as soon as there are k finished beams; all as in transformers.

    `logprobs` k reports the log-probability of each output token and of the k most likely ones,
    `prompt_logprobs` that of each prompt token but the first; None reports nothing. They are those
    of the model itself, before penalties and temperature.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = GREEDY
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be in [0, max_tokens {self.max_tokens}], got {self.min_tokens}"
            )
        _check_distribution(self)
        _check_lists(self)
        _check_search(self)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be None (off) or not negative, got {value}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without noise."""
        return self.temperature == GREEDY or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits of the next."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once: beams, or outputs that are generated."""
        return self.beam_width if self.beam_width > 1 else self.best_of or self.n

    def ending_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end the output, for a model with these end-of-sequence tokens."""
        stops = frozenset(self.stop_token_ids)
        return stops if self.ignore_eos else stops | eos_token_ids


def _check_distribution(params: SamplingParams) -> None:
    if not 0.0 <= params.temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative: {params.temperature}")
    if not 0 <= params.top_k < _TOP_K_LIMIT:
        raise ValueError(f"top_k must be 0 (off) or positive and below 2^31, got {params.top_k}")
    if not 0.0 < params.top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {params.top_p}")
    if not 0.0 <= params.min_p <= 1.0:
        raise ValueError(f"min_p must be in [0, 1], got {params.min_p}")
    if not 0.0 < params.repetition_penalty < float("inf"):
        raise ValueError(
            f"repetition_penalty must be positive and finite, got {params.repetition_penalty}"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not isfinite(getattr(params, name)):
            raise ValueError(f"{name} must be finite, got {getattr(params, name)}")
    if params.seed is not None and not -_SEED_LIMIT <= params.seed < _SEED_LIMIT:
        raise ValueError(f"seed must fit 64 bits with sign, got {params.seed}")


def _check_lists(params: SamplingParams) -> None:
    for token, value in params.logit_bias.items():
        if not isfinite(value):
            raise ValueError(
                f"logit_bias of token {token} must be finite, got {value}; bad_words forbids tokens"
            )
    for word in params.bad_words:
        if isinstance(word, int) or not len(word):
            raise ValueError(f"bad_words must be non-empty lists of token ids, got {word!r}")
    if isinstance(params.stop, str):
        raise ValueError(f"stop must be a tuple of strings, got the string {params.stop!r}")
    if "" in params.stop:
        raise ValueError("stop must not contain the empty string, which every text contains")


def _check_search(params: SamplingParams) -> None:
    n, best_of, width = params.n, params.best_of, params.beam_width
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if width < 1:
        raise ValueError(f"beam_width must be 1 (off) or more, got {width}")
    if best_of is not None and best_of < n:
        raise ValueError(f"best_of must be at least n {n}, got {best_of}")
    if not isfinite(params.length_penalty):
        raise ValueError(f"length_penalty must be finite, got {params.length_penalty}")
    if params.early_stopping not in (False, True, "never"):
        raise ValueError(
            f"early_stopping must be True, False or 'never', got {params.early_stopping!r}"
        )
    if width == 1:
        return
    if n > width:
        raise ValueError(f"a beam search of beam_width {width} cannot give n {n} outputs")
    unusable = {"temperature": GREEDY, "best_of": None, "stop": ()}
    for name, neutral in unusable.items():
        if getattr(params, name) != neutral:
            raise ValueError(
                f"{name} {getattr(params, name)!r} has no meaning in a beam search; leave it out,"
                " or set beam_width to 1"
            )


def child_seed(seed: int, index: int) -> int:
    """The seed of output `index` of a request with `seed`: itself for 0, else a hash of both.

    The finalizer of SplitMix64 (Steele et al. 2014), as a number of 64 bits with sign.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= _SEED_LIMIT else z


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveParams:
    """Parameters, where each comes from, and what the checkpoint asks for in vain.

    `sources[name]` is "request", "default" or "generation_config.json", with the key where that
    has another name. `ignored` lists "key=value" of generation_config.json that would change the
    output and has no counterpart here.
    """

    params: SamplingParams
    sources: Mapping[str, str]
    ignored: tuple[str, ...] = ()


_FILE = "generation_config.json"
_SAME_NAME = ("top_k", "top_p", "min_p", "repetition_penalty")
_OTHER_NAME = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
# Keys that transformers obeys and this file does not -> the values that leave the output alone.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "top_h": (None,),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None, {}),
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
}
_ONLY_SAMPLING = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


def effective(
    generation_config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> EffectiveParams:
    """The parameters of a request that gives `overrides`, by the names of `SamplingParams`.

    What it does not give is taken from `generation_config` (a generation_config.json), else it is
    the default. As in transformers the file samples only where `do_sample` is true, with
    temperature 1 if it has none; keys that are absent are not filled with transformers' defaults.
    `repetition_penalty`, `min_new_tokens` and `bad_words_ids` count when decoding is greedy, too.
    ValueError for a name that is none, and what `SamplingParams` raises.
    """
    names = [f.name for f in fields(SamplingParams)]
    for name in overrides:
        if name not in names:
            raise ValueError(f"{name!r} is not a sampling parameter; there are {', '.join(names)}")
    stored = _stored_values(generation_config)
    values = {name: value for name, (value, _) in stored.items()} | dict(overrides)
    limit = values.get("max_tokens", SamplingParams().max_tokens)
    if "min_tokens" not in overrides and values.get("min_tokens", 0) > limit:
        values["min_tokens"] = limit  # the request asks for less than the file's least
    sources = {name: stored[name][1] if name in stored else "default" for name in names}
    sources |= dict.fromkeys(overrides, "request")
    ignored = tuple(
        f"{key}={generation_config[key]!r}"
        for key, neutral in _UNSUPPORTED.items()
        if key in generation_config and generation_config[key] not in neutral
        if generation_config.get("do_sample") or key not in _ONLY_SAMPLING
    )
    return EffectiveParams(params=SamplingParams(**values), sources=sources, ignored=ignored)


def _stored_values(config: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Name of a parameter -> (value, source), for those that generation_config.json sets."""
    found: dict[str, tuple[Any, str]] = {}
    for name in _SAME_NAME:
        if config.get(name) is not None:
            found[name] = config[name], _FILE
    for name, key in _OTHER_NAME.items():
        if config.get(key) is not None:
            found[name] = config[key], f"{_FILE} ({key})"
    if config.get("bad_words_ids"):
        words = tuple(tuple(word) for word in config["bad_words_ids"])
        found["bad_words"] = words, f"{_FILE} (bad_words_ids)"
    if config.get("do_sample"):
        found["temperature"] = config.get("temperature", 1.0), _FILE
    elif config:
        found["temperature"] = GREEDY, f"{_FILE} (do_sample is not true)"
    return found
