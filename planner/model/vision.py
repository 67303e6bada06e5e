"""Vision towers of configurations: tokens of an image of given size, matrix products of its forward, and size of its features.

Sizes follow from the configuration, and from the limits and tiles in a processor's files where a model's folder has them.
"""

# P patches of an image, T tokens, H width of the tower, D width of the decoder
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.runtime.errors import WorkloadError
from penstock.runtime.files import read_whole
from penstock.runtime.plan.workload import Matmul, text_of

_GLM = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_PIXTRAL = ("mistral3", "lighton_ocr", "pixtral")  # the last: the tower of some LLaVA models
GRID = (*_QWEN, *_GLM, *_PIXTRAL)  # an image keeps its size, rounded to patches
TILED = ("idefics3", "internvl", "smolvlm")  # an image is cut into tiles of one size, and shown whole next to them
FIXED = ("gemma3", "llava", *TILED)  # every image, or tile, is scaled to one size
PLANNED = {*GRID, *FIXED} - {"pixtral"}
_GATED = ("qwen2_5_vl", *_PIXTRAL, *_GLM)
NO_LIMITS: Mapping[str, Any] = MappingProxyType({})
_MOST_BYTES = 2**20  # limit of a processor's file


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Forward of a tower and projector for one image. `n_tokens`: in a sequence, separators included; `n_features`: rows that are
    stored; `n_heads`, `n_visible`: heads of attention, and patches that a patch sees, by layer."""

    n_patches: int
    n_tokens: int
    n_features: int
    width: int  # elements per stored row
    unprojected_width: int  # the same if the projector is trained
    matmuls: tuple[Matmul, ...]
    n_heads: int
    head_dim: int
    n_visible: tuple[int, ...]
    pointwise_elements: int  # read or written outside of products and attention

    @property
    def n_params(self) -> int:
        """Weights of the products."""
        return sum(m.k * m.n * m.count for m in self.matmuls)

    @property
    def flop(self) -> int:
        attention = (4 * self.n_patches * n * self.n_heads * self.head_dim for n in self.n_visible)
        return sum(m.flop for m in self.matmuls) + sum(attention)

    def file_bytes(self, n_images: int, item_bytes: int, projects: bool = True) -> int:
        """Bytes of stored features: after a frozen projector, or before a trained one."""
        return n_images * self.n_features * (self.width if projects else self.unprojected_width) * item_bytes


def processor_limits(folder: Path) -> Mapping[str, Any]:
    """Return the fields of a model's image processor, {} without its files. WorkloadError for a file that is no JSON object."""
    fields = dict[str, Any]()
    for path in (folder / "processor_config.json", folder / "preprocessor_config.json"):
        if path.is_file():
            try:
                content = json.loads(read_whole(path, _MOST_BYTES))
                fields |= content.get("image_processor", {}) if path.name == "processor_config.json" else content
            except (OSError, ValueError, RecursionError, AttributeError, TypeError):
                raise WorkloadError(f"{path}: no JSON object; copy it again from the model") from None
    return fields


