"""The version of Penstock, in words."""

from importlib import metadata


def version_in_words() -> str:
    """`penstock 1.2`, or that the version is unknown."""
    try:
        return f"penstock {metadata.version('penstock')}"
    except metadata.PackageNotFoundError:
        return "penstock, version unknown: run from its source folder without `pip install .`"
