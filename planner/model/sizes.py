"""Layer traces for any micro-batch size: JSON trees with polynomials of sequences and sequence length as sizes.

A polynomial, `{"p": coefficients}`, is fitted to recorded sizes and validated against other recorded sizes. Models with sliding
windows have one tree for sequences shorter than the window, and another for longer ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.runtime.plan.workload import text_of

Recorded = Callable[[int, int], dict[str, Any]]  # (sequences, their length) -> recorded tree
STEP = 16
FAR = 4099  # a prime sequence length for validation
ANY = 2**31 - 1
LONGEST_MASK = 16_384  # longest sequence for which real masks are built


def evaluated(tree: Any, n_sequences: int, seq_len: int) -> Any:
    """Evaluate all polynomials `{"p": [c0, ...]}` in a tree; coefficients are in the order of `monomials`."""
    if isinstance(tree, dict):
        if tree.keys() == {"p"}:
            return sum(c * m for c, m in zip(tree["p"], monomials(n_sequences, seq_len), strict=True))
        return {key: evaluated(value, n_sequences, seq_len) for key, value in tree.items()}
    return [evaluated(item, n_sequences, seq_len) for item in tree] if isinstance(tree, list) else tree


class Kernels(NamedTuple):
    """Implementations that change the recorded calls of a layer."""

    attention: str
    library_kernels: tuple[str, ...] = ()  # library kernels in use; each is recorded as one call


def at_size(traces: Mapping[str, Any], how: Kernels, n_sequences: int, seq_len: int) -> dict[str, Any] | None:
    """Evaluate shipped or cached traces for a size; return None if no entry covers it."""
    for entry in traces["outlines"]:
        (smallest, largest), is_so = entry["sequences"], Kernels(entry["attention"], tuple(entry.get("library_kernels", ()))) == how
        if is_so and entry["from"] <= seq_len <= entry["to"] and smallest <= n_sequences <= largest:
            return evaluated(entry["tree"], n_sequences, seq_len)  # type: ignore[no-any-return]
    return None


def monomials(n_sequences: int, seq_len: int) -> list[int]:
    return [b * t for b in (1, n_sequences) for t in (1, seq_len, seq_len**2)]


def window_of(config: dict[str, Any]) -> int | None:
    """Return the smallest sliding window or attention chunk of a configuration, in tokens; None without one."""
    config = text_of(config)
    values = [config.get(key) for key in ("sliding_window", "attention_chunk_size")]
    widths = [width for width in values if isinstance(width, int) and config.get("use_sliding_window") is not False]
    return min(widths, default=None)


def fit_sizes(recorded: Recorded, window: int | None) -> Iterator[dict[str, Any]]:
    """Yield trees with their ranges of validity: below the window and from the window on; for any number of sequences, or for one
    and for more if a single sequence is computed differently. Yield nothing for sizes that are no polynomials."""
    regimes = [(1, ANY, STEP)] if window is None else [(1, window - 1, STEP), (window, ANY, window + STEP)]
    for first, last, shortest in regimes if window is None or window <= LONGEST_MASK else regimes[:1]:
        lengths = [shortest + STEP * i for i in range(4)]
        # Validate near and far: linear attention loops over chunks of 64 tokens, so it is polynomial only up to 64
        check_lengths = (lengths.pop(), min(last, first - 1 + FAR))
        for sort in ([((1, 2), 3, ANY)], [((1,), 1, 1), ((2, 3), 4, ANY)]):
            with suppress(ValueError):
                trees = [polynomial(recorded, n, lengths, [(check, t) for t in check_lengths]) for n, check, _ in sort]
                for (numbers, _, largest), tree in zip(sort, trees, strict=True):
                    yield {"from": first, "to": last, "sequences": [numbers[0], largest], "tree": tree}
                break


def polynomial(recorded: Recorded, numbers: Sequence[int], lengths: Sequence[int], checks: Sequence[tuple[int, int]]) -> Any:
    """Fit one tree to recorded sizes (numbers x lengths) and validate it on `checks`. Raise ValueError if no polynomial fits."""
    tree = fitted({(n, t): recorded(n, t) for n in numbers for t in lengths})
    if any(evaluated(tree, *size) != recorded(*size) for size in checks):
        raise ValueError("sizes are no polynomials")
    return tree


def fitted(trees: Mapping[tuple[int, int], Any]) -> Any:
    """Merge trees of several sizes into one with polynomials where integers differ, or raise ValueError. Example:
    `{(1, t): 2 * t for t in (16, 32, 48)}` becomes `{"p": [0, 2, 0, 0, 0, 0]}`."""
    values = list(trees.values())
    first = values[0]
    if isinstance(first, (dict, list)):
        keys = [tree.keys() if isinstance(tree, dict) else range(len(tree)) for tree in values]
        if any(tree_keys != keys[0] for tree_keys in keys):
            raise ValueError("sizes have different keys or calls")
        merged = {key: fitted({size: tree[key] for size, tree in trees.items()}) for key in keys[0]}
        return merged if isinstance(first, dict) else [*merged.values()]
    if all(value == first for value in values):
        return first
    if not all(type(value) is int for value in values):
        raise ValueError("sizes have different names")
    rows = [monomials(*size) for size in trees]
    several, lengths = len({n for n, _ in trees}) > 1, len({t for _, t in trees}) > 1
    used = [c for c in range(len(rows[0])) if (c < 3 or several) and (c % 3 == 0 or lengths)]  # constant sizes have no powers
    coefficients = dict(zip(used, _solved([[row[c] for c in used] for row in rows], values), strict=True))
    return {"p": [coefficients.get(c, 0) for c in range(len(rows[0]))]}


def _solved(rows: list[list[int]], values: list[int]) -> list[int]:
    """Solve a square linear system exactly (Gauss-Jordan). Raise ValueError if a solution is not an integer."""
    table = [[*map(Fraction, row), Fraction(value)] for row, value in zip(rows, values, strict=True)]
    for i in range(len(table)):
        pivot = next(j for j in range(i, len(table)) if table[j][i])
        table[i], table[pivot] = table[pivot], table[i]
        table[i] = [x / table[i][i] for x in table[i]]
        for j in range(len(table)):
            if j != i and table[j][i]:
                table[j] = [a - table[j][i] * b for a, b in zip(table[j], table[i], strict=True)]
    solution = [row[-1] for row in table]
    if any(x.denominator != 1 for x in solution):
        raise ValueError("no whole coefficients")
    return [int(x) for x in solution]