def vision_tower(config: Mapping[str, Any], width: int, height: int, limits: Mapping[str, Any] = NO_LIMITS) -> VisionTower:
    """Return the tower for images of width x height pixels. `limits`: fields of the image processor. WorkloadError for a model
    without support of images."""
    model_type = str(config.get("model_type"))
    if model_type not in PLANNED:
        raise WorkloadError(f"--images: not supported for {model_type[:40]} models; supported: {', '.join(sorted(PLANNED))}")
    v: Mapping[str, Any] = config.get("vision_config") or {}
    model_type = "pixtral" if model_type == "llava" and v.get("model_type") == "pixtral" else model_type
    d, hidden, depth = _number(text_of(dict(config)), "hidden_size"), _hidden(v, model_type), _depth(v)
    inner = int(v.get("intermediate_size") or int(hidden * v.get("mlp_ratio", 4)))
    (rows, columns), merge = _patches(config, v, model_type, width, height, limits), _merge(config, v, model_type)
    patch, n_added = _edge(v, "patch_size", 14), len(v.get("deepstack_visual_indexes") or ()) * model_type.startswith("qwen3_vl")
    n_tiles = _n_tiles(v, model_type, width, height, limits)
    n_visible = rows * columns + (model_type in ("llava", "internvl"))  # a class token
    n_patches, n_places = n_tiles * n_visible, n_tiles * rows * columns
    n_features = int(config.get("mm_tokens_per_image", 256)) if model_type == "gemma3" else n_places // merge**2
    wide = _number(v, "out_hidden_size") if model_type in _GLM[:3] else inner
    of_layer = [
        Matmul(n_patches, hidden, hidden, 4 * depth),
        Matmul(n_patches, hidden, wide, (2 + (model_type in _GATED)) * depth),
    ]
    pixels = 3 * patch**2 * (int(v.get("temporal_patch_size", 2)) if model_type in (*_QWEN, *_GLM) else 1)
    window = (_number(v, "window_size") // patch) ** 2 if model_type == "qwen2_5_vl" else n_visible
    whole = {*v.get("fullatt_block_indexes", ())} if model_type == "qwen2_5_vl" else {*range(depth)}
    n_heads = int(v.get("num_heads") or v.get("num_attention_heads") or 16)
    return VisionTower(
        n_patches,
        n_features + (rows // merge if model_type in ("mistral3", "pixtral") else 0),
        n_features,
        d * (1 + n_added),
        (d if model_type in _GLM else n_places * hidden // n_features) + d * n_added,
        (
            Matmul(n_places, pixels, hidden),
            *of_layer,
            *_projector(model_type, hidden, merge, d, n_features, n_added, inner),
        ),
        n_heads,
        hidden // n_heads,
        tuple(n_visible if i in whole else min(window, n_visible) for i in range(depth)),
        depth * n_patches * (20 * hidden + 2 * wide),
    )


def _n_tiles(v: Mapping[str, Any], model_type: str, width: int, height: int, limits: Mapping[str, Any]) -> int:
    """Parts of an image that pass the tower, the whole image included, as the processors of transformers cut them."""
    edge = _edge(v, "image_size", 224)
    if model_type == "internvl":  # the grid with the nearest proportions; among equal ones the largest below twice the image's area
        smallest, largest = int(limits.get("min_patches", 1)), int(limits.get("max_patches", 12))
        grids = [(x, y) for x in range(1, largest + 1) for y in range(1, largest + 1) if smallest <= x * y <= largest]
        best, nearest = (1, 1), math.inf
        for x, y in sorted(grids, key=math.prod):
            if (gap := abs(width / height - x / y)) < nearest or (gap == nearest and 2 * width * height > edge**2 * x * y):
                best, nearest = (x, y), gap
        return math.prod(best) + (best != (1, 1))
    if model_type not in TILED or not limits.get("do_image_splitting", True):
        return 1
    longest = _edge(limits.get("size") or {}, "longest_edge", 4 * edge)
    short = int(longest * min(width, height) / max(width, height))
    across = -(-longest // edge)
    n = across * -(-int(across * edge * (short + short % 2) / longest) // edge)
    return n + (n > 1)


def _projector(model_type: str, h: int, merge: int, d: int, n: int, n_added: int, inner: int) -> tuple[Matmul, ...]:
    wide = h * merge**2
    match model_type:
        case "llava" | "pixtral":
            return Matmul(n, h, d), Matmul(n, d, d)
        case "gemma3":
            return (Matmul(n, h, d),)
        case "idefics3" | "smolvlm":
            return (Matmul(n, wide, d),)
        case "internvl":
            return Matmul(n, wide, d), Matmul(n, d, d)
        case "mistral3" | "lighton_ocr":
            return Matmul(n, wide, h), Matmul(n, h, d), Matmul(n, d, d)
        case "glm4v" | "glm4v_moe" | "glm46v":
            return Matmul(n, wide, d), Matmul(n, d, d), Matmul(n, d, inner, 3)
        case "glm_ocr":
            return Matmul(n, wide, d), Matmul(n, d, d), Matmul(n, d, 3 * d, 3)
    return Matmul(n, wide, wide, 1 + n_added), Matmul(n, wide, d, 1 + n_added)


def _patches(
    config: Mapping[str, Any], v: Mapping[str, Any], model_type: str, width: int, height: int, limits: Mapping[str, Any]
) -> tuple[int, int]:
    """Rows and columns of patches of an image, or of a tile."""
    patch, merge, edges, size = _edge(v, "patch_size", 14), _merge(config, v, model_type), (height, width), limits.get("size") or {}
    if model_type in FIXED:
        n = _edge(v, "image_size", 224) // patch
        return n, n
    scale, unit = 1.0, patch * merge
    turn: Callable[[float], int] = round
    if model_type in _PIXTRAL:
        shrunk = max(1.0, max(edges) / min(_edge(v, "image_size", 1540), _edge(size, "longest_edge", 1540)))
        edges, turn = (int(height / shrunk), int(width / shrunk)), math.ceil
    else:
        n_frames = 2 if model_type in _GLM else 1  # their pixels are counted, and thin images enlarged first
        if n_frames == 2 and min(edges) < unit:
            edges = int(height * unit / min(edges)), int(width * unit / min(edges))
        smallest, largest = (
            limits.get("min_pixels") or size.get("shortest_edge"),
            limits.get("max_pixels") or size.get("longest_edge"),
        )
        area = n_frames * math.prod(unit * max(1, round(edge / unit)) for edge in edges)
        for bound, is_beyond, turned in ((largest, int.__gt__, math.floor), (smallest, int.__lt__, math.ceil)):
            if isinstance(bound, int) and bound > 0 and is_beyond(area, bound):
                scale, turn = math.sqrt(n_frames * math.prod(edges) / bound), turned
    rows, columns = (merge * max(1, turn(edge / scale / unit)) for edge in edges)
    return rows, columns


def _merge(config: Mapping[str, Any], v: Mapping[str, Any], model_type: str) -> int:
    """Patches along an edge that become one token."""
    match model_type:
        case "mistral3" | "lighton_ocr":
            return int(config.get("spatial_merge_size", 2))
        case "idefics3" | "smolvlm":
            return int(config.get("scale_factor", 2))
        case "internvl":
            return round(1 / float(config.get("downsample_ratio", 0.5)))
        case "llava" | "gemma3" | "pixtral":
            return 1
    return int(v.get("spatial_merge_size", 2))


def _hidden(v: Mapping[str, Any], model_type: str) -> int:
    return _number(v, "embed_dim" if model_type == "qwen2_vl" else "hidden_size")


def _depth(v: Mapping[str, Any]) -> int:
    return _number(v, "depth" if "depth" in v and "num_hidden_layers" not in v else "num_hidden_layers")


def _edge(v: Mapping[str, Any], key: str, default: int) -> int:
    value = v.get(key, default)
    return int(value[0] if isinstance(value, list | tuple) else value)


def _number(fields: Mapping[str, Any], key: str) -> int:
    if not isinstance(value := fields.get(key), int):
        raise WorkloadError(f"--images: the configuration has no {key} for its vision tower; give the model's own config.json")
    return value
