"""The rules of acceptance add up: with fractions, what is emitted has exactly the target's law."""

import random
from collections import defaultdict
from fractions import Fraction
from itertools import product

import pytest

from compress.kernels import acceptance

VOCAB = 3
QUARTERS = 4
# Laws are in quarters, so that every ratio of two of their sums is in twelfths: the middles of
# twelve cells stand for all coins.
CELLS = [Fraction(2 * i + 1, 24) for i in range(12)]


class _NeedsCoin(Exception):
    pass


class Coins:
    """Coins that are drawn when they are read, from `script`; `shared` gives one to everybody."""

    def __init__(self, script, shared):
        self.script, self.shared, self.drawn = script, shared, {}

    def __getitem__(self, index):
        key = 0 if self.shared else index
        if key not in self.drawn:
            if len(self.drawn) == len(self.script):
                raise _NeedsCoin
            self.drawn[key] = self.script[len(self.drawn)]
        return self.drawn[key]


def outcomes(verify, shared):
    """(probability, result) of `verify(coins)` over all coins that it reads."""
    scripts = [()]
    while scripts:
        script = scripts.pop()
        try:
            yield Fraction(1, len(CELLS) ** len(script)), verify(Coins(script, shared))
        except _NeedsCoin:
            scripts += [(*script, cell) for cell in CELLS]


def random_law(generator):
    cuts = sorted(generator.randint(0, QUARTERS) for _ in range(VOCAB - 1))
    return [Fraction(b - a, QUARTERS) for a, b in zip([0, *cuts], [*cuts, QUARTERS], strict=True)]


def random_model(generator, depth):
    """A law for every sequence of fewer than `depth` tokens."""
    prefixes = (p for n in range(depth) for p in product(range(VOCAB), repeat=n))
    return {prefix: random_law(generator) for prefix in prefixes}


def completed(emitted, depth, target):
    """The joint law of `depth` tokens, when the target goes on after what was `emitted`."""
    law = defaultdict(Fraction)
    for prefix, weight in emitted.items():
        longer = [(prefix, weight)]
        while longer:
            tokens, w = longer.pop()
            if len(tokens) >= depth:
                law[tokens] += w
            else:
                longer += [((*tokens, t), w * p) for t, p in enumerate(target[tokens]) if p]
    return {tokens: weight for tokens, weight in law.items() if weight}


def distance(emitted, depth, target):
    """Total variation between what verification emits and sampling from the target."""
    got, want = completed(emitted, depth, target), completed({(): Fraction(1)}, depth, target)
    return sum(abs(got.get(k, 0) - want.get(k, 0)) for k in got.keys() | want.keys()) / 2


def emit(emitted, accepted, weights, probability):
    total = sum(weights)  # 0 loses the probability, which the distance then shows
    for token, weight in enumerate(weights):
        if weight:
            emitted[(*accepted, token)] += probability * weight / total


def chain_distance(generator, n, has_laws, shared=False, declared=None):
    """Verify chains of n drafts: drawn from a draft model, or given, each depending on the last."""
    target, draft = random_model(generator, n + 1), random_model(generator, n + 1)
    if not has_laws:  # one token after each prefix, chosen somehow
        draft = {k: one_hot(generator.randrange(VOCAB)) for k in draft}
    emitted = defaultdict(Fraction)
    for drafts in product(range(VOCAB), repeat=n):
        drawn = Fraction(1)
        for i, x in enumerate(drafts):
            drawn *= draft[drafts[:i]][x]
        if not drawn:
            continue
        laws = [target[drafts[:i]] for i in range(n + 1)]
        draft_laws = [draft[drafts[:i]] for i in range(n)] if has_laws else None
        if declared:
            draft_laws = [declared(law) for law in draft_laws]

        def verify(coins, args=(laws, drafts, draft_laws)):
            return acceptance.verify_chain(*args, coins)

        for probability, (count, weights) in outcomes(verify, shared):
            emit(emitted, drafts[:count], weights, drawn * probability)
    return distance(emitted, n + 1, target)


def one_hot(token):
    return [Fraction(int(t == token)) for t in range(VOCAB)]


