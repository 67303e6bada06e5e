"""Which version is this?"""

from importlib import metadata


def version_in_words() -> str:
    """`penstock 1.2`, or that it is not known."""
    try:
        return f"penstock {metadata.version('penstock')}"
    except metadata.PackageNotFoundError:
        return "penstock, version unknown: run from its source folder without `pip install .`"
