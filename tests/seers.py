"""Tiny vision-language models for tests: configuration, processor, tokenizer, weights, and drawn images."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModelForImageTextToText, ProcessorMixin

from penstock.data.data import DataRequest, read_data
from penstock.data.images import open_image
from penstock.data.sampling import MapStyleData
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload
from penstock.runtime.batch import Batch
from penstock.runtime.executor import Execution, Stop
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.workload import Model
from penstock.settings import DataSettings
from penstock.vision.stored_outputs import attach_images
from tests.chats import write_talker
from tests.every_type import tiny

HAS_IMAGES = "return_text_replacement_offsets" in inspect.getsource(ProcessorMixin.__call__)  # transformers 5.23 and newer
COLOURS, SHAPES = ("red", "green", "blue", "black"), ("circle", "square")
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ 'IMAGE' }}{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_EDGES = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 12}
_QWEN = {"image": "<|image_pad|>", "template": "<|vision_start|><|image_pad|><|vision_end|>"}
_QWEN |= {"tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]}
_QWEN_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "size": _EDGES}
_IDEFICS: dict[str, Any] = {
    "tokens": ["<image>", "<fake_token_around_image>", "<global-img>"],
    "template": "<image>",
    "vision": {"image_size": 28, "patch_size": 7},
    "config": {"scale_factor": 2},
    "images": {
        "image_processor_type": "Idefics3ImageProcessor",
        **{"do_image_splitting": False, "size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}},
    },
    "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
}
_GLM: dict[str, Any] = {
    "tokens": ["<|image|>", "<|video|>", *(f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end"))],
    "template": "<|begin_of_image|><|image|><|end_of_image|>",
    "vision": {"depth": 2, "image_size": 56, "patch_size": 14},
    "images": {"image_processor_type": "Glm4vImageProcessor", "size": {key: 2 * edge for key, edge in _EDGES.items()}},
    "processor": {"processor_class": "Glm4vProcessor"},
}
_GLM46 = {"images": _GLM["images"] | {"image_processor_type": "Glm46VImageProcessor"}}
_GLM46 |= {"processor": {"processor_class": "Glm46VProcessor"}}
_PIXTRAL: dict[str, Any] = {
    "tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "template": "[IMG]",
    "vision": {"image_size": 56, "patch_size": 14},
    "images": {
        "image_processor_type": "PixtralImageProcessor",
        **{"size": {"longest_edge": 56}, "patch_size": {"height": 28, "width": 28}},
    },
    "processor": {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
}
_LLAVA: dict[str, Any] = {
    "tokens": ["<image>"],
    "template": "<image>",
    "vision": {"image_size": 28, "patch_size": 14, "num_hidden_layers": 2},
    "images": {
        "image_processor_type": "CLIPImageProcessor",
        **{"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    },
    "processor": {
        "processor_class": "LlavaProcessor",
        **{"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
}
_GRIDS = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
_PLACE = "<image_placeholder>"
_DEEPSEEK: dict[str, Any] = {
    **{"tokens": [_PLACE, "<start>", "<end>"], "template": _PLACE, "vision": {"image_size": 28, "patch_size": 14}},
    "images": {"image_processor_type": "DeepseekVLImageProcessor", "size": {"height": 28, "width": 28}, "min_size": 14},
    "processor": {"processor_class": "DeepseekVLProcessor", "num_image_tokens": 4},
    "named": {"image_token": _PLACE, "boi_token": "<start>", "eoi_token": "<end>"},
}
_QWEN2_5 = {"depth": 2, "fullatt_block_indexes": [1], "window_size": 56, "out_hidden_size": 64}
# By type: tokens of images (the first is that of the model's configuration), fields of the configuration and of the processor.
# `seq_len`: of a chat with an image. Idefics 3 shows images whole; SmolVLM, InternVL and LLaVA-NeXT also in tiles
SEERS: dict[str, dict[str, Any]] = {
    "llava": _LLAVA,
    "llava_next": _LLAVA
    | {
        "config": _GRIDS,
        "seq_len": 80,
        "images": {**_LLAVA["images"], **_GRIDS, "image_processor_type": "LlavaNextImageProcessor"},
        "processor": _LLAVA["processor"] | {"processor_class": "LlavaNextProcessor"},
    },
    "llava_onevision": _LLAVA
    | {
        **{"tokens": ["<image>", "<video>"], "config": _GRIDS, "seq_len": 80},
        "vision": _LLAVA["vision"] | {"vision_use_head": False},
        "images": {**_GRIDS, "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 28, "width": 28}},
        "processor": {
            "processor_class": "LlavaOnevisionProcessor",
            **{"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        },
    },
    "pixtral": _PIXTRAL
    | {
        **{"model_type": "llava", "vision": _PIXTRAL["vision"] | {"model_type": "pixtral", "head_dim": 16}},
        "config": {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        "images": _PIXTRAL["images"] | {"patch_size": {"height": 14, "width": 14}},
        "processor": _PIXTRAL["processor"] | {"spatial_merge_size": 1},
    },
    "mistral3": _PIXTRAL,
    "lighton_ocr": _PIXTRAL
    | {
        "processor": _PIXTRAL["processor"] | {"processor_class": "LightOnOcrProcessor"},
        "named": {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    },
    "internvl": {
        "tokens": ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        "template": "<IMG_CONTEXT>\n",
        "vision": {"image_size": [56, 56], "patch_size": [14, 14]},
        "images": {
            "image_processor_type": "GotOcr2ImageProcessor",
            **{"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 2},
        },
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "named": {
            "context_image_token": "<IMG_CONTEXT>",
            **{"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"},
        },
    },
    "aya_vision": {
        "tokens": ["<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL", "TILE_1", "TILE_2"],
        **{"template": "<image>", "config": {"downsample_factor": 2}, "named": {"pad_token": "TILE"}},
        "vision": {"image_size": 28, "patch_size": 7, "vision_use_head": False},
        "images": {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28}, "max_patches": 2},
        "processor": {"processor_class": "AyaVisionProcessor", "patch_size": 7, "img_size": 28, "downsample_factor": 2},
    },
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS
    | {
        "tokens": [*_IDEFICS["tokens"], *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))],
        "images": _IDEFICS["images"]
        | {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True, "size": {"longest_edge": 56}},
        "processor": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        "seq_len": 96,
    },
    "qwen2_5_vl": {
        **_QWEN,
        "vision": _QWEN2_5,
        "images": _QWEN_IMAGES,
        "processor": {"processor_class": "Qwen2_5_VLProcessor"},
    },
    "hyperclovax_vision_v2": {
        **{**_QWEN, "vision": _QWEN2_5, "images": _QWEN_IMAGES},
        "processor": {"processor_class": "HyperCLOVAXVisionV2Processor"},
    },
    "video_llama_3": {
        **{**_QWEN, "vision": {"patch_size": 14}, "processor": {"processor_class": "VideoLlama3Processor"}},
        "images": {"image_processor_type": "VideoLlama3ImageProcessor", "size": _EDGES, "patch_size": 14},
        "seq_len": 80,
    },
    "qwen2_vl": {
        **_QWEN,
        "vision": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        "images": _QWEN_IMAGES,
        "processor": {"processor_class": "Qwen2VLProcessor"},
    },
    "qwen3_vl": {
        **_QWEN,
        "vision": {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16, "patch_size": 14},
        "images": _QWEN_IMAGES | {"patch_size": 14},
        "processor": {"processor_class": "Qwen3VLProcessor"},
    },
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM | _GLM46,
    "glm_ocr": _GLM | _GLM46,
    "paddleocr_vl": {
        **{"tokens": ["<|place|>", "<start>", "<end>"], "template": "<start><|place|><end>"},
        "vision": {"image_size": 56, "patch_size": 14},
        "images": {"image_processor_type": "PaddleOCRVLImageProcessor", "size": _EDGES, "patch_size": 14},
        **{"processor": {"processor_class": "PaddleOCRVLProcessor"}, "named": {"image_token": "<|place|>"}},
    },
    "deepseek_vl": _DEEPSEEK,
    "janus": _DEEPSEEK
    | {
        "vision": _DEEPSEEK["vision"] | {"projection_dim": 64},
        "images": _DEEPSEEK["images"] | {"image_processor_type": "JanusImageProcessor"},
        "processor": {"processor_class": "JanusProcessor", "num_image_tokens": 4},
    },
    "gemma3": {
        "tokens": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        "template": "<start_of_image>",
        "vision": {"image_size": 28, "patch_size": 7, "vision_use_head": False},
        "config": {"mm_tokens_per_image": 4},
        "images": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "named": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    },
    "gemma4": {
        "tokens": ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"],
        **{"template": "<|image|>", "vision": {"patch_size": 4, "head_dim": 16, "num_key_value_heads": 2}, "seq_len": 160},
        "text": {"use_bidirectional_attention": "vision"},
        "images": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
        "processor": {"processor_class": "Gemma4Processor"},
        "named": {
            **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "pad_token": "<audio|>"},
            **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
        },
    },
}
SEERS |= {"qwen3_vl_moe": SEERS["qwen3_vl"], "qwen3_5": SEERS["qwen3_vl"], "qwen3_5_moe": SEERS["qwen3_vl"]}


def length_of(model_type: str) -> int:
    """Length of a sequence for a chat with one image."""
    return int(SEERS[model_type].get("seq_len", 64))


def write_seer(folder: Path, model_type: str, vision: Mapping[str, Any] = MappingProxyType({}), **text: Any) -> dict[str, Any]:
    """Write a tiny model of this type with its processor; return its configuration. `vision`, `text`: fields of tower, decoder."""
    parts = SEERS[model_type]
    template = _CHATML.replace("IMAGE", parts["template"].replace("\n", "\\n"))
    named = {"extra_special_tokens": parts["named"]} if "named" in parts else {}
    n_vocab = write_talker(folder, "chatml, unmarked", template, **named)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {token: n_vocab + i for i, token in enumerate(parts["tokens"])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": i, "content": token, **flags} for token, i in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = tiny(parts.get("model_type", model_type))
    config["vision_config"] |= {**parts["vision"], **vision}
    config["text_config"] |= {"vocab_size": n_vocab + len(ids), "tie_word_embeddings": False, **parts.get("text", {}), **text}
    config |= parts.get("config", {}) | {"tie_word_embeddings": False}
    image = parts.get("image", parts["tokens"][0])
    config |= {key: ids[image] for key in ("image_token_id", "image_token_index") if key in config}
    extra = {
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    extra |= {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
    config |= {key: ids[token] for key, token in extra.items() if key in config and token in ids}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape)
            p.copy_(0.5 + 0.2 * noise if p.dim() == 1 else noise * p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(parts["images"]))
    (folder / "processor_config.json").write_text(json.dumps(parts["processor"]))
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


def drawing(number: int, size: tuple[int, int] = (64, 48)) -> tuple[Image.Image, str]:
    """Return a drawn shape, and its caption."""
    colour, shape = COLOURS[number % len(COLOURS)], SHAPES[number // len(COLOURS) % len(SHAPES)]
    image = Image.new("RGB", size, "white")
    box = (4 + number % 7, 4, size[0] // 2 + number % 5, size[1] - 6)
    draw = ImageDraw.Draw(image)
    (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=colour)
    return image, f"A {colour} {shape}."


def write_drawings(folder: Path, n: int, name: str = "images.jsonl", first: int = 0, n_each: int = 1) -> Path:
    """Write chats on drawn images, `n_each` a turn, in files named by the rows; return the file of the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(first, first + n):
        parts, captions = list[dict[str, str]](), list[str]()
        for k in range(n_each):
            image, caption = drawing(number + 3 * k, (48 + 8 * (number % 3), 40 + 8 * (k % 2)))
            image.save(folder / f"{number}-{k}.png")
            parts.append({"type": "image", "path": f"{number}-{k}.png"})
            captions.append(caption)
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
        rows.append({"messages": [question, {"role": "assistant", "content": " ".join(captions)}]})
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def data_with_images(
    folder: Path, rows: Path, cache: Path, semantics: Semantics, packing: Any = "one", **settings: Any
) -> MapStyleData:
    """Return the rows as data in file order, with the features of their images."""
    config = json.loads((folder / "config.json").read_text())
    part = DataSettings(path=str(rows), packing=packing, shuffle=False, **settings)
    n_vocab, plan = config["text_config"]["vocab_size"], SimpleNamespace(model=Model(config), semantics=semantics)
    request = DataRequest(part, folder, n_vocab, semantics.seq_len, semantics.batch_size, 0, cache / "tokens", True, vision=folder)
    data = read_data(request)
    assert isinstance(data, MapStyleData)
    attach_images([data], plan, folder, (None, cache / "towers"), "cpu", lambda _: None, Stop())
    return data


