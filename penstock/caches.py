"""Folder of a user's caches, shared by processes: tokens, and outlines of models."""

import os
from pathlib import Path

from penstock.planner.model import trace_cache


def cache_folder() -> Path:
    """$PENSTOCK_CACHE, or ~/.cache/penstock. RuntimeError for a user without a home."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("PENSTOCK_CACHE") or f"{caches}/penstock").expanduser()


def keep_outlines() -> None:
    """Of models that are planned from here on, for other processes too."""
    try:
        trace_cache.folder.set(cache_folder() / "outlines")
    except RuntimeError:
        trace_cache.folder.set(None)
