"""Rows with images: layouts, tokens of the model's own processor, learned tokens, and refused rows."""

import base64
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures

from penstock.arguments.objects import training_data
from penstock.data import images
from penstock.data.data import DataRequest, read_data
from penstock.data.images import MOST_PIXELS, digest_of, open_image
from penstock.runtime.errors import DataError
from penstock.runtime.plan.objective import CROSS_ENTROPY
from penstock.settings import DataSettings
from tests.chats import write_talker
from tests.running import one_line, penstock
from tests.seers import HAS_IMAGES, drawing, write_drawings, write_seer

pytestmark = pytest.mark.skipif(not HAS_IMAGES, reason="of an older transformers")
ANSWER = {"role": "assistant", "content": "A red circle."}
QUESTION = "What is it?"


@pytest.fixture(scope="module")
def seer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seers")
    write_seer(folder / "model", "llava")
    write_drawings(folder / "rows", 2)
    return folder


def read(seer, cache, rows, model="model", objective=CROSS_ENTROPY, **settings):
    """Return the documents of rows: a list, or a file next to the images."""
    path = rows
    if isinstance(rows, list):
        path = seer / "rows" / f"{abs(hash(json.dumps(rows)))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    part = replace(DataSettings(path=str(path)), **({"packing": "one"} | settings))
    folder = seer / model
    return read_data(DataRequest(part, folder, 10**6, 64, 1, 0, cache, True, objective=objective, vision=folder)).parts[0]


def user(*parts):
    return {"role": "user", "content": list(parts)}


PART, TEXT = {"type": "image", "path": "0-0.png"}, {"type": "text", "text": QUESTION}
LAYOUTS = {
    "in the part": {"messages": [user(PART, TEXT), ANSWER]},
    "image_url": {"messages": [user({"type": "image_url", "image_url": {"url": "0-0.png"}}, TEXT), ANSWER]},
    "TRL, with a place": {"messages": [user({"type": "image"}, TEXT), ANSWER], "images": ["0-0.png"]},
    "TRL, without": {"messages": [{"role": "user", "content": QUESTION}, ANSWER], "images": ["0-0.png"]},
    "ShareGPT": {"messages": [{"role": "user", "content": f"<image>{QUESTION}"}, ANSWER], "images": ["0-0.png"]},
    "LLaVA": {
        "image": "0-0.png",
        "conversations": [{"from": "human", "value": f"<image>{QUESTION}"}, {"from": "gpt", "value": "A red circle."}],
    },
    "prompt and completion": {"prompt": [user(PART, TEXT)], "completion": [ANSWER]},
}


def test_every_layout_is_the_conversation_of_the_models_own_processor(seer, tmp_path):
    tables = [read(seer, tmp_path, [row]).documents for row in LAYOUTS.values()]
    conversation = [
        user({"type": "image", "image": drawing(0, (48, 40))[0]}, TEXT),
        {**ANSWER, "content": [TEXT | {"text": "A red circle."}]},
    ]
    processor, first = tables[0].reader.images.processor, tables[0]
    processor.chat_template = tables[0].reader.images.template.tokenizer.library.chat_template
    wanted = processor.apply_chat_template(conversation, tokenize=True, return_dict=True)["input_ids"][0]
    for table in tables:
        assert table.ids(0).tolist() == [*wanted]
        assert table.images(0) == first.images(0) == [{**first.images(0)[0], "size": [48, 40], "n_tokens": 4}]
        (run,) = table.runs(0).tolist()
        assert table.reader.template.tokenizer.decode(table.ids(0)[slice(*run)], special=True) == "A red circle.<|im_end|>"


