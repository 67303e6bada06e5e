"""Version of Penstock."""

from importlib import metadata

try:
    __version__ = metadata.version("penstock-train")
except metadata.PackageNotFoundError:
    __version__ = "unknown: run from its source folder without `pip install .`"


def version_in_words() -> str:
    """Return `penstock 1.2`, or a text that the version is unknown."""
    return f"penstock {__version__}"
