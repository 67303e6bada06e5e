"""The writer of a checkpoint: `checkpoint-N.partial`, renamed when all of it is on disk.

Tensors may come in any order; the files' bytes do not depend on it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from runtime.plan.train import Lora

from .adapter_files import CONFIG_FILE, PREFIX, TENSOR_FILE, config_bytes
from .checkpoint import FORMAT_VERSION, STATE_FILE, sum_of
from .disk import new_folder
from .model_files import INDEX_FILE, TOKENIZER_FILES, publish
from .tensor_files import LazyTensor, TensorFile, write_new

MAX_SHARD_BYTES = 5 * 10**9  # the size at which Hugging Face shards


class CheckpointWriter:
    """The files of a checkpoint: first what each will hold, then tensor by tensor, then the manifest."""

    def __init__(self, folder: Path, step: int, to_close: ExitStack) -> None:
        self.step, self._folder, self._to_close = step, folder, to_close
        self._expected: dict[str, Mapping[str, Tensor | LazyTensor]] = {}  # by file not begun: tensors of such dtypes and shapes
        self._file_of: dict[str, str] = {}  # by tensor
        self._open: dict[str, TensorFile] = {}
        self._done: dict[str, dict[str, Any]] = {}  # by file: size and SHA-256
        self._model_type = ""

    # -- what it will hold ------------------------------------------------------------------------------------------

    def expect(self, file: str, tensors: Mapping[str, Tensor | LazyTensor]) -> None:
        """A file will hold tensors of these names, dtypes and shapes; they may be on the meta device."""
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", file), file
        assert not tensors.keys() & self._file_of.keys(), "a name stands for one tensor of a checkpoint"
        self._expected[file] = tensors
        self._file_of |= dict.fromkeys(tensors, file)

    def expect_model(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], max_bytes: int = MAX_SHARD_BYTES) -> None:
        """A model's weights, all of one dtype, in shards of at most `max_bytes` where no tensor is larger; its configuration
        is written now."""
        self._model_type, is_tied = str(config.get("model_type")), bool(config.get("tie_word_embeddings"))
        published = dict[str, Tensor]()
        for name, weight in weights.items():
            if not (is_tied and name == "lm_head.weight"):  # transformers ties it to the embedding again
                published |= publish(self._model_type, name, weight)
        shards = split_state_dict_into_shards_factory(
            published,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_bytes,
        )
        for file, names in shards.filename_to_tensors.items():
            self.expect(file, {name: published[name] for name in names})
        if shards.is_sharded:
            self._write(INDEX_FILE, _json_bytes({"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}))
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        unquantised = {key: value for key, value in config.items() if key not in ("torch_dtype", "quantization_config")}
        self._write("config.json", _json_bytes(unquantised | {"dtype": dtype}))

    def expect_adapter(self, lora: Lora, shapes: Mapping[str, tuple[int, ...]], base: str | None) -> None:
        """An adapter's factors, by our names, in PEFT's files; its configuration, which names the model `base`, is written now."""
        self.expect(TENSOR_FILE, {PREFIX + name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
        self._write(CONFIG_FILE, config_bytes(lora, shapes, base))

    def copy_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files of a model's folder, those that it has."""
        for file in TOKENIZER_FILES:
            if (folder / file).is_file():
                self._write(file, (folder / file).read_bytes())

    def _write(self, file: str, content: bytes) -> None:
        self._done[file] = write_new(self._folder / file, content)

    # -- what it holds ----------------------------------------------------------------------------------------------

    def put_weight(self, module_name: str, weight: Tensor) -> None:
        """Write a module's weight under its published names."""
        for name, piece in publish(self._model_type, module_name, weight):
            if name in self._file_of:
                self.put(name, piece)

    def put(self, name: str, tensor: Tensor | LazyTensor) -> None:
        """Write an expected tensor; after the last one of a file the file is synced."""
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = TensorFile(self._folder / file, self._expected.pop(file))
            self._to_close.callback(self._open[file].give_up)
        self._open[file].put(name, tensor)
        if not self._open[file].missing:
            self._done[file] = self._open.pop(file).close()

    def finish(self, state: Mapping[str, Any]) -> None:
        """Write the manifest once every tensor is written; `state` has the other fields that resuming needs."""
        for file, tensors in self._expected.items():  # of blocks that train nothing
            assert not tensors, "tensors are missing"
            self._done[file] = TensorFile(self._folder / file, tensors).close()
        assert not self._open, "tensors are missing"
        files = dict(sorted(self._done.items()))
        fields = {"format_version": FORMAT_VERSION, "step": self.step, "state": state, "files": files}
        write_new(self._folder / STATE_FILE, _json_bytes(fields | {"sha256": sum_of(fields)}))


@contextmanager
def writing(folder: Path, step: int) -> Iterator[CheckpointWriter]:
    """Write `folder/checkpoint-<step>`, whole or not at all; CheckpointError where the disk refuses."""
    with new_folder(folder / f"checkpoint-{step}") as partial, ExitStack() as to_close:
        yield CheckpointWriter(partial, step, to_close)


def _json_bytes(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1) + "\n").encode()
