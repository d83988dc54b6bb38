"""The rules by which drafted tokens are accepted, for numbers of any kind.

With floats they are the oracle of `rejection.py`, whose head states them. With fractions the law of
what they emit can be added up exactly, over all drafts and coins, and compared with the target's.
A law is the list of the probabilities of all tokens; weights are a law not yet divided by its sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

Number = Any  # float, Fraction, or a tensor of floats


def accepts(coin: Number, p: Number, q: Number) -> Any:
    """Whether a draft of probability q is accepted by a target that gives it p."""
    return coin * q < p


def residual(p: Sequence[Number], q: Sequence[Number]) -> list[Number]:
    """Weights of the law of what replaces a rejected draft that was drawn from q."""
    return [max(a - b, 0) for a, b in zip(p, q, strict=True)]


def without(p: Sequence[Number], tokens: Sequence[int]) -> list[Number]:
    """Weights of the law of what replaces rejected `tokens` that were given."""
    return [0 if token in tokens else a for token, a in enumerate(p)]


def verify_chain(
    laws: Sequence[Sequence[Number]],
    drafts: Sequence[int],
    draft_laws: Sequence[Sequence[Number]] | None,
    coins: Sequence[Number],
) -> tuple[int, Sequence[Number]]:
    """Number of accepted drafts, and weights of the law of the next token.

    `laws` has a law more than there are drafts; `coins[i]` is for draft i.
    """
    for i, x in enumerate(drafts):
        if not accepts(coins[i], laws[i][x], 1 if draft_laws is None else draft_laws[i][x]):
            left = without(laws[i], [x]) if draft_laws is None else residual(laws[i], draft_laws[i])
            return i, left
    return len(drafts), laws[len(drafts)]


def verify_tree(
    laws: Sequence[Sequence[Number]],
    parents: Sequence[int],
    tokens: Sequence[int],
    coins: Sequence[Number],
) -> tuple[list[int], Sequence[Number]]:
    """Accepted nodes, first to last, and weights of the law of the next token.

    `laws[j]` and `coins[j]` are for node j; node 0 is the root, and its coin is not used.
    """

    def mass(node: int) -> Number:
        return laws[parents[node]][tokens[node]]

    path = tree_path(parents, tokens, mass, coins)
    last = path[-1] if path else 0
    children = [node for node in range(1, len(parents)) if parents[node] == last]
    return path, without(laws[last], [tokens[node] for node in children])


def tree_path(
    parents: Sequence[int],
    tokens: Sequence[int],
    mass: Callable[[int], Number],
    coins: Sequence[Number],
) -> list[int]:
    """The accepted nodes; `mass(j)` is the probability of node j after its parent."""
    path: list[int] = []
    tried: set[int] = set()
    last, rest = 0, 1
    for node in range(1, len(parents)):
        if parents[node] == last and tokens[node] not in tried:
            p = mass(node)
            if accepts(coins[node], p, rest):
                path.append(node)
                last, rest, tried = node, 1, set()
            else:
                rest = rest - p
                tried.add(tokens[node])
    return path