PARENTS = [-1, 0, 0, 1, 2, 1, 2]  # two children each, two levels, the cousins interleaved


def tree_distance(generator, shared=False, twins=False):
    """Verify a tree whose siblings have distinct tokens, or, as twins, the same."""
    target = random_model(generator, 3)
    tokens = [-1] + [0] * 6
    for parent in range(3):
        children = [j for j, above in enumerate(PARENTS) if above == parent]
        chosen = generator.sample(range(VOCAB), 2)
        for child, token in zip(children, chosen, strict=True):
            tokens[child] = chosen[0] if twins else token
    prefixes = [()]
    for node in range(1, 7):
        prefixes.append((*prefixes[PARENTS[node]], tokens[node]))
    laws = [target[prefix] for prefix in prefixes]
    emitted = defaultdict(Fraction)

    def verify(coins):
        return acceptance.verify_tree(laws, PARENTS, tokens, coins)

    for probability, (path, weights) in outcomes(verify, shared):
        emit(emitted, prefixes[path[-1]] if path else (), weights, probability)
    return distance(emitted, 3, target)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("has_laws", [True, False], ids=["probs", "points"])
def test_chain_emits_exactly_the_target(n, has_laws):
    generator = random.Random(n)
    for _ in range(12 // n):
        assert chain_distance(generator, n, has_laws) == 0


@pytest.mark.parametrize("twins", [False, True], ids=["distinct", "twins"])
def test_tree_emits_exactly_the_target(twins):
    generator = random.Random(7)
    for _ in range(4):
        assert tree_distance(generator, twins=twins) == 0


def _coin_against_p(coin, p, q):
    return coin < p


def _coin_turned_over(coin, p, q):
    return coin * p < q


def _resample_from_target(p, q):
    return p


def _keep_rejected(p, tokens):
    return p


def _drop_only_the_first(p, tokens):
    return [0 if token in tokens[:1] else a for token, a in enumerate(p)]


def chain(has_laws, **options):
    return lambda generator: chain_distance(generator, 2, has_laws, **options)


MUTANTS = [
    pytest.param(chain(True), "accepts", _coin_against_p, id="chain-ratio-without-q"),
    pytest.param(chain(True), "accepts", _coin_turned_over, id="chain-ratio-upside-down"),
    pytest.param(chain(True), "residual", _resample_from_target, id="chain-resample-from-target"),
    pytest.param(chain(True, shared=True), None, None, id="chain-one-coin-for-all"),
    pytest.param(chain(True, declared=lambda q: q[::-1]), None, None, id="chain-wrong-draft-law"),
    pytest.param(chain(False), "without", _keep_rejected, id="points-keep-the-rejected"),
    pytest.param(tree_distance, "accepts", _coin_against_p, id="tree-rest-not-renormalised"),
    pytest.param(tree_distance, "without", _drop_only_the_first, id="tree-keep-second-rejected"),
    pytest.param(
        lambda generator: tree_distance(generator, shared=True),
        None,
        None,
        id="tree-one-coin-for-siblings",
    ),
]


@pytest.mark.parametrize("scene, name, mutant", MUTANTS)
def test_exact_sum_catches_a_wrong_rule(scene, name, mutant, monkeypatch):
    if name:
        monkeypatch.setattr(acceptance, name, mutant)
    generator = random.Random(3)
    assert any(scene(generator) > Fraction(1, 100) for _ in range(20))


def test_greedy_laws_accept_exactly_their_tokens():
    laws = [one_hot(2), one_hot(0), one_hot(1)]
    coins = [Fraction(99, 100)] * 7
    for drafts, count in (((2, 0), 2), ((2, 1), 1), ((1, 0), 0)):
        found, weights = acceptance.verify_chain(laws, drafts, None, coins)
        assert found == count and weights == laws[count]
    tree_laws = [one_hot(2), one_hot(1), one_hot(0), *[one_hot(1)] * 4]
    tokens = [-1, 1, 2, 0, 0, 1, 2]  # the second child, and of its children 4 (0) before 6 (2)
    path, weights = acceptance.verify_tree(tree_laws, PARENTS, tokens, coins)
    assert path == [2, 4] and weights == one_hot(1)