def test_bytes_in_tables_are_read_as_files_are(seer, tmp_path):
    parts = List({"type": Value("string"), "text": Value("string")})
    features = Features({"messages": List({"role": Value("string"), "content": parts}), "images": List(Image())})
    buffer = io.BytesIO((seer / "rows" / "0-0.png").read_bytes())
    answer = {**ANSWER, "content": [{"type": "text", "text": "A red circle."}]}
    rows = [{"messages": [user({"type": "image"}, TEXT), answer], "images": [{"bytes": buffer.getvalue()}]}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    table, file = (
        read(seer, tmp_path, tmp_path / "rows.parquet").documents,
        read(seer, tmp_path, [LAYOUTS["in the part"]]).documents,
    )
    assert table.ids(0).tolist() == file.ids(0).tolist()
    assert table.images(0) == file.images(0)
    url = {"type": "image", "url": "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()}
    assert read(seer, tmp_path, [{"messages": [user(url, TEXT), ANSWER]}]).documents.images(0) == file.images(0)


def bad(name, seer):
    """Return the value of an image that cannot be read."""
    folder = seer / "rows"
    (folder / "broken.png").write_bytes((folder / "0-0.png").read_bytes()[:60])
    (folder / "text.png").write_text("no image")
    Pictures.new("RGB", (8, 8)).save(folder / "moving.gif", save_all=True, append_images=[Pictures.new("RGB", (8, 8), "red")])
    Pictures.new("1", (MOST_PIXELS // 64 + 1, 64)).save(folder / "huge.png")
    (seer / "outside.png").write_bytes((folder / "0-0.png").read_bytes())
    return {"absolute": str(folder.resolve().parent / "outside.png"), "number": 3}.get(name, name)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.png", "no image 'missing.png' in .*--images"),
        ("broken.png", "cannot be read"),
        ("text.png", "a file that is no JPEG, PNG, .* or TIFF"),
        ("huge.png", f"pixels, above {MOST_PIXELS:,}; make it smaller"),
        ("moving.gif", "an animation"),
        ("../outside.png", "outside of .*--images"),
        ("absolute", "outside of .*--images"),
        ("https://example.org/a.png", "nothing is downloaded"),
        ("number", "no path, bytes or PIL image"),
    ],
)
def test_an_image_that_cannot_be_read_makes_a_bad_row(seer, tmp_path, source, words):
    row = {"messages": [{"role": "user", "content": QUESTION}, ANSWER], "images": [bad(source, seer)]}
    with pytest.raises(DataError, match=words):
        read(seer, tmp_path, [row, LAYOUTS["in the part"]])
    part = read(seer, tmp_path, [row, LAYOUTS["in the part"]], bad_rows=0.5)
    assert len(part.documents.problems) == len(part.sequences) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"videos": ["a.mp4"]}, 'has "videos", and only images are read'),
        ({"images": []}, "<image> in a text, and no image in the row"),
    ],
)
def test_a_row_whose_images_are_elsewhere_is_a_bad_row(seer, tmp_path, fields, words):
    row = {"messages": [{"role": "user", "content": f"<image>{QUESTION}"}, ANSWER]} | fields
    with pytest.raises(DataError, match=words):
        read(seer, tmp_path, [row, LAYOUTS["in the part"]])


@pytest.mark.parametrize(
    "row",
    [
        {"text": "Look: "},
        {"prompt": QUESTION, "completion": "Look: "},
        {"prompt": QUESTION, "chosen": "A. ", "rejected": "Look: "},
        {"messages": [{"role": "user", "content": QUESTION}, {**ANSWER, "content": "Look: "}]},
    ],
)
def test_a_text_with_the_token_of_images_is_a_bad_row(seer, tmp_path, row):
    """As a whole: a pair with the token in one of its answers has neither."""
    rows = [json.loads(json.dumps(row).replace("Look: ", f"Look: {mark}")) for mark in ("a", "<image>", "b")]
    with pytest.raises(DataError, match=r"jsonl:2: a text with the token of images, and no image.* \(1 of 3 rows are bad"):
        read(seer, tmp_path, rows, objective=None)
    documents = read(seer, tmp_path, rows, objective=None, bad_rows=0.5).documents
    assert [documents.place(d)[1] for d in documents.problems] == [2]
    assert [documents.place(d)[1] for d in range(len(documents.lengths)) if d not in documents.problems] == sorted(
        [1, 3] * (1 + ("chosen" in row))
    )


def test_palettes_are_read_and_deep_images_refused(tmp_path):
    """A palette with transparency is common; of 16 bits, a conversion to RGB would keep the darkest 256 values alone."""
    picture = drawing(0)[0]
    picture.quantize(8).save(tmp_path / "palette.png", transparency=bytes([0, 128]))
    assert open_image("palette.png", tmp_path).tobytes() == picture.quantize(8).convert("RGB").tobytes()
    Pictures.new("I;16", (8, 8), 40_000).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match="mode I;16: RGB would keep its darkest values alone; give one of 8 bits"):
        open_image("deep.png", tmp_path)


