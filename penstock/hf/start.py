"""Model and machine of a script: a folder, a name in the local Hub cache, an object; a profile, or one probe of this host."""

import hashlib
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.hub import cached_file

from penstock import api
from penstock.caches import cache_folder
from penstock.checkpoint.adapter_files import CONFIG_FILE
from penstock.checkpoint.model_files import read_json
from penstock.hwprofiles.schema import Profile
from penstock.planner.model.workload import read_model
from penstock.ranks import is_rank
from penstock.runtime.errors import CheckpointError, PlanError
from penstock.runtime.executor import say
from penstock.runtime.files import alone, write_whole
from penstock.runtime.units import on_one_line, show_bytes


class Start(NamedTuple):
    """Model to begin with. `adapter`: folder of a LoRA adapter; `lora`: its configuration; `saved`: a temporary folder to keep."""

    folder: str
    adapter: str | None = None
    lora: Any = None
    saved: "TemporaryDirectory[str] | None" = None

    @property
    def tokenizer_folder(self) -> str:
        """Folder of the tokenizer of a run: the adapter's, if it has one, or the model's."""
        return self.adapter if self.adapter and (Path(self.adapter) / "tokenizer.json").is_file() else self.folder


def start_of(model: Any) -> Start:
    """Return the model of a trainer: a folder (of a model or an adapter), a shipped name, a name in the local Hub cache, or an
    object, which is saved. PlanError without room for that; WorkloadError with the download command for an unknown name."""
    if not isinstance(model, str | os.PathLike):
        return _saved(model)
    name = os.fspath(model)
    if (Path(name) / CONFIG_FILE).is_file() and not (Path(name) / "config.json").exists():
        config = read_json(Path(name) / CONFIG_FILE)
        from peft import PeftConfig

        return Start(start_of(str(config["base_model_name_or_path"])).folder, name, PeftConfig.from_pretrained(name))
    if "/" in name and not Path(name).exists():
        try:
            return Start(str(Path(str(cached_file(name, "config.json", local_files_only=True))).parent))
        except OSError:
            pass  # the next line names the download command
    read_model(name)
    return Start(name)


def _saved(model: Any) -> Start:
    """Save a model object, or the adapter of a PeftModel, in a temporary folder."""
    if not callable(getattr(model, "save_pretrained", None)):
        raise PlanError(f"model is a {type(model).__name__}; give a folder, a name, or a model of transformers or PEFT")
    if is_rank():
        raise PlanError("model is an object, which each rank would save for itself; give its folder or name")
    n_bytes, free = sum(p.nbytes for p in model.parameters()), shutil.disk_usage(gettempdir()).free
    if n_bytes > free:
        sizes = f"{show_bytes(n_bytes)}, to be saved, and {show_bytes(free)} are free"
        raise PlanError(f"model is an object of {sizes}; give its folder")
    saved = TemporaryDirectory(prefix="penstock-model-")
    say(f"the model object is saved in {saved.name}, to be read from there ({show_bytes(n_bytes)})")
    model.save_pretrained(saved.name)
    if (Path(saved.name) / CONFIG_FILE).exists():
        return start_of(saved.name)._replace(saved=saved)
    return Start(saved.name, saved=saved)


def tokenizer_of(folder: str) -> Any:
    """Return the tokenizer in a folder. PlanError if it has none."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PlanError(f"{folder or 'model'}: no tokenizer ({on_one_line(str(error), 99)}); give processing_class") from None


def router_loss_of(config: dict[str, Any]) -> float | None:
    """Return the coefficient that TRL uses by default for a model with routers: the configuration's own."""
    typed: Any = AutoConfig.for_model(**config).get_text_config()
    coefficient: float | None = getattr(typed, "router_aux_loss_coef", None) or None
    return None if getattr(typed, "output_router_logits", None) is None else coefficient


def leave_group() -> None:
    """Leave the process group that TrainingArguments has started for accelerate, if any. The ranks meet again on a free port of the
    first host: in the store of the launcher they would find addresses of the former group."""
    if torch.distributed.is_initialized():
        with socket() as free:
            free.bind(("", 0))
            port = [free.getsockname()[1]]
        torch.distributed.broadcast_object_list(port, src=0)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        os.environ |= {"MASTER_PORT": str(port[0]), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def profile_path() -> Path:
    """Return the file of this host's profile in the cache of Penstock."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    host = json.dumps([platform.node(), device, os.cpu_count()])
    return cache_folder() / "machines" / f"{hashlib.sha256(host.encode()).hexdigest()[:12]}.json"


def profile_of(machine: str | Path | Profile | None) -> str | Path | Profile:
    """Return the given machine, or the profile of this host: of a quick probe, kept in Penstock's cache for the next time."""
    if machine is not None:
        return machine
    path = profile_path()
    try:
        with alone(path.parent, f"{path.stem}.lock"):  # ranks of this host share one probe
            if not path.exists():
                print("penstock: measuring this machine once, for about 20 seconds", file=sys.stderr)
                write_whole(path, json.dumps(api.probe(quick=True).to_json()))
    except OSError as error:
        advice = "give machine=, or name a cache in PENSTOCK_CACHE"
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}); {advice}") from None
    return path
