"""Vision towers of configurations: tokens of an image of given size, matrix products of its forward, and size of its features.

Sizes follow from the configuration; limits in a processor's files, which may shrink an image, are not known here.
"""

# P patches of an image, T tokens, H width of the tower, D width of the decoder
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan.workload import Matmul, text_of

GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3")  # an image keeps its size, rounded to patches
FIXED = ("gemma3", "idefics3", "internvl", "llava", "smolvlm")  # every image is scaled to one size
_GATED = ("qwen2_5_vl", "mistral3")


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


def vision_tower(config: Mapping[str, Any], width: int, height: int) -> VisionTower:
    """Return the tower for images of width x height pixels. WorkloadError for a model without support of images."""
    model_type = str(config.get("model_type"))
    if model_type not in (*GRID, *FIXED):
        raise WorkloadError(
            f"--images: not supported for {model_type[:40]} models; supported: {', '.join(sorted((*GRID, *FIXED)))}"
        )
    v: Mapping[str, Any] = config.get("vision_config") or {}
    d, hidden, depth = _number(text_of(dict(config)), "hidden_size"), _hidden(v, model_type), _depth(v)
    inner = int(v.get("intermediate_size") or int(hidden * v.get("mlp_ratio", 4)))
    (rows, columns), merge = _patches(config, v, model_type, width, height), _merge(config, v, model_type)
    patch, n_added = _edge(v, "patch_size", 14), len(v.get("deepstack_visual_indexes") or ()) * model_type.startswith("qwen3")
    n_patches = rows * columns + (model_type in ("llava", "internvl"))  # a class token
    n_features = int(config.get("mm_tokens_per_image", 256)) if model_type == "gemma3" else rows * columns // merge**2
    of_layer = [
        Matmul(n_patches, hidden, hidden, 4 * depth),
        Matmul(n_patches, hidden, inner, (2 + (model_type in _GATED)) * depth),
    ]
    pixels = 3 * patch**2 * (int(v.get("temporal_patch_size", 2)) if model_type.startswith("qwen") else 1)
    window = (_number(v, "window_size") // patch) ** 2 if model_type == "qwen2_5_vl" else n_patches
    whole = {*v.get("fullatt_block_indexes", ())} if model_type == "qwen2_5_vl" else {*range(depth)}
    n_heads = int(v.get("num_heads") or v.get("num_attention_heads") or 16)
    return VisionTower(
        n_patches,
        n_features + (rows // merge if model_type == "mistral3" else 0),
        n_features,
        d * (1 + n_added),
        rows * columns * hidden // n_features + d * n_added,
        (
            Matmul(rows * columns, pixels, hidden),
            *of_layer,
            *_projector(model_type, hidden, merge, d, n_features, n_patches, n_added),
        ),
        n_heads,
        hidden // n_heads,
        tuple(n_patches if i in whole else min(window, n_patches) for i in range(depth)),
        depth * n_patches * (20 * hidden + 2 * inner),
    )


def _projector(model_type: str, h: int, merge: int, d: int, n: int, n_patches: int, n_added: int) -> tuple[Matmul, ...]:
    wide = h * merge**2
    match model_type:
        case "llava":
            return Matmul(n, h, d), Matmul(n, d, d)
        case "gemma3":
            return (Matmul(n, h, d),)
        case "idefics3" | "smolvlm":
            return (Matmul(n, wide, d),)
        case "internvl":
            return Matmul(n, wide, d), Matmul(n, d, d)
        case "mistral3":
            return Matmul(n, wide, h), Matmul(n, h, d), Matmul(n, d, d)
    return Matmul(n, wide, wide, 1 + n_added), Matmul(n, wide, d, 1 + n_added)


def _patches(config: Mapping[str, Any], v: Mapping[str, Any], model_type: str, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of patches."""
    patch, merge = _edge(v, "patch_size", 14), _merge(config, v, model_type)
    if model_type in FIXED:
        n = _edge(v, "image_size", 224) // patch
        return n, n
    if model_type == "mistral3":
        scale = max(1.0, max(width, height) / _edge(v, "image_size", 1540))
        return tuple(merge * max(1, -(-int(edge / scale) // (patch * merge))) for edge in (height, width))  # type: ignore[return-value]
    return tuple(merge * max(1, round(edge / (patch * merge))) for edge in (height, width))  # type: ignore[return-value]


def _merge(config: Mapping[str, Any], v: Mapping[str, Any], model_type: str) -> int:
    """Patches along an edge that become one token."""
    match model_type:
        case "mistral3":
            return int(config.get("spatial_merge_size", 2))
        case "idefics3" | "smolvlm":
            return int(config.get("scale_factor", 2))
        case "internvl":
            return round(1 / float(config.get("downsample_ratio", 0.5)))
        case "llava" | "gemma3":
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