def test_a_decompression_bomb_is_not_decoded(seer, monkeypatch):
    """The limit holds before any pixel is decoded, and below that of Pillow."""
    monkeypatch.setattr(images, "MOST_PIXELS", 100)
    monkeypatch.setattr(Pictures.Image, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="48 x 40 pixels"):
        open_image("0-0.png", seer / "rows")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [user({"type": "image"}, {"type": "image"}, TEXT), ANSWER], "images": ["0-0.png"]},
            "2 places .* and 1 images",
        ),
        ({"messages": [user(PART, TEXT), ANSWER], "images": ["1-0.png"]}, "0 places .* and 1 images"),
        ({"messages": [user(PART, TEXT | {"text": "<image> is a word"}), ANSWER]}, "2 times <image> in its text, and 1 images"),
        ({"messages": [ANSWER], "images": ["0-0.png"]}, "no user's message"),
    ],
)
def test_images_and_their_places_must_agree(seer, tmp_path, row, words):
    with pytest.raises(DataError, match=words):
        read(seer, tmp_path, [row])


ASKED = {"role": "user", "content": QUESTION}
LOST = {
    "next to texts": ({"prompt": QUESTION, "completion": "A.", "images": ["0-0.png"]}, "images, and they belong to messages"),
    "of a caption": ({"text": "A red circle.", "image": "0-0.png"}, "images, and they belong to messages"),
    "next to tokens": ({"input_ids": [1, 2], "image": "0-0.png"}, "images, and they belong to messages"),
    "of tokens": ({"input_ids": [1, "token", 2], "pixel_values": [[0.0]]}, "the token of images, and no image"),
    "of a text": ({"messages": [{**ASKED, "content": "<image>Look"}, ANSWER], "picture": "0-0.png"}, "and no image"),
    "of a message": ({"messages": [{**ASKED, "images": ["0-0.png"]}, ANSWER]}, 'message 0 has "images"'),
    "of a part": ({"messages": [user({**TEXT, "image": "0-0.png"}), ANSWER]}, 'message 0 has "image"'),
    "learned": ({"messages": [ASKED, {**ANSWER, "content": [TEXT, PART]}]}, "message 1 is a learned answer with an image"),
    "of a size of its own": (
        {"messages": [user({**PART, "max_pixels": 784}, TEXT), ANSWER]},
        '"max_pixels" of its own, which is not read; .* preprocessor_config.json',
    ),
    "a number": ({"messages": [user({"type": "image", "base64": 5}, TEXT), ANSWER]}, 'under "base64" that is no base64'),
    "damaged": ({"messages": [user({"type": "image", "base64": "@"}, TEXT), ANSWER]}, 'under "base64" that is no base64'),
}


@pytest.mark.parametrize(("row", "words"), LOST.values(), ids=LOST)
def test_no_image_is_lost(seer, tmp_path, row, words):
    if "pixel_values" in row:
        token = json.loads((seer / "model" / "config.json").read_text())["image_token_index"]
        row = {**row, "input_ids": [token if i == "token" else i for i in row["input_ids"]]}
    with pytest.raises(DataError, match=words):
        read(seer, tmp_path, [row])


def test_a_template_that_writes_no_images_is_refused(seer, tmp_path):
    template = tmp_path / "texts.jinja"
    part = "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
    text = "{% if m.content is string %}{{ m.content }}{% else %}" + part + "{% endif %}"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n" + text + "<|im_end|>\n{% endfor %}")
    with pytest.raises(DataError, match="the chat template writes 0 of its 1 images"):
        read(seer, tmp_path, [LAYOUTS["in the part"]], chat_template=str(template))


