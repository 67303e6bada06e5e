"""Can a file make us run its code?

Weights are never unpickled, objects never made from YAML, no library is asked to trust what comes with a model, and code that lies
beside a file stays there.
"""

import ast
import json
import pickle
from collections.abc import Iterator

import pytest

from penstock.data.data import read_data
from penstock.settings import DataSettings
from tests import fuzz_formats, fuzz_formats_run
from tests.fuzz_judge import World, judged
from tests.tiny import tiny_config
from tests.tour import ROOT

PACKAGES = ("planner", "runtime", "hwprofiles", "demo")
# Whose whole purpose is to run what it is given, or that make objects of any class; and where each may be used all the same.
FORBIDDEN = {
    "import": ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "imp", "runpy", "code"),
    "name": ("eval", "exec", "__import__", "execfile"),
    "attribute": (
        *(
            "torch.load",
            "torch.jit.load",
            "torch.hub.load",
            "torch.package.PackageImporter",
            "numpy.load",
            "np.load",
            "yaml.load",
            "yaml.full_load",
        ),
        *("yaml.unsafe_load", "yaml.load_all", "os.system", "os.popen", "os.execv", "os.fork", "pandas.read_pickle"),
        *("datasets.load_dataset", "jinja2.Environment", "importlib.import_module", "importlib.util.module_from_spec"),
    ),
}
ALLOWED = {
    ("penstock/cli/main.py", "importlib.import_module"),  # of our own commands, by a table of constants
}


def dangers(name: str, tree: ast.Module) -> Iterator[str]:
    """What in a file could run code that came with data."""
    for node in ast.walk(tree):
        found = None
        match node:
            case ast.Import(names=names):
                found = next((a.name for a in names if a.name.partition(".")[0] in FORBIDDEN["import"]), None)
                if any(a.name == "subprocess" for a in names):
                    found = "subprocess"
            case ast.ImportFrom(module=str(module), names=names):
                found = next((f"{module}.{a.name}" for a in names if f"{module}.{a.name}" in FORBIDDEN["attribute"]), None)
                if module.partition(".")[0] in FORBIDDEN["import"]:
                    found = module
            case ast.Call(func=ast.Name(id=called)) if called in FORBIDDEN["name"]:
                found = called
            case ast.Attribute() if (dotted := ast.unparse(node)) in FORBIDDEN["attribute"]:
                found = dotted
            case ast.keyword(arg="trust_remote_code", value=value) if not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                found = "trust_remote_code"
            case ast.keyword(arg="weights_only" | "allow_pickle", value=ast.Constant(value=bool())):
                found = "a loader that can unpickle"
        if found is not None and (name, found) not in ALLOWED:
            yield f"{getattr(node, 'lineno', 0)}: {found}"


@pytest.mark.parametrize("room", PACKAGES)
def test_nothing_of_ours_can_run_what_a_file_brings(room):
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / room).rglob("*.py") if "out" not in path.parts}
    assert files
    assert {name: found for name, path in files.items() if (found := list(dangers(name, ast.parse(path.read_text()))))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "import yaml\nyaml.load(text, Loader=yaml.UnsafeLoader)",
        "eval(text)",
        "import os\nos.system(text)",
        "import subprocess",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=settings.trust)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "from datasets import load_dataset",
        "import importlib\nimportlib.import_module(name)",
    ],
)
def test_what_could_run_a_files_code_is_seen(code):
    assert list(dangers("penstock/data/rows.py", ast.parse(code)))


@pytest.mark.parametrize("code", ["f(trust_remote_code=False)", "model.eval()", "import re\nre.compile(x)", "yaml.safe_load(text)"])
def test_what_cannot_is_not(code):
    assert not list(dangers("penstock/data/rows.py", ast.parse(code)))


# -- code that lies beside a file ---------------------------------------------------------------------------------------

AUTO_MAP = {
    "auto_map": {
        "AutoConfig": "configuration_evil.Evil",
        "AutoModelForCausalLM": "modeling_evil.Evil",
        "AutoTokenizer": ["tokenization_evil.Evil", None],
    },
    "trust_remote_code": True,
    "custom_pipelines": {"x": {"impl": "evil.Evil"}},
    "_attn_implementation": "evil/kernels",
    "attn_implementation": "evil/kernels",
    "quantization_config": {"quant_method": "evil"},
}


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_a_configuration_that_names_code_builds_the_known_model(tmp_path, model_type):
    of, world = fuzz_formats.FORMATS["config.json"], World(tmp_path)
    of.prepare(world)
    assert of.judge(world, json.dumps(tiny_config(model_type) | AUTO_MAP | {"quantization_config": None}).encode())
    of.judge(world, json.dumps(tiny_config(model_type) | AUTO_MAP).encode())
    assert not of.judge(world, json.dumps(tiny_config(model_type) | AUTO_MAP | {"model_type": "evil"}).encode())


def test_a_data_set_with_a_loading_script_is_read_as_files(tmp_path):
    """Scripts were once a way to ship data; a card may name one, or files elsewhere."""
    world = World(tmp_path)
    for name in ("dataset.jsonl", "a.jsonl"):
        (world.outside / name).write_text('{"text": "secret"}\n' * 9)
    folder = world.inside / "dataset"
    folder.mkdir()
    (world.inside / "dataset.py").rename(folder / "dataset.py")
    (folder / "a.jsonl").write_text('{"text": "To be, or not to be."}\n' * 9)
    card = "configs:\n- config_name: default\n  data_files: ../../outside/*.jsonl\n"
    (folder / "README.md").write_text(f"---\n{card}trust_remote_code: true\n---\n# A card\n")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"builder_name": "evil", "download_checksums": {}}}))
    (folder / "link.jsonl").symlink_to(world.outside / "a.jsonl")
    (folder / "state.pkl").write_bytes(pickle.dumps(print))

    def read() -> None:
        for streaming in (False, True):
            settings = DataSettings(str(folder), format="text", streaming=streaming)
            data = read_data(settings, None, 300, 16, 2, 0, world.inside / "tokens")
            said = "".join(chr(i) for step in range(20) for i in data.batch(step).input_ids.flatten().tolist() if i < 256)
            data.close()
            assert "To be" in said
            assert "secret" not in said

    read()  # what is imported the first time is no look outside
    assert judged(world, read)


def test_weights_that_are_pickled_are_not_opened(tmp_path):
    of, world = fuzz_formats_run.FORMATS["safetensors"], World(tmp_path)
    of.prepare(world)
    (world.inside / "model.safetensors").unlink()
    (world.inside / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert not judged(world, lambda: of.read(world.inside))
    (world.inside / "pytorch_model.bin").rename(world.inside / "model.safetensors")
    assert not judged(world, lambda: of.read(world.inside))
