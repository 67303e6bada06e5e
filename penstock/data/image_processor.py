"""The model's own processor: conversations with images as tokens, and the inputs of its vision tower.

The image processor of transformers with the PIL backend is used, also if torchvision is installed, so that pixels are the same on
every machine. The tokenizer is that of texts.
"""

import hashlib
import inspect
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from penstock.runtime.errors import CheckpointError, DataError
from penstock.runtime.layers.meta_models import read_config

from .chat import ChatTemplate, Rendered
from .files import Limits
from .images import digest_of, image_token_of, open_image, pillow_version, stamp_of, text_in
from .messages import Chat
from .tokenizer import ModelTokenizer, reason_of

# Types with the bits of transformers' own forward in steps with images (tests/penstock/vision)
TYPES = (
    *("aya_vision", "deepseek_vl", "gemma3", "gemma4", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "hyperclovax_vision_v2"),
    *("idefics3", "internvl", "janus", "lighton_ocr", "llava", "llava_next", "llava_onevision", "mistral3", "paddleocr_vl"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llama_3"),
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "chat_template.json", "chat_template.jinja")
_OFFSETS = "return_text_replacement_offsets"


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """A rendered conversation with its images: tokens by transformers' `Encoding`; `images`: JSON of a list with digest, size,
    number of tokens and grid of each; `end`: one past the last token of an image; `stamps`: JSON of a list with path, size, time
    and digest of each image that is a file."""

    encoding: Any  # None: its image cannot be read
    images: str | None
    end: int
    stamps: str


class UnreadableImageError(DataError):
    """An image that cannot be read. `stamps`: as in `ImageTokens`, without a digest."""

    def __init__(self, message: str, stamp: list[Any] | None) -> None:
        super().__init__(message)
        self.stamps = json.dumps([] if stamp is None else [[*stamp, ""]])


@dataclass
class ImageReader:
    """Processor of a vision-language model's folder, loaded at the first image. `root`: folder of the images' paths."""

    folder: Path
    tokenizer: ModelTokenizer
    limits: Limits
    root: Path
    has_own_template: bool = False  # True: of the user, instead of the processor's

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the processor's files, which decide the tokens and pixels of images."""
        files = [self.folder / name for name in PROCESSOR_FILES]
        contents = [path.read_bytes().hex() if path.is_file() else "" for path in files]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()

    @property
    def identity(self) -> list[str]:
        return [self.digest, str(self.root), pillow_version()]

    @cached_property
    def config(self) -> Any:
        """Configuration of the model. DataError for a type without support of images."""
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        if (model_type := str(config.get("model_type"))[:40]) not in TYPES:
            raise DataError(f"images, and {model_type} models are trained on text alone; supported: {', '.join(TYPES)}")
        return read_config(config)

    @cached_property
    def processor(self) -> Any:
        """The processor of transformers, without videos. CheckpointError if the folder lacks its files."""
        from transformers import AutoImageProcessor, ProcessorMixin  # seconds, which runs on text do not spend

        cls = processor_class(self.folder, self.config)
        if getattr(cls, "is_dummy", False):
            raise CheckpointError(f"{self.folder}: {cls.__name__} of transformers needs torchvision: pip install torchvision")
        if _OFFSETS not in inspect.getsource(ProcessorMixin.__call__):
            raise DataError("images need transformers 5.23 or newer; pip install -U transformers")
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # on backends, at each start
        try:
            parts = {"image_processor": AutoImageProcessor.from_pretrained(str(self.folder), backend="pil", local_files_only=True)}
            parts["tokenizer"] = self.tokenizer.library
            fields, _ = cls.get_processor_dict(str(self.folder), local_files_only=True)
            without_videos = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None})
            names: list[str] = cls.get_attributes()
            return without_videos.from_args_and_dict([parts.get(name) for name in names], fields)  # type: ignore[attr-defined]
        except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
            how = f"copy {' and '.join(PROCESSOR_FILES[:2])} from the model"
            raise CheckpointError(f"{self.folder}: its image processor cannot be used ({reason_of(error)}); {how}") from None
        finally:
            logging.set_verbosity(verbosity)

    @cached_property
    def template(self) -> ChatTemplate:
        """Chat template of conversations with images: the user's, else the processor's, else the tokenizer's."""
        library = deepcopy(self.tokenizer.library)
        if not self.has_own_template and self.processor.chat_template is not None:
            library.chat_template = self.processor.chat_template
        return ChatTemplate(replace(self.tokenizer, library=library, has_template=True), self.limits)

    @property
    def token_id(self) -> int:
        """Token at the places of images, in the model's configuration."""
        return int(self.config.image_token_id)

    def with_parts(self, chat: Chat, where: str) -> Chat:
        """Return the conversation in the form that the template writes completely: contents as lists of parts, or as texts in
        messages without images."""
        parts = [[{"type": "text", "text": c}] if isinstance(c := m["content"], str) else c for m in chat.messages]
        for messages in (tuple({**m, "content": c} for m, c in zip(chat.messages, parts, strict=True)), chat.messages):
            variant = replace(chat, messages=messages)
            try:
                texts = [text for text, _ in self.template.render(variant, where)]
            except DataError:
                continue
            if all(text_in(m["content"]).strip() in texts[-1] for m in messages):
                return variant
        return chat

    def read(self, rendered: Rendered, sources: Sequence[Any], where: str) -> tuple[Rendered, ImageTokens]:
        """Return a rendered conversation with the tokens of its images. DataError for an image that cannot be read, or that the
        template does not write."""
        text, spans = rendered
        token = str(self.processor.image_token)
        if (n := text.count(token)) < len(sources):
            problem = f"the chat template writes {n} of its {len(sources)} images"
            raise DataError(f"{where}: {problem}; use the model's own, or leave the row out")
        if n > len(sources):
            problem = f"{n} times {token[:20]} in its text, and {len(sources)} images"
            raise DataError(f"{where}: {problem}; leave {token[:20]} out of texts")
        images, stamps = [], []
        for number, source in enumerate(sources, start=1):
            try:
                images.append(open_image(source, self.root))
            except ValueError as error:
                raise UnreadableImageError(f"{where}: image {number}: {error}", stamp_of(source, self.root)) from None
            if (stamp := stamp_of(source, self.root)) is not None:
                stamps.append([*stamp, digest_of(images[-1])])
        try:
            out = self.processor(text=[text], images=images, return_tensors="pt", **{_OFFSETS: True})
        except (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            raise DataError(f"{where}: the model's processor rejects it ({reason_of(error)}); leave the row out") from None
        (places,) = out[_OFFSETS.removeprefix("return_")]
        expanded = _expanded(text, places)
        begins = self.processor.tokenizer.bos_token
        special = begins is None or not text.startswith(begins)  # like the processor's own chat template
        encoding = self.tokenizer.backend.encode(expanded, add_special_tokens=special)
        if list(encoding.ids) != (ids := out["input_ids"][0].tolist()):
            problem = f"the processor's {len(ids):,} tokens differ from the tokenizer's {len(encoding):,}"
            raise DataError(f"{where}: {problem}; copy both again from the model")
        counted = self._counted(encoding, places, out.get("image_grid_thw"))
        known = [{"sha256": digest_of(image), "size": [*image.size]} for image in images]
        listed = [{**fields, **counts} for fields, counts in zip(known, counted, strict=True)]
        moved = [tuple(_moved(edge, places) for edge in span) for span in spans]
        end = max((i + 1 for i, token_id in enumerate(encoding.ids) if token_id == self.token_id), default=0)
        return (expanded, moved), ImageTokens(encoding, json.dumps(listed), end, json.dumps(stamps))  # type: ignore[return-value]

    def _counted(self, encoding: Any, places: Sequence[dict[str, Any]], grids: Any) -> list[dict[str, Any]]:
        """Number of tokens at each place, and the grid of patches for models with one."""
        begins = [first for i, (first, _) in zip(encoding.ids, encoding.offsets, strict=True) if i == self.token_id]
        counts = [sum(place["new_span"][0] <= begin < place["new_span"][1] for begin in begins) for place in places]
        if sum(counts) != len(begins):
            raise DataError("the token of images is in a text too; leave it out")
        if grids is not None and any(a["span"][1] == b["span"][0] for a, b in pairwise(places)):
            raise DataError("its template writes nothing between two images, so their positions are not known; use the model's own")
        grid_of = [{}] * len(counts) if grids is None else [{"grid": grid} for grid in torch.as_tensor(grids).tolist()]
        return [{"n_tokens": n, **grid} for n, grid in zip(counts, grid_of, strict=True)]

    def changed(self, stamps: Iterable[list[Any]]) -> dict[str, str]:
        """Return path and new digest (or why it has none) of images whose files have other pixels than those of these stamps. A
        missing file has not changed."""
        changed = dict[str, str]()
        for path, *stamp, digest in stamps:
            if path not in changed and (self.root / path).is_file() and stamp_of(path, self.root) != [path, *stamp]:
                try:
                    changed[path] = "" if (now := digest_of(open_image(path, self.root))) == digest else now
                except ValueError as error:
                    changed[path] = str(error)
        return {path: now for path, now in changed.items() if now}

    def tower_inputs(self, source: Any, where: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the digest of an image, and the processor's outputs for it alone. DataError if it cannot be read any more."""
        try:
            image = open_image(source, self.root)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
        out = self.processor(text=[str(self.processor.image_token)], images=[image], return_tensors="pt")
        return digest_of(image), {name: torch.as_tensor(value) for name, value in out.items()}


def processor_class(folder: Path, config: Any) -> Any:
    """Class of transformers' processor that a folder's files name, else that of the model's configuration. CheckpointError if
    transformers has neither."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

    for path in (folder / "processor_config.json", folder / "preprocessor_config.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if (cls := processor_class_from_name(json.loads(path.read_text(encoding="utf-8"))["processor_class"])) is not None:
                return cls
    if (cls := PROCESSOR_MAPPING.get(type(config), None)) is None:
        raise CheckpointError(f"{folder}: its {PROCESSOR_FILES[1]} names no processor of transformers; copy it from the model")
    return cls


def image_token(folder: Path) -> int | None:
    """Token of images in a model's folder, like `image_token_of`; None without a configuration."""
    try:
        return image_token_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        return None


def _expanded(text: str, places: Sequence[dict[str, Any]]) -> str:
    """Replace the placeholders of a text by the tokens of their images."""
    edges = [0, *(edge for place in places for edge in place["span"]), len(text)]
    between = [text[first:stop] for first, stop in zip(edges[::2], edges[1::2], strict=True)]
    return between[0] + "".join(place["replacement"] + rest for place, rest in zip(places, between[1:], strict=True))


def _moved(edge: int, places: Sequence[dict[str, Any]]) -> int:
    """Offset of a character in the expanded text."""
    lengths: list[int] = [len(p["replacement"]) - (p["span"][1] - p["span"][0]) for p in places if p["span"][1] <= edge]
    return edge + sum(lengths)