def test_rows_of_a_file_that_changes_after_its_tokens_are_cached_are_read_again(seer, tmp_path):
    """Once; a copy with another time has not changed, nor has a removed file."""
    path, row = seer / "rows" / "changing.png", {"messages": [user({"type": "image", "path": "changing.png"}, TEXT), ANSWER]}
    drawing(0)[0].save(path)
    first = read(seer, tmp_path, [row])
    os.utime(path, ns=(1, 1))
    assert read(seer, tmp_path, [row]).fingerprint == first.fingerprint
    drawing(1)[0].save(path)
    second, third = (read(seer, tmp_path, [row]) for _ in range(2))
    assert second.documents.images(0)[0]["sha256"] == digest_of(drawing(1)[0]) != first.documents.images(0)[0]["sha256"]
    assert second.fingerprint == third.fingerprint != first.fingerprint
    assert [part.documents.location.split()[0] for part in (first, second, third)] == ["made,", "made,", "found"]
    path.unlink()
    assert read(seer, tmp_path, [row]).fingerprint == first.fingerprint


@pytest.mark.parametrize("kind", ["Dataset", "pictures", "bytes", "paths"])
def test_images_of_a_program_are_read_as_files_are(seer, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    content, wanted = (seer / "rows" / "0-0.png").read_bytes(), read(seer, tmp_path, [LAYOUTS["in the part"]]).documents
    image = Pictures.open(io.BytesIO(content)) if kind == "pictures" else content
    if kind == "paths":  # relative to the current folder
        monkeypatch.chdir(seer)
        image = "rows/0-0.png"
    rows = [{"messages": [ASKED, ANSWER], "images": [image]}]
    parts = [{"messages": [user({"type": "image", "image": image}, TEXT), ANSWER]}]
    if kind == "Dataset":
        features = Features({"messages": List({"role": Value("string"), "content": Value("string")}), "images": List(Image())})
        parts = rows = Dataset.from_list([{**rows[0], "images": [{"bytes": content}]}], features=features)
    for data in (rows, parts):
        path = training_data(data, None).settings["data.path"]
        table = read(seer, tmp_path, Path(path)).documents
        assert table.ids(0).tolist() == wanted.ids(0).tolist()
        assert table.images(0) == wanted.images(0)
    with pytest.raises(DataError, match="row 1: no JSON"):
        training_data([{"text": b"no image"}], None)


def test_no_sequence_is_cut_within_an_image(seer, tmp_path):
    """A document that is cut after its images keeps them all; another one is left out and counted."""
    long = {"messages": [user({"type": "text", "text": "Look well. " * 20}, PART), ANSWER]}
    cut = {"messages": [user(PART, TEXT), {**ANSWER, "content": "A red circle. " * 20}]}
    part = read(seer, tmp_path, [long, cut, LAYOUTS["in the part"]])
    assert (part.counts["skipped"], part.counts["cut"], len(part.sequences)) == (1, 1, 2)
    assert part.documents.images_end(0) > 64 >= part.documents.images_end(1) > 0
    assert read(seer, tmp_path, [long, cut, LAYOUTS["in the part"]], too_long="split").counts["skipped"] == 2
    with pytest.raises(DataError, match="packing joined"):
        read(seer, tmp_path, [cut], packing="joined")


def test_a_model_that_reads_no_images_is_named(seer, tmp_path):
    write_talker(seer / "text", "chatml")
    (seer / "text" / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(DataError, match="has images, read only by a vision-language model"):
        read(seer, tmp_path, [LAYOUTS["in the part"]], model="text")
    (seer / "text" / "config.json").write_text('{"model_type": "kosmos-2", "vision_config": {}}')
    with pytest.raises(DataError, match="kosmos-2 models are trained on text alone; supported: aya_vision, "):
        read(seer, tmp_path, [LAYOUTS["LLaVA"]], model="text")
    one_line(
        penstock("data", seer / "rows" / "images.jsonl", "--seq-len", "64"), 2, "has images, read only by a vision-language model"
    )


def test_images_in_another_folder_are_named_with_a_flag(seer, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(LAYOUTS["LLaVA"]) + "\n")
    with pytest.raises(DataError, match="no image '0-0\\.png' in"):
        read(seer, tmp_path, rows)
    assert read(seer, tmp_path, rows, images=str(seer / "rows")).documents.images(0)
    output = penstock("data", rows, "--model", seer / "model", "--images", seer / "rows", "--seq-len", "64").output
    assert "48 x 40: 4 tokens" in output
    assert "<image> x 4What is it?" in output
