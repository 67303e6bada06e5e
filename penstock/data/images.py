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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.runtime.errors import DataError
from penstock.runtime.plan.workload import has_towers

if TYPE_CHECKING:
    from PIL.Image import Image

Message = dict[str, Any]
COLUMNS = ("images", "image")  # column names of a row, in this order
_UNREAD = ("videos", "video", "audios", "audio")
MARK = "<image>"  # in texts of LLaVA and ShareGPT
MOST_PIXELS = 2**26  # of an image, before it is decoded
MOST_BYTES = 2**27  # of a file
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # no decoder that starts another program
_KEYS = ("image", "path", "bytes", "base64", "url", "image_url", "file_name")  # of a part, with the image
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")  # of a part, in Qwen's format
_PART = {"type": "image"}
_DEEP = ("I", "F")  # first letter of modes above 8 bits
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")  # first bytes of FORMATS


def placed_images(messages: list[Any], row: Mapping[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the messages with a part {"type": "image"} at each place of an image, and the images in this order. Without places,
    the images of the row's columns come before the text of the first user message. ValueError if numbers differ."""
    if name := next((name for name in _UNREAD if row.get(name)), None):
        raise ValueError(f'has "{name}", and only images are read; leave the row out')
    column = images_in(row)
    _refuse_elsewhere(messages)
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


def images_in(row: Mapping[str, Any]) -> list[Any]:
    """Images in the columns of a row."""
    return [image for name in COLUMNS for image in _listed(row.get(name))]


def _refuse_elsewhere(messages: list[Any]) -> None:
    """ValueError for an image in a field that nothing reads."""
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        texts = [part for part in content if isinstance(part, dict) and not _is_image(part)] if isinstance(content, list) else []
        if name := next((name for fields in (message, *texts) for name in (*COLUMNS, "image_url") if fields.get(name)), None):
            how = 'as {"type": "image", "path": "..."} in its content, or in a column of the row'
            raise ValueError(f'message {i} has "{name}", which is not read there; give the image {how}')


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
    """Image within a part; None if it is in a column of the row. ValueError for a size of its own."""
    if name := next((name for name in _SIZES if part.get(name) is not None), None):
        how = "leave it out, or set the limits of all images in the model's preprocessor_config.json"
        raise ValueError(f'an image with a "{name}" of its own, which is not read; {how}')
    value = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    value = value.get("url") if part.get("type") == "image_url" and isinstance(value, dict) else value
    if value is None or part.get("base64") is not value:
        return value
    try:
        return base64.b64decode(part["base64"], validate=True)
    except (TypeError, ValueError):
        raise ValueError('an image under "base64" that is no base64') from None


def text_in(content: Any) -> str:
    """Text of a message's content, without images."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def open_image(source: Any, folder: Path) -> "Image":
    """Decode an image of a row as RGB, upright. `folder`: of the paths. ValueError with the reason, on one line."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
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
            if image.mode.startswith(_DEEP):
                raise ValueError(f"an image of mode {image.mode[:8]}: RGB would keep its darkest values alone; give one of 8 bits")
            if image.mode == "P":  # RGB of a palette with transparency is a warning
                image = image.convert("RGBA")
            return ImageOps.exif_transpose(image).convert("RGB")
    except ValueError:
        raise
    except UnidentifiedImageError:
        raise ValueError(f"a file that is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except Exception as error:  # decoders of damaged files raise errors of many kinds
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise ValueError(f"an image that cannot be read ({reason})") from None


def pillow_version() -> str:
    """Version of the decoders, which decide pixels."""
    import PIL

    return PIL.__version__


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


def image_url(value: Any) -> str:
    """Return an image of a program, bytes or a PIL image, as a `data:` URL for JSON. TypeError for another object."""
    if isinstance(value, bytes) and value.startswith(_MAGIC):
        return _url(value)
    with suppress(ImportError):
        from PIL import Image

        if isinstance(value, Image.Image):
            open_image(value, Path()).save(buffer := io.BytesIO(), "PNG", compress_level=1)
            return _url(buffer.getvalue())
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _url(content: bytes) -> str:
    return f"data:image/*;base64,{base64.b64encode(content).decode()}"


def image_token_of(config: Mapping[str, Any]) -> int | None:
    """Token of images in the configuration of a vision-language model, -1 if it names none; None for another model."""
    if not has_towers(dict(config)):
        return None
    return next((config[key] for key in ("image_token_id", "image_token_index") if isinstance(config.get(key), int)), -1)


def stamp_of(source: Any, folder: Path) -> list[Any] | None:
    """Return path, size and time of an image's file, -1 for a missing file; None for an image without a path."""
    if isinstance(source, dict):
        source = None if source.get("bytes") else source.get("path")
    if not isinstance(source, str) or source.startswith("data:"):
        return None
    try:
        status = (folder / source).stat()
    except (OSError, ValueError):
        return [source, -1, -1]
    return [source, status.st_size, status.st_mtime_ns]


def digest_of(image: "Image") -> str:
    """SHA-256 of an RGB image's size and pixels."""
    return hashlib.sha256(f"{image.width}x{image.height}\n".encode() + image.tobytes()).hexdigest()
