"""Which cores compute, and which serve the host lanes?"""


def split_cores(cores: list[int]) -> tuple[list[int], list[int]]:
    """(cores of the gpu lane, cores of the copies and the optimizer) on a CPU machine.

    Half each, so that neither slows the other; an odd one goes to the host lanes, of which there are three. A single core
    serves both.
    """
    if not cores:
        raise ValueError("no cores to split")
    ordered = sorted(set(cores))
    if len(ordered) == 1:
        return ordered, ordered
    half = len(ordered) // 2
    return ordered[:half], ordered[half:]
