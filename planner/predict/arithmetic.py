"""Which version of the code computed a plan's claim?

Two versions of the planner may differ in a cost or a bound, and both be honest. So a claim names the code that it was made by; what
another one finds otherwise is no lie.
"""

import hashlib
import sys
from functools import cache
from importlib import metadata, resources

# Rooms whose files all count; and what profiles mean, what a plan asks for, and how ops share a machine.
_ROOMS = ("planner.model", "planner.lower", "planner.predict", "planner.bounds", "planner.search")
_ELSEWHERE = {
    "hwprofiles": ("schema", "curves"),
    "runtime.plan": ("plan", "ops", "policy", "workload", "region", "footprint", "timeline"),
}
_LIBRARIES = ("numpy", "scipy")  # which solve the search's integer programs
N_DIGITS = 16


@cache
def arithmetic() -> str:
    """A fingerprint of the sources that claims rest on, and of what runs them: other digits need not mean another result."""
    sha256 = hashlib.sha256(f"{sys.version_info[:2]} {[metadata.version(name) for name in _LIBRARIES]}".encode())
    rooms = {room: sorted(file.name for file in resources.files(room).iterdir() if file.name.endswith(".py")) for room in _ROOMS}
    rooms |= {room: [f"{name}.py" for name in names] for room, names in _ELSEWHERE.items()}
    for room, files in rooms.items():
        for name in files:
            sha256.update(f"{room}/{name}\n".encode() + resources.files(room).joinpath(name).read_bytes())
    return sha256.hexdigest()[:N_DIGITS]
