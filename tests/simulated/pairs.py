"""Few combinations of options that have every pair of values."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

Value = tuple[str, str]


def pairwise(
    options: Mapping[str, Collection[str]], undefined: Collection[frozenset[Value]] = ()
) -> list[dict[str, str]]:
    """Choose combinations, greedily and always the same ones.

    Args:
        options: Names of options, and of the values of each; the first value goes with every other value.
        undefined: Pairs of an option and its value that do not go together.
    """
    values = {option: [(option, value) for value in names] for option, names in options.items()}
    sides = itertools.combinations(values.values(), 2)
    left = {frozenset(pair): None for one, other in sides for pair in itertools.product(one, other)}
    for pair in undefined:
        del left[pair]
    cases = []
    while left:
        case = dict(next(iter(left)))
        for option in values:
            chosen = {(option, case[option])} if option in case else set(values[option])
            fitting = [v for v in values[option] if v in chosen and not _pairs(v, case) & set(undefined)]
            case[option] = max(fitting, key=lambda value: len(_pairs(value, case) & left.keys()))[1]
        for pair in itertools.combinations(case.items(), 2):
            left.pop(frozenset(pair), None)
        cases.append({option: case[option] for option in values})
    return cases


def parametrize_pairs(**options: Sequence[Any]) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with a pairwise choice of values, which may have marks."""
    rows = []
    for case in pairwise({option: [*map(str, range(len(values)))] for option, values in options.items()}):
        chosen = [options[option][int(number)] for option, number in case.items()]
        sets = [each if hasattr(each, "marks") else pytest.param(each) for each in chosen]
        rows.append(pytest.param(*(each.values[0] for each in sets), marks=[m for each in sets for m in each.marks]))
    return pytest.mark.parametrize(tuple(options), rows)


def _pairs(value: Value, case: dict[str, str]) -> set[frozenset[Value]]:
    return {frozenset({value, other}) for other in case.items() if other[0] != value[0]}
