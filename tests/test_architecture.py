"""Does the house keep its own rules?

Every rule is a function from a file's syntax tree to what is wrong with it, so each can be shown to find something.
"""

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from planner.cli import ELSEWHERE, cli
from planner.config import ARCHITECTURES
from runtime.plan import Op
from tests.tour import PAGE, ROOT, question, sources, tour

PACKAGES = ("planner", "hwprofiles", "runtime")

# Which files of other rooms a file may import; the key is a room, or a file where one differs from its room.
MAY_IMPORT = {
    "planner": {
        "hwprofiles.schema",
        *(
            f"runtime.{name}"
            for name in ("plan", "repetition", "workload", "timeline", "units", "errors", "region", "files", "footprint")
        ),
    },
    "hwprofiles": {"runtime.units", "runtime.errors", "runtime.files"},
    # What is timed is the runtime's own work, on the cores that it would use.
    "hwprofiles.works": {"runtime.memory", "runtime.optimizer", "runtime.slabs", "runtime.units"},
    "hwprofiles.measure": {"runtime.cores", "runtime.units", "runtime.errors"},
    "runtime": set[str](),
}

# Where each third-party library lives: replacing one is then the work of these files.
_COMMANDS = {*(f"planner/{name}.py" for name in ("cli_plan", "cli_compare")), "hwprofiles/cli.py"}
HOME = {
    "click": {
        *_COMMANDS,
        *(f"runtime/{name}.py" for name in ("cli", "cli_options", "cli_outcome", "cli_progress")),
        *(f"planner/{name}.py" for name in ("cli", "cli_check", "cli_options", "cli_validate", "cli_report", "cli_run_files")),
    },
    "rich": {*_COMMANDS, "runtime/cli_outcome.py", "runtime/cli_progress.py", "planner/explain.py"},
    "pydantic": {
        *(f"runtime/{name}.py" for name in ("plan", "ops", "policy", "workload", "settings", "run_config")),
        "hwprofiles/schema.py",
        *(f"planner/{name}.py" for name in ("claimed", "cli_plan", "cli_run_files")),
    },
    "torch": {
        *(f"runtime/{name}.py" for name in ("memory", "slabs", "host_state", "optimizer", "chunks", "norms")),
        *(f"runtime/{name}.py" for name in ("blocks", "tiles", "recompute", "compute", "torch_machine", "cpu")),
        *(f"runtime/{name}.py" for name in ("cuda", "streams", "staging", "trainer", "batch", "checkpoint", "tensor_files")),
        *(
            f"runtime/{name}.py"
            for name in ("documents", "layer_inputs", "tokens", "views", "inference", "evaluation", "generation", "meta_models")
        ),
        *(f"runtime/{name}.py" for name in ("samples", "prefetch")),
        *(f"runtime/{name}.py" for name in ("kernels", "pointwise", "attention")),
        *(f"runtime/{name}.py" for name in ("background", "saving", "resuming")),
        *(f"runtime/{name}.py" for name in ("schedules", "monitors")),
        *(f"hwprofiles/{name}.py" for name in ("measure", "works", "instruments", "cuda")),
    },
    "scipy": {"hwprofiles/fit.py", "planner/integer.py"},
    "transformers": {
        "runtime/meta_models.py",
        "runtime/templates.py",
        "runtime/documents.py",
        "runtime/generation.py",
        "runtime/kernels.py",
        "runtime/schedules.py",
    },
    "safetensors": {"runtime/tensor_files.py"},
    "tokenizers": {"runtime/encoders.py"},
    "datasets": {"runtime/token_cache.py", "runtime/streamed.py"},
    "pyarrow": {"runtime/token_cache.py", "runtime/sources.py"},
    "yaml": {"runtime/run_config.py"},
    **{library: {"runtime/monitors.py"} for library in ("tensorboard", "wandb", "mlflow")},
    "numpy": {
        *(
            f"runtime/{name}.py"
            for name in ("data", "encoders", "chat", "packing", "token_cache", "reading", "samples", "streamed")
        ),
        "planner/integer.py",
    },
}

IMPORTED_AS = {"PyYAML": "yaml"}  # where a distribution has another name than its module
MONITORS = {"tensorboard", "wandb", "mlflow"}  # imported when a run asks for them, and said to be missing when they are

