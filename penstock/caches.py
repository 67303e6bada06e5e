"""Cache folder of a user, shared by processes: rows of programs, tokenized data and layer traces."""

import os
from pathlib import Path

from penstock.planner.model import trace_cache

ROWS_FOLDER = "rows-of-programs"  # in this folder; images of these rows are relative to the current one


def cache_folder() -> Path:
    """Return $PENSTOCK_CACHE, or `penstock` in $XDG_CACHE_HOME or ~/.cache. RuntimeError for a user without a home directory."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("PENSTOCK_CACHE") or f"{caches}/penstock").expanduser()


def cache_layer_traces() -> None:
    """Store the layer traces of models that are planned from here on, for other processes too."""
    try:
        trace_cache.folder.set(cache_folder() / "outlines")
    except RuntimeError:
        trace_cache.folder.set(None)
