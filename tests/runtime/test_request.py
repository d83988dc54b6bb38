"""The bookkeeping of a request."""

from compress.runtime.request import Request, SamplingParams


def make(prompt: int = 5, max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id="a", prompt_ids=list(range(prompt)), params=params)


def test_tokens_between_continues_into_the_drafts() -> None:
    request = make()
    request.draft_ids = [70, 71, 72]
    assert request.tokens_between(3, 7) == [3, 4, 70, 71]
    assert request.tokens_between(5, 6) == [70]
    assert request.tokens_between(0, 2) == [0, 1]


def test_request_counts_known_and_drafted_tokens() -> None:
    request = make()
    assert (request.num_uncomputed_tokens, request.is_decoding) == (5, False)
    request.num_computed_tokens = 5
    request.token_ids.append(9)
    request.draft_ids = [70, 71]
    assert (request.num_uncomputed_tokens, request.is_decoding) == (3, True)
    assert (request.num_output_tokens, request.num_remaining_tokens) == (1, 3)
    assert request.max_cached_tokens == 8


def test_scored_request_never_computes_its_last_token() -> None:
    request = Request(request_id="a", prompt_ids=[1, 2, 3], params=None)
    assert request.token_ids == [1, 2]
    assert (request.max_tokens, request.max_cached_tokens) == (0, 2)
    assert not request.is_decoding
