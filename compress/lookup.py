"""One way to find a name in a table, with an error that helps."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


def lookup(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return `table[name]`; on a miss raise ValueError that lists the names and the nearest one."""
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {kind} {name!r}{hint} (available: {', '.join(sorted(table))})")
