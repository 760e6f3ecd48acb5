"""Few cases that together hold every pair of values of any two factors."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations


def pairwise(factors: Mapping[str, Sequence]) -> list[dict]:
    """Cases `{factor: value}`, found greedily and the same every time; far fewer than the full product."""
    names, chance = list(factors), random.Random(0)
    left = {((a, x), (b, y)) for a, b in combinations(names, 2)
            for x in range(len(factors[a])) for y in range(len(factors[b]))}
    rows = []
    while left:
        seed = dict(min(left))
        candidates = [{name: seed.get(name, chance.randrange(len(factors[name]))) for name in names} for _ in range(60)]
        row = max(candidates, key=lambda row: len(left & _pairs(row)))
        left -= _pairs(row)
        rows.append(row)
    return [{name: factors[name][i] for name, i in row.items()} for row in rows]


def _pairs(row: Mapping[str, int]) -> set:
    return set(combinations(row.items(), 2))
