"""Images of rows: their places in conversations, and their pixels, read within limits.

A place is a part {"type": "image"} of a message's content, or `<image>` in its text if the row has a column of images. An image is
a path below the folder of the images, bytes, a `data:` URL, a value of a `datasets.Image` column, or a PIL image. Nothing is
downloaded, and no path leads out of the folder.
"""

import base64
import hashlib
import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.runtime.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Message = dict[str, Any]
COLUMNS = ("images", "image")  # column names of a row, in this order
MARK = "<image>"  # in texts of LLaVA and ShareGPT
MOST_PIXELS = 2**26  # of an image, before it is decoded
MOST_BYTES = 2**27  # of a file
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # no decoder that starts another program
_KEYS = ("image", "path", "bytes", "base64", "url", "image_url", "file_name")  # of a part, with the image
_PART = {"type": "image"}


def placed_images(messages: list[Any], row: Mapping[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the messages with a part {"type": "image"} at each place of an image, and the images in this order. Without places,
    the images of the row's columns come before the text of the first user message. ValueError if numbers differ."""
    column = [image for name in COLUMNS for image in _listed(row.get(name))]
    parts = [_parts(message, bool(column)) for message in messages]
    places = [part for content in parts for part in content or () if _is_image(part)]
    if column and not places:
        first = next((i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "user"), None)
        if first is None or parts[first] is None:
            raise ValueError("images, and no user's message with a text to put them before")
        parts[first] = [*({**_PART} for _ in column), *(parts[first] or ())]
        places = [part for part in parts[first] or () if _is_image(part)]
    if not places:
        return messages, ()
    values = [_value(part) for part in places]
    n_empty = values.count(None)
    if n_empty != len(column):
        raise ValueError(f"{n_empty} places for images without one of their own, and {len(column)} images in its columns")
    remaining = iter(column)
    images = tuple(next(remaining) if image is None else image for image in values)
    plain = [None if c is None else [{**_PART} if _is_image(part) else part for part in c] for c in parts]
    has_place = [c is not None and any(map(_is_image, c)) for c in plain]
    return [{**m, "content": c} if is_there else m for m, c, is_there in zip(messages, plain, has_place, strict=True)], images


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _parts(message: Any, has_column: bool) -> list[Any] | None:
    """Parts of a message's content, a text split at each MARK if the row has a column of images; None for another content."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return None
    return [piece for part in content for piece in (_split(part) if has_column else (part,))]


def _split(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str) or MARK not in text:
        yield part
        return
    for i, piece in enumerate(text.split(MARK)):
        if i:
            yield {**_PART}
        if piece:
            yield {"type": "text", "text": piece}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _value(part: dict[str, Any]) -> Any:
    """Image within a part; None if it is in a column of the row."""
    value = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    value = value.get("url") if part.get("type") == "image_url" and isinstance(value, dict) else value
    return base64.b64decode(value, validate=True) if part.get("base64") == value is not None else value


def text_in(content: Any) -> str:
    """Text of a message's content, without images."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def open_image(source: Any, folder: Path) -> "Image":
    """Decode an image of a row as RGB, upright. `folder`: of the paths. ValueError with the reason, on one line."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError("images need pillow: pip install 'penstock-train[images]'") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # decompression bombs, truncated metadata
            image = source if isinstance(source, Image.Image) else Image.open(io.BytesIO(_bytes(source, folder)), formats=FORMATS)
            if (n := image.width * image.height) > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels, above {MOST_PIXELS:,}; make it smaller")
            if not n or getattr(image, "n_frames", 1) > 1:
                raise ValueError("an animation, or an image without pixels; give one frame")
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, Warning, Image.DecompressionBombError, MemoryError) as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise ValueError(f"an image that cannot be read ({reason})") from None


def _bytes(source: Any, folder: Path) -> bytes:
    if isinstance(source, dict):  # value in a `datasets.Image` column
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str) or not source:
        raise ValueError("an image that is no path, bytes or PIL image")
    if source.startswith("data:image/") and ";base64," in source[:64]:
        return base64.b64decode(source.partition(",")[2], validate=True)
    if "://" in source:
        raise ValueError(f"an image at {source[:60]!r}: nothing is downloaded; give its file")
    path = (folder / source).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"an image {source[:60]!r} outside of {folder}; name the folder of the images with --images")
    if not path.is_file():
        raise ValueError(f"no image {source[:80]!r} in {folder}; name the folder of the images with --images")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"an image {source[:60]!r} above {MOST_BYTES:,} bytes; make it smaller")
    return path.read_bytes()


def digest_of(image: "Image") -> str:
    """SHA-256 of an RGB image's size and pixels."""
    return hashlib.sha256(f"{image.width}x{image.height}\n".encode() + image.tobytes()).hexdigest()
