"""Outlines of any size: trees whose numbers are polynomials of sequences and their length, `{"p": coefficients}`.

They are found from some recorded sizes, and held against others. Attention has one below its window, and one from there on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.runtime.plan.workload import text_of

Recorded = Callable[[int, int], dict[str, Any]]  # the tree of so many sequences of such a length
STEP = 16
FAR = 4099  # tokens that polynomials are held against: no multiple of anything
ANY = 2**31 - 1
LONGEST_MASK = 16_384  # tokens of a sequence whose masks are made in earnest


def evaluated(tree: Any, n_sequences: int, seq_len: int) -> Any:
    """A tree with each polynomial's value in its place; that is `{"p": coefficients}` of what `monomials` gives."""
    if isinstance(tree, dict):
        if tree.keys() == {"p"}:
            return sum(c * m for c, m in zip(tree["p"], monomials(n_sequences, seq_len), strict=True))
        return {key: evaluated(value, n_sequences, seq_len) for key, value in tree.items()}
    return [evaluated(each, n_sequences, seq_len) for each in tree] if isinstance(tree, list) else tree


class How(NamedTuple):
    """What a model's layers compute with, as far as that changes which calls there are."""

    attention: str
    library_kernels: tuple[str, ...] = ()  # of the model's those that are one call each


def at_size(found: Mapping[str, Any], how: How, n_sequences: int, seq_len: int) -> dict[str, Any] | None:
    """Outlines at a size, of those that are shipped or kept, if there are any of that sort."""
    for of in found["outlines"]:
        (fewest, most), is_so = of["sequences"], How(of["attention"], tuple(of.get("library_kernels", ()))) == how
        if is_so and of["from"] <= seq_len <= of["to"] and fewest <= n_sequences <= most:
            return evaluated(of["tree"], n_sequences, seq_len)  # type: ignore[no-any-return]
    return None


def monomials(n_sequences: int, seq_len: int) -> list[int]:
    return [b * t for b in (1, n_sequences) for t in (1, seq_len, seq_len**2)]


def window_of(config: dict[str, Any]) -> int | None:
    """Tokens below which no layer has a mask, if a configuration has windows that are used."""
    config = text_of(config)
    found = [config.get(key) for key in ("sliding_window", "attention_chunk_size")]
    widths = [width for width in found if isinstance(width, int) and config.get("use_sliding_window") is not False]
    return min(widths, default=None)


def of_any_size(recorded: Recorded, window: int | None) -> Iterator[dict[str, Any]]:
    """Trees with the sizes that they hold for: below the window and from there on, where there is one, for any number of sequences,
    or for one and for more, where a single one is computed otherwise. None where sizes are no polynomials."""
    regimes = [(1, ANY, STEP)] if window is None else [(1, window - 1, STEP), (window, ANY, window + STEP)]
    for first, last, shortest in regimes if window is None or window <= LONGEST_MASK else regimes[:1]:
        lengths = [shortest + STEP * i for i in range(4)]
        # Near and far: linear attention loops over parts of 64 tokens, and is a polynomial up to there
        others = (lengths.pop(), min(last, first - 1 + FAR))
        for sort in ([((1, 2), 3, ANY)], [((1,), 1, 1), ((2, 3), 4, ANY)]):
            with suppress(ValueError):
                trees = [polynomial(recorded, n, lengths, [(another, t) for t in others]) for n, another, _ in sort]
                for (numbers, _, most), tree in zip(sort, trees, strict=True):
                    yield {"from": first, "to": last, "sequences": [numbers[0], most], "tree": tree}
                break


def polynomial(recorded: Recorded, numbers: Sequence[int], lengths: Sequence[int], others: Sequence[tuple[int, int]]) -> Any:
    """One tree for these numbers of sequences of these lengths, held against other sizes. ValueError where there is none."""
    found = fitted({(n, t): recorded(n, t) for n in numbers for t in lengths})
    if any(evaluated(found, *size) != recorded(*size) for size in others):
        raise ValueError("sizes are no polynomials")
    return found


def fitted(at: Mapping[tuple[int, int], Any]) -> Any:
    """One tree of those for some sizes: where their numbers differ, a polynomial. ValueError where there is none."""
    first, *others = at.values()
    if isinstance(first, (dict, list)):
        keys = [tree.keys() if isinstance(tree, dict) else range(len(tree)) for tree in at.values()]
        if any(others != keys[0] for others in keys):
            raise ValueError("sizes have other keys or calls")
        found = {key: fitted({size: tree[key] for size, tree in at.items()}) for key in keys[0]}
        return found if isinstance(first, dict) else [*found.values()]
    if all(other == first for other in others):
        return first
    if not all(type(each) is int for each in at.values()):
        raise ValueError("sizes have other names")
    rows = [monomials(*size) for size in at]
    several, lengths = len({n for n, _ in at}) > 1, len({t for _, t in at}) > 1
    used = [c for c in range(len(rows[0])) if (c < 3 or several) and (c % 3 == 0 or lengths)]  # of what does not vary, no power
    found = dict(zip(used, _solved([[row[c] for c in used] for row in rows], list(at.values())), strict=True))
    return {"p": [found.get(c, 0) for c in range(len(rows[0]))]}


def _solved(rows: list[list[int]], values: list[int]) -> list[int]:
    """Whole coefficients of a square system."""
    table = [[*map(Fraction, row), Fraction(value)] for row, value in zip(rows, values, strict=True)]
    for i in range(len(table)):
        pivot = next(j for j in range(i, len(table)) if table[j][i])
        table[i], table[pivot] = table[pivot], table[i]
        table[i] = [x / table[i][i] for x in table[i]]
        for j in range(len(table)):
            if j != i and table[j][i]:
                table[j] = [a - table[j][i] * b for a, b in zip(table[j], table[i], strict=True)]
    found = [row[-1] for row in table]
    if any(x.denominator != 1 for x in found):
        raise ValueError("no whole coefficients")
    return [int(x) for x in found]