# What planning touches: the machine it runs on need not have torch.
TORCH_FREE_ROOMS = ("planner",)
TORCH_FREE_FILES = (
    *(
        f"runtime/{name}.py"
        for name in (
            "plan",
            "ops",
            "repetition",
            "policy",
            "workload",
            "timeline",
            "units",
            "errors",
            "region",
            "cores",
            "cli",
            "settings",
            "footprint",
        )
    ),
    *(f"runtime/{name}.py" for name in ("settings", "run_config", "cli_options")),
    *(f"hwprofiles/{name}.py" for name in ("schema", "curves", "cli", "samples", "stopwatch", "device", "gpu", "gpu_link")),
    *(f"hwprofiles/{name}.py" for name in ("cliffs", "nvbandwidth", "pci")),
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_files() -> list[Path]:
    return [path for path in sources() if path.relative_to(ROOT).parts[0] in PACKAGES]


FILES = pytest.mark.parametrize("path", package_files(), ids=_name)
ALL_FILES = pytest.mark.parametrize("path", sources(), ids=_name)


def imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """(module, relative level, at the top of the file) of every import; `from a import b` names both a and a.b."""
    top = set(ast.walk(ast.Module([node for node in tree.body if not isinstance(node, ast.ClassDef)], [])))
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                top -= set(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module in PACKAGES:  # from runtime import plan
                yield from ((f"{node.module}.{alias.name}", 0, node in top) for alias in node.names)
            else:
                yield node.module or "", node.level, node in top


def wrong_directions(module: str, tree: ast.Module) -> list[str]:
    """The imports of a file that run against the house."""
    room, is_shell = module.partition(".")[0], module.rpartition(".")[2].split("_")[0] == "cli"
    allowed = MAY_IMPORT.get(module, MAY_IMPORT[room])
    wrong = []
    for target, level, at_top in imports(tree):
        target_room = target.partition(".")[0]
        if level > 1:
            wrong.append(f"{'.' * level}{target}: rooms have one floor")
        elif level == 0 and target_room == room:
            wrong.append(f"{target}: inside a room use a dot")
        elif level == 0 and target_room in PACKAGES:
            fits = {target, f"{target_room}.*"} & allowed
            if is_shell and (not at_top or target.endswith(".cli")):
                continue  # the shell may import any room inside a command, and other shells anywhere
            if not fits:
                wrong.append(f"{target}: {module} may import {sorted(allowed) or 'no other room'}")
        elif level == 1 and target == "cli" and not is_shell:
            wrong.append(".cli: only the shell knows the shell")
    return wrong


def homeless(name: str, tree: ast.Module) -> list[str]:
    """The third-party libraries that a file imports and is no home of."""
    known = {*sys.stdlib_module_names, *PACKAGES}
    found = {target.partition(".")[0] for target, level, _ in imports(tree) if level == 0}
    return sorted(library for library in found - known if name not in HOME.get(library, set()))


def smells(name: str, text: str) -> list[str]:
    """What review would stop in a file, one line each."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id="hasattr")):
                found.append(f"{node.lineno}: hasattr is no type test")
            case ast.ExceptHandler(type=None):
                found.append(f"{node.lineno}: a bare except hides the error it did not mean")
            case ast.Global():
                found.append(f"{node.lineno}: global")
            case ast.Attribute(value=ast.Name(id="sys"), attr="path"):
                found.append(f"{node.lineno}: sys.path")
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv") if not name.endswith("cli.py"):
                if name.partition("/")[0] in PACKAGES:
                    found.append(f"{node.lineno}: the environment is read in cli.py only")
            case ast.ClassDef() if node.name.endswith(("Manager", "Helper", "Util", "Base")):
                found.append(f"{node.lineno}: {node.name} says nothing")
    if re.search(r"_(util|helper)s?\.py$", name):
        found.append("the file's name says nothing")
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.COMMENT and re.search(r"type: ignore(?!\[)", token.string):
            found.append(f"{token.start[0]}: type: ignore without a code")
        if token.type == tokenize.COMMENT and "temporarily" in token.string:
            found.append(f"{token.start[0]}: temporarily")
    return found


def tree_files() -> list[Path]:
    """Every text file that belongs to the project."""
    kinds = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".html", ".css", ".js", ""}
    files = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        ours = (
            path.name != ".git"
            and not hidden
            and not {"build", "dist", "out", "__pycache__"} & set(parts)
            and ".egg-info" not in str(path)
        )
        if ours and path.suffix in kinds and path.is_file():
            files.append(path)
    return files


_MACHINE_PATH = re.compile(r"(?<![\w.~<])/(?:work|root|home/\w+|Users/\w+|tmp/\w+)/")


@ALL_FILES
def test_the_first_line_of_a_file_asks_the_question_it_answers(path: Path) -> None:
    assert question(path).endswith("?"), f"{_name(path)} begins with {question(path)!r}"


def test_no_two_files_answer_the_same_question() -> None:
    questions = [question(path) for path in package_files() if path.name != "__init__.py"]
    assert len(set(questions)) == len(questions)


@FILES
def test_imports_run_one_way(path: Path) -> None:
    assert wrong_directions(_module(path), ast.parse(path.read_text())) == []


@FILES
def test_every_third_party_library_has_a_home(path: Path) -> None:
    assert homeless(_name(path), ast.parse(path.read_text())) == []


@ALL_FILES
def test_nothing_smells(path: Path) -> None:
    assert smells(_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("runtime.executor", "from planner.lower import lower"),
        ("runtime.executor", "def f():\n    import hwprofiles.schema"),
        ("planner.lower", "from runtime.executor import execute"),
        ("planner.lower", "from runtime import executor"),
        ("planner.lower", "import planner.cost"),
        ("planner.lower", "from ..runtime import plan"),
        ("planner.lower", "from hwprofiles.measure import copies"),
        ("hwprofiles.schema", "from runtime.plan import Plan"),
        ("hwprofiles.measure", "from runtime.executor import execute"),
        ("hwprofiles.curves", "from planner.cost import costs"),
        ("planner.cli", "from runtime.executor import execute"),
        ("planner.search", "from .cli import main"),
    ],
)
def test_an_import_against_the_house_is_seen(module: str, code: str) -> None:
    assert wrong_directions(module, ast.parse(code))


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("planner.cli", "def plan():\n    from runtime.executor import execute"),
        ("planner.cli", "if TYPE_CHECKING:\n    from runtime.executor import execute"),
        ("planner.cli", "from runtime.cli import run"),
        (
            "planner.lower",
            "from runtime.plan import Plan\nfrom .cost import costs\nfrom hwprofiles.schema import Profile",
        ),
        ("hwprofiles.works", "from runtime.optimizer import adamw_"),
    ],
)
def test_an_import_with_the_house_is_not_stopped(module: str, code: str) -> None:
    assert wrong_directions(module, ast.parse(code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "hasattr(x, 'y')",
        "try:\n    pass\nexcept:\n    pass",
        "def f():\n    global x",
        "import sys\nsys.path.append('x')",
        "import os\nos.environ['X']",
        "x = 1  # type: ignore",
        "class SlotManager: ...",
        "x = 1  # temporarily",
    ],
)
def test_a_smell_is_seen(code: str) -> None:
    assert smells("runtime/lanes.py", code)


def test_a_name_that_says_nothing_is_seen_and_a_shell_may_read_the_environment() -> None:
    assert smells("runtime/slot_utils.py", "x = 1")
    assert smells("runtime/cli.py", "import os\nos.environ['X']") == []


def test_a_library_without_a_home_is_seen() -> None:
    tree = ast.parse("import torch.nn\nimport requests\nimport json")
    assert homeless("planner/lower.py", tree) == ["requests", "torch"]


def test_every_home_is_lived_in_and_every_permission_is_used() -> None:
    trees = {_module(path): ast.parse(path.read_text()) for path in package_files()}
    imported = {module: {(target, level) for target, level, _ in imports(tree)} for module, tree in trees.items()}
    for library, files in HOME.items():
        for name in files:
            module = name.removesuffix(".py").replace("/", ".")
            assert any(target.partition(".")[0] == library for target, _ in imported[module]), f"{name} has no use for {library}"
    for permit, targets in MAY_IMPORT.items():
        used = {t for module, found in imported.items() if module == permit or module.startswith(f"{permit}.") for t, _ in found}
        assert targets <= used, f"{permit} imports none of {sorted(targets - used)}"


def test_every_declared_dependency_has_a_home_and_every_home_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["run"]]
    imported = {IMPORTED_AS.get(name, name) for name in (line.partition(">=")[0] for line in declared)}
    assert imported | MONITORS == set(HOME)


def test_every_declared_dependency_is_pinned_for_the_tests_within_its_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    pinned = dict(line.split("==") for line in lines)
    for group in (project["dependencies"], *project["optional-dependencies"].values()):
        for name, _, bound in (declared.partition(">=") for declared in group):
            assert _release(pinned[name]) >= _release(bound), name


def _release(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_tour_says_what_the_files_ask() -> None:
    assert PAGE.read_text(encoding="utf-8") == tour(), "write it again with `make tour`"


def test_planning_does_not_wake_torch() -> None:
    files = [p for p in package_files() if p.parent.name in TORCH_FREE_ROOMS or _name(p) in TORCH_FREE_FILES]
    assert len(files) > 5
    code = (
        f"import importlib, sys\nfor name in {[_module(path) for path in files]}: importlib.import_module(name)\n"
        "woken = {'torch', 'transformers', 'safetensors', 'tokenizers'} & set(sys.modules)\nassert not woken, woken"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["plan", "qwen2.5-7b", "--machine", "rtx4090-server", "--batch-size", "2"], 0, "predicted"),
        (["run", "plan.json", "--data", "."], 2, "error: this needs torch, which the base install leaves out"),
        (["probe"], 2, "error: this needs torch, which the base install leaves out"),
    ],
)
def test_the_base_install_plans_and_says_what_running_and_probing_need(words: list[str], exit_code: int, said: str) -> None:
    """With nothing but what `pip install .` brings: every other declared library is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {line.partition(">=")[0] for group in project["optional-dependencies"].values() for line in group}
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {extras}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import planner.cli\n"
        f"planner.cli.cli({words})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == exit_code, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {library: version for library, _, version in (line.partition("==") for line in lines) if version}


def test_the_oldest_versions_that_are_allowed_are_those_that_the_tests_are_run_with() -> None:
    """Of torch and transformers; everything else is what it always is, but for what the older transformers cannot use."""
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    bounds = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["run"]
    allowed = {library: version for library, _, version in (line.partition(">=") for line in bounds)}
    for library in ("torch", "transformers"):
        assert oldest[library].removesuffix(".0") == allowed[library]
    assert oldest.keys() == newest.keys()
    assert {library for library in oldest if oldest[library] != newest[library]} == {"torch", "transformers", "huggingface_hub"}


def test_the_package_names_resolve_to_this_repository() -> None:
    """Both names exist on the package index."""
    code = "import planner, hwprofiles, runtime\nfor room in (planner, hwprofiles, runtime): print(room.__file__)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [Path(line).parent for line in out.splitlines()] == [ROOT / package for package in PACKAGES]


def test_the_distribution_holds_every_room_and_its_data() -> None:
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sorted(file["tool"]["setuptools"]["packages"]) == sorted(PACKAGES)
    assert "Private :: Do Not Upload" in file["project"]["classifiers"]
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


@pytest.mark.parametrize("page", [path for path in tree_files() if path.suffix == ".md"], ids=_name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


_FIGURE = re.compile(r"(?<![\w.])\d[\d.,]*\s?(?:%|x\b|[munµ]?s\b|tokens/s|(?:[KMGT]i?)?B(?:/s)?\b|[GTP]?FLOP)")


def test_every_number_in_the_readme_links_to_the_page_that_made_it() -> None:
    places = re.split(r"\n\n|\n(?=\|)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [place for place in places if _FIGURE.search(place) and "](docs/" not in place] == []
    assert all(
        _FIGURE.search(text) for text in ("1.3x faster", "a step of 2.9 s", "within 5 %", "900 tokens/s", "80 GB", "2 TFLOP/s")
    )
    assert not _FIGURE.search("Python 3.11 or newer, two cores, ops ^ 12, b3 m0")


def test_the_op_that_the_readme_shows_is_one() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"^(?:load|forward|loss|backward|offload|accumulate|norm|update|spill|fetch|speculate|settle|recompute) .*$", readme, re.M
    )
    assert shown
    assert [str(Op.parse(line)) for line in shown] == shown


def test_the_readme_names_every_command_and_every_supported_model_type() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = {line.split()[1] for line in readme.splitlines() if line.startswith("penstock ")}
    assert commands == {*cli.commands, *ELSEWHERE}
    row = next(line for line in readme.splitlines() if line.startswith("| models |"))
    assert sorted(row.partition("models |")[2].partition(";")[0].replace(",", "").split()) == sorted(ARCHITECTURES)


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    found = [
        f"{_name(path)}: {match[0]}" for path in tree_files() for match in _MACHINE_PATH.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert _MACHINE_PATH.search("see " + "/wor" + "k/main/x")