def own_model(folder: Path, semantics: Semantics) -> Any:
    """Return the model as transformers loads it, with a gradient for its decoder alone."""
    experts = {"experts_implementation": semantics.experts} if "moe" in folder.name else {}
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=semantics.attention, **experts
    )
    for p in model.parameters():  # rounding of products depends on the alignment, which a mapped file does not keep
        p.data = p.data.clone()
    return model.eval()


def own_inputs(data: MapStyleData, model: Any, document: int, n: int) -> dict[str, Any]:
    """Return the arguments of transformers' own forward for a document with `n` tokens of padding: of its processor, not ours."""
    documents = data.parts[0].documents
    reader = documents.reader
    assert reader is not None
    assert reader.images is not None
    sources = [source for _, source in reader.images_of([documents.place(document)])]
    ids = torch.tensor([*documents.ids(document).tolist(), *[data.parts[0].shape.pad_id] * n])[None]
    labels = torch.full_like(ids, -100)
    for first, stop in documents.runs(document).tolist():
        labels[0, first:stop] = ids[0, first:stop]
    processor = reader.images.processor
    text = [str(processor.image_token) * len(sources)]
    images = [open_image(source, reader.images.root) for source in sources]
    out = processor(text=text, images=images, return_tensors="pt") if sources else {}
    accepted = inspect.signature(inspect.unwrap(model.base_model.forward)).parameters
    inputs = {name: x for name, x in out.items() if name in accepted and name not in ("input_ids", "attention_mask")}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted:
            inputs[name] = torch.tensor(processor.create_mm_token_type_ids(ids.tolist()))
    return {**inputs, "input_ids": ids, "labels": labels, "use_cache": False}


def streamed(model: Any, semantics: Semantics, policy: Policy, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one step of a plan on a batch, from a model's weights."""
    config = json.loads((Path(model.name_or_path) / "config.json").read_text())
    workload = build_workload(Model(config), semantics)
    plan, weights = lower(Model(config), workload, semantics, policy, {}), dict(model.named_parameters())
    machine = TorchMachine(plan, lambda _: batch, lambda _: AdamW(lr=1e-9, beta1=0.0))
    for block, parts in enumerate(workload.blocks):
        machine.host.set_weights(block, {p.name: weights[p.name].detach().float() for p in parts.parameters})
    with Execution(plan, machine, 1) as steps:
        (step,) = steps
    assert step.result is not None
    trained = [p for owned in machine.host.owned for p in owned]
    return step.result.loss, {p.name: machine.host.param_state(p).moments[0].view(p.shape) for p in trained}
