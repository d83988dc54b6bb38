import pytest

from compress.lookup import lookup

TABLE = {"gptq": 1, "rtn": 2}


def test_lookup_returns_the_entry() -> None:
    assert lookup(TABLE, "rtn", "method") == 2


def test_lookup_miss_names_the_nearest_and_lists_all() -> None:
    with pytest.raises(ValueError) as caught:
        lookup(TABLE, "gtpq", "method")
    expected = "unknown method 'gtpq'; did you mean 'gptq'? (available: gptq, rtn)"
    assert str(caught.value) == expected


def test_lookup_far_miss_suggests_nothing() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'zzz' \(available"):
        lookup(TABLE, "zzz", "method")
