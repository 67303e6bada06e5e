"""Cores of the lanes: those that compute or issue, and those of the host's work."""

MANY_CORES = 8  # from which on two of them feed a GPU


def split_cores(cores: list[int]) -> tuple[list[int], list[int]]:
    """(cores of the gpu lane, cores of the copies and the optimizer) on a CPU machine.

    Half each, so that neither slows the other; an odd one goes to the host lanes, of which there are three. A single core
    serves both.
    """
    ordered = _ordered(cores)
    half = len(ordered) // 2
    return ordered[:half] or ordered, ordered[half:]


def split_beside_gpu(cores: list[int]) -> tuple[list[int], list[int]]:
    """(cores of the lanes that issue to a GPU, cores of the optimizer).

    Of the three lanes that issue one at a time has the interpreter. Where there are many cores they have two, so that a thread of
    the driver or an interrupt does not hold them up; the optimizer, which memory binds, hardly misses it. A single core serves all.
    """
    ordered = _ordered(cores)
    n_issuing = 2 if len(ordered) >= MANY_CORES else 1
    return ordered[:n_issuing], ordered[n_issuing:] or ordered


def _ordered(cores: list[int]) -> list[int]:
    if not cores:
        raise ValueError("no cores to split")
    return sorted(set(cores))
