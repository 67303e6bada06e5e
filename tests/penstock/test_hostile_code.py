"""Code in files: no unpickling of weights, no objects from YAML, no code next to a model or data set."""

import ast
import json
import pickle
from collections.abc import Iterator

import pytest

from tests.hostile import CODE, PLAN, judged
from tests.running import penstock
from tests.tiny import tiny_config
from tests.tour import ROOT

PACKAGES = ("penstock", "planner", "runtime", "hwprofiles", "demo")
# Functions that run code or construct objects of any class.
MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "imp", "runpy", "code", "subprocess")
BUILTINS = ("eval", "exec", "__import__", "execfile")
FUNCTIONS = (
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "numpy.load", "np.load"),
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "pandas.read_pickle", "jinja2.Environment"),
    *("os.system", "os.popen", "os.execv", "os.fork", "importlib.import_module", "importlib.util.module_from_spec"),
)
BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # shipped with `datasets`
ALLOWED = {
    ("penstock/cli/main.py", "importlib.import_module"),  # modules of commands, from a table of constants
    ("penstock/__init__.py", "importlib.import_module"),
    ("penstock/ranks.py", "subprocess"),
    ("penstock/replanning.py", "subprocess"),  # this interpreter, on this module
    ("penstock/user_loss.py", "importlib.util.module_from_spec"),  # file named on the command line, not by a plan
    ("penstock/user_loss.py", "exec"),
    ("penstock/model_checks/missing_kernels.py", "importlib.import_module"),  # packages, from a table of constants
    ("planner/show/page.py", "jinja2.Environment"),  # template of this package
}


def dangers(name: str, tree: ast.Module) -> Iterator[str]:
    """Return the lines of a source file that could run code shipped with data."""
    for node in ast.walk(tree):
        danger = None
        match node:
            case ast.Import(names=names):
                danger = next((a.name for a in names if a.name.partition(".")[0] in MODULES), None)
            case ast.ImportFrom(module=str(module), names=names):
                danger = next((f"{module}.{a.name}" for a in names if f"{module}.{a.name}" in FUNCTIONS), None)
                danger = module if module.partition(".")[0] in MODULES else danger
            case ast.Call(func=ast.Name(id=called)) if called in BUILTINS:
                danger = called
            case ast.Call(func=ast.Name(id="load_dataset") | ast.Attribute(attr="load_dataset"), args=args) if not (
                args and isinstance(args[0], ast.Constant) and args[0].value in BUILDERS
            ):
                danger = "a data set that may bring its own code"
            case ast.Attribute() if (dotted := ast.unparse(node)) in FUNCTIONS:
                danger = dotted
            case ast.keyword(arg="trust_remote_code", value=value) if ast.unparse(value) != "False":
                danger = "trust_remote_code"
            case ast.keyword(arg="weights_only" | "allow_pickle", value=ast.Constant(value=bool())):
                danger = "a loader that can unpickle"
        if danger is not None and (name, danger) not in ALLOWED:
            yield f"{getattr(node, 'lineno', 0)}: {danger}"


@pytest.mark.parametrize("room", PACKAGES)
def test_no_file_of_ours_can_run_what_a_file_brings(room):
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / room).rglob("*.py") if "out" not in path.parts}
    assert files
    assert {name: lines for name, path in files.items() if (lines := list(dangers(name, ast.parse(path.read_text()))))} == {}


def test_code_that_could_run_a_file_is_seen():
    def dangers_in(code):
        return bool(list(dangers("penstock/data/files.py", ast.parse(code))))

    for code in ("import pickle", "from pickle import loads", "torch.load(path)", "from torch import load", "eval(text)"):
        assert dangers_in(code)
    for code in ("yaml.load(text)", "f(trust_remote_code=trust)", "np.load(path, allow_pickle=True)", "load_dataset(path)"):
        assert dangers_in(code)
    for code in ("f(trust_remote_code=False)", "model.eval()", "yaml.safe_load(text)", 'load_dataset("json")'):
        assert not dangers_in(code)


NAMES_CODE = {
    "auto_map": {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"},
    "trust_remote_code": True,
    "custom_pipelines": {"x": {"impl": "evil.Evil"}},
    "attn_implementation": "evil/kernels",
}


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_a_configuration_that_names_code_builds_the_known_model(house, model_type):
    plan = [*PLAN, "megatrain", "-o", "new.json"]
    run = ["run", "new.json", "--data", "data.jsonl", "--steps", "1", "--out", "out", "--from-scratch", "--tokenizer", "bytes"]
    (house / "model" / "config.json").write_text(json.dumps(tiny_config(model_type, vocab_size=400) | NAMES_CODE))
    for words in (plan, run):
        assert judged(house, words) == 0
    (house / "model" / "config.json").write_text(json.dumps(tiny_config(model_type) | NAMES_CODE | {"model_type": "evil"}))
    assert judged(house, plan) == 2


def test_a_tokenizer_that_names_code_is_the_one_in_its_file(house):
    path = house / "model" / "tokenizer_config.json"
    named = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | NAMES_CODE | named))
    assert judged(house, ["data", "chats.jsonl", "--model", "model"]) == 0


def test_a_data_set_with_a_loading_script_is_read_as_files(house):
    folder = house / "dataset"
    folder.mkdir()
    (folder / "dataset.py").write_text(CODE)
    (folder / "a.jsonl").write_text('{"text": "To be, or not to be."}\n' * 9)
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: ../../outside/*.jsonl\n---\n# A card\n")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"builder_name": "evil", "download_checksums": {}}}))
    (folder / "state.pkl").write_bytes(pickle.dumps(print))
    assert judged(house, ["data", "dataset"]) == 2  # the pickle is no text
    assert judged(house, ["data", "dataset", "--bad-rows", "50%"]) == 0
    assert "To be" in penstock("data", "dataset", "--samples", 20, "--bad-rows", "50%").stdout
    (folder / "link.jsonl").symlink_to(house.parent / "outside" / "secret.jsonl")
    assert judged(house, ["data", "dataset"]) == 2


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_that_are_pickled_are_not_opened(house, name):
    (house / "weights" / "model.safetensors").unlink()
    (house / "weights" / name).write_bytes(b"cos\nsystem\n(S'touch EXECUTED'\ntR.")
    assert judged(house, ["run", "plan.json", "--data", "data.jsonl", "--model", "weights", "--tokenizer", "bytes"]) == 2
