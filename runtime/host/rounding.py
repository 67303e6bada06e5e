"""What rounds a parameter's bf16 state stochastically: keys of random numbers, and the place of its first element."""

from hashlib import blake2b
from typing import NamedTuple

Keys = tuple[int, int, int]  # of the master and the moments
TURN = 2**16


class Drawn(NamedTuple):
    """`first`: the place in the whole parameter of the first element that is here. A bf16 master that is not drawn is rounded
    half up."""

    keys: Keys
    is_master_drawn: bool
    first: int = 0


def drawn(seed: int, n_updates: int, name: str, first: int, is_master_drawn: bool) -> Drawn:
    """Of a parameter, at one update of a run: keys of 32 bits."""
    digest = blake2b(f"{seed} {n_updates} {name}".encode(), digest_size=12).digest()
    master, moment, second = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
    return Drawn((master, moment, second), is_master_drawn, first)


def signed(key: int) -> int:
    """As a kernel takes it: in 32 bits, with a sign."""
    return key - 2**32 if key >= 2**31 else key
