"""How does a checkpoint reach the disk?

It is written to `checkpoint-N.partial` and renamed when all of it is on disk: a folder of the final name is whole. Its tensors may
come in any order; the bytes of its files do not depend on it.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.files import sync
from runtime.plan.train import Lora

from .adapter_files import CONFIG_FILE, TENSOR_FILE, peft_config, peft_name
from .checkpoint import FORMAT_VERSION, INDEX_FILE, STATE_FILE, TOKENIZER_FILES, publish, sum_of
from .room import refusal
from .tensor_files import LazyTensor, TensorFile, write_new

MAX_SHARD_BYTES = 5 * 10**9  # the size at which Hugging Face shards


class Writing:
    """A checkpoint that is being written."""

    def __init__(self, folder: Path, step: int) -> None:
        self.step, self.final = step, folder / f"checkpoint-{step}"
        self.partial = self.final.with_name(self.final.name + ".partial")
        self._expected: dict[str, Mapping[str, Tensor | LazyTensor]] = {}  # files not begun: tensors of such dtype and shape
        self._file_of: dict[str, str] = {}  # by tensor
        self._open: dict[str, TensorFile] = {}
        self._done: dict[str, dict[str, Any]] = {}  # size and sum of each file
        self._model_type = ""

    def begin(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)  # of a run that was stopped while writing
        self.partial.mkdir(parents=True)

    # -- what it will hold ------------------------------------------------------------------------------------------

    def expect(self, file: str, tensors: Mapping[str, Tensor | LazyTensor]) -> None:
        """A file will hold tensors of these names, dtypes and shapes. What they hold is of no interest yet."""
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", file), file
        assert not tensors.keys() & self._file_of.keys(), "a name stands for one tensor of a checkpoint"
        self._expected[file] = tensors
        self._file_of |= dict.fromkeys(tensors, file)

    def expect_model(
        self,
        weights: Mapping[str, Tensor],
        config: dict[str, Any],
        tokenizer_from: Path | None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """A model's files: its weights, all of one dtype, in shards of at most `max_shard_bytes` where no tensor is larger; its
        configuration, and the tokenizer of another model's folder, which are written at once."""
        self._model_type = str(config.get("model_type"))
        shards: list[dict[str, Tensor]] = [{}]
        n_bytes = total_bytes = 0
        for module_name, weight in weights.items():
            if module_name == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue  # transformers ties it to the embedding again
            for name, piece in publish(self._model_type, module_name, weight):
                if shards[-1] and n_bytes + piece.nbytes > max_shard_bytes:
                    shards.append({})
                    n_bytes = 0
                shards[-1][name] = piece
                n_bytes += piece.nbytes
                total_bytes += piece.nbytes
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        for file, shard in zip(names if len(shards) > 1 else ["model.safetensors"], shards, strict=True):
            self.expect(file, shard)
        if len(shards) > 1:
            weight_map = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
            self._write(INDEX_FILE, _json_bytes({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}))
        self._copy_tokenizer(tokenizer_from)
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        self._write("config.json", _json_bytes(_published_config(config, dtype)))

    def expect_adapter(
        self, lora: Lora, shapes: Mapping[str, tuple[int, ...]], base: str | None, tokenizer_from: Path | None
    ) -> None:
        """An adapter's files, as PEFT reads them: its factors, by the names that they have beside the model; what it is, and the
        tokenizer of the model, which are written at once. `base`: where the model lies, if that is known."""
        self.expect(TENSOR_FILE, {peft_name(name): torch.empty(shape, device="meta") for name, shape in shapes.items()})
        self._write(CONFIG_FILE, _json_bytes(peft_config(lora, shapes, base)))
        self._copy_tokenizer(tokenizer_from)

    def _copy_tokenizer(self, folder: Path | None) -> None:
        for file in TOKENIZER_FILES:
            if folder is not None and (folder / file).is_file():
                self._write(file, (folder / file).read_bytes())

    def _write(self, file: str, content: bytes) -> None:
        self._done[file] = write_new(self.partial / file, content)

    # -- what it holds ----------------------------------------------------------------------------------------------

    def put_weight(self, module_name: str, weight: Tensor) -> None:
        """Write a module's weight, under the names of its type."""
        for name, piece in publish(self._model_type, module_name, weight):
            if name in self._file_of:
                self.put(name, piece)

    def put(self, name: str, tensor: Tensor | LazyTensor) -> None:
        """Write an expected tensor. The last one of a file brings the file down to the disk."""
        name_of_file = self._file_of[name]
        file = self._open.get(name_of_file) or self._begun(name_of_file)
        file.put(name, tensor)
        if not file.missing:
            self._close(name_of_file)

    def _begun(self, name: str) -> TensorFile:
        self._open[name] = TensorFile(self.partial / name, self._expected.pop(name))
        return self._open[name]

    def _close(self, name: str) -> None:
        self._done[name] = self._open[name].close()
        del self._open[name]

    def finish(self, state: dict[str, Any]) -> Path:
        """When all of it is written: give it its name, and return its path. One of the same step is replaced."""
        for name in list(self._expected):  # files of no tensors
            self._begun(name)
            self._close(name)
        assert not self._open, "tensors are missing"
        files = dict(sorted(self._done.items()))
        fields = {"format_version": FORMAT_VERSION, "step": self.step, "state": state, "files": files}
        write_new(self.partial / STATE_FILE, _json_bytes(fields | {"sha256": sum_of(fields)}))
        sync(self.partial)  # the names, as the files are
        replaced = self.final.with_name(self.final.name + ".replaced")
        try:
            if self.final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                self.final.rename(replaced)
            self.partial.rename(self.final)
        except OSError:
            if replaced.exists() and not self.final.exists():
                replaced.rename(self.final)
            raise
        sync(self.final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        return self.final

    def give_up(self) -> None:
        """Leave nothing behind."""
        for file in self._open.values():
            file.give_up()
        shutil.rmtree(self.partial, ignore_errors=True)


@contextmanager
def writing(folder: Path, step: int) -> Iterator[Writing]:
    """`folder/checkpoint-<step>`, whole or not at all. CheckpointError, with nothing left behind, where the disk refuses;
    NoRoomError where it is full."""
    files = Writing(folder, step)
    try:
        files.begin()
        yield files
    except OSError as error:
        files.give_up()
        raise refusal(files.final, error) from None
    except BaseException:
        files.give_up()
        raise


def save(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Iterable[tuple[str, Mapping[str, Tensor | LazyTensor]]],
    config: dict[str, Any],
    state: dict[str, Any],
    tokenizer_from: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write `folder/checkpoint-<step>`, whole or not at all, and return its path; one of the same step is replaced.

    `weights` are the module's, by name, all of one dtype (a tied output matrix may be left out); `optimizer` yields files
    one by one, as (suffix, tensors by name); `state` is what else resuming needs, as JSON. Beside the tensors handed
    over, no memory is used. CheckpointError, with nothing left behind, where the disk refuses.
    """
    with writing(folder, step) as files:
        files.expect_model(weights, config, tokenizer_from, max_shard_bytes)
        for name, weight in weights.items():
            files.put_weight(name, weight)
        for suffix, tensors in optimizer:
            files.expect(f"optimizer-{suffix}.safetensors", tensors)
            for name, tensor in tensors.items():
                files.put(name, tensor)
        return files.finish(state)


def _published_config(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The model's configuration with the dtype of its weights, which are no longer quantised whatever they were."""
    return {k: v for k, v in config.items() if k not in ("torch_dtype", "quantization_config")} | {"dtype": dtype}


def _json_bytes(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1) + "\n").encode()
