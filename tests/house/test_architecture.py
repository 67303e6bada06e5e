"""Architecture: directions of imports, line budgets, allowed places of libraries, generated pages.

A rule is a function from a file's syntax tree to its violations, so that tests can show that it finds some.
"""

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import fields
from graphlib import CycleError, TopologicalSorter
from io import StringIO
from pathlib import Path

import pytest
from packaging.version import Version
from setuptools import find_packages

from penstock.cli.main import COMMANDS
from penstock.runtime.plan import OPS, Kind, Policy
from tests import tour
from tests.running import penstock
from tests.tour import LINKED, READING, ROOT, first_line, full_name, imports, is_package, needs, sources
from tests.tour import module_of as _module

PACKAGES = ("penstock", "planner", "runtime", "hwprofiles")
GROUND = {"runtime.errors", "runtime.units", "runtime.files"}

# Packages and files that a package may import in addition to its own; penstock may import everything.
MAY_IMPORT = {
    "planner": {
        *(f"hwprofiles.{name}" for name in ("schema", "components", "quantity", "device_parts", "curves", "op_laws")),
        *("runtime.plan", "runtime.compiled"),
        *GROUND,
    },
    # Layer traces of models that are not shipped are recorded from the modules that the runtime trains
    "planner.model": {
        *(f"runtime.layers.{name}" for name in ("kernels", "layer_chain", "meta_models", "model_parts", "transformers_patches")),
        *("hwprofiles.schema", "runtime.plan", "runtime.errors", "runtime.files"),
    },
    "hwprofiles": GROUND,
    # The probe times functions of the runtime, on the cores of a run.
    "hwprofiles.probe": {
        *(f"hwprofiles.{name}" for name in ("schema", "components", "quantity", "instructions")),
        *(f"runtime.{name}" for name in ("host", "machines", "compute", "plan", "errors", "layers", "scaled_products", "units")),
    },
    "runtime": set[str](),
    "penstock": {"planner", "runtime", "hwprofiles"},
}
MOST_FILES = 13  # per folder; raised only in a commit that states the reason
MOST_KNOBS = 15  # fields of a policy; the last one selects blocks with gradient sums on the device
MOST_KINDS = 23  # kinds of ops; three are collectives, one unpacks weights, one reads a disk
# Maximum lines of *.py per package. A commit that raises one does nothing else, and names the issue that grants the lines.
MOST_LINES = {"runtime/plan": 2_669, "runtime": 8_796, "planner": 12_370, "hwprofiles": 2_839, "penstock": 15_225}
MOST_LINES |= {"tests": 33_368, "benchmarks": 10_442}

# Folders and files that may import a third-party library, so that replacing it affects only these
HOME = {
    "click": {"penstock/cli"},
    "rich": {"penstock/results.py", "penstock/cli", "planner/show/text.py"},
    "pydantic": {
        *("runtime/plan", "penstock/settings.py", "penstock/run_config.py", "hwprofiles/schema.py"),
        *(f"hwprofiles/{name}.py" for name in ("components", "quantity", "op_laws")),
        *(
            "planner/search/claim.py",
            "penstock/api.py",
            "penstock/checkpoint/best.py",
            "penstock/checkpoint/checkpoint.py",
            "penstock/run_files.py",
        ),
    },
    "torch": {
        *(f"runtime/{name}" for name in ("cuda", "host", "layers", "compute", "machines")),
        *(f"penstock/{name}" for name in ("chat", "checkpoint", "data", "hf", "model_checks", "training", "vision")),
        *("runtime/batch.py", "runtime/ranks.py", "runtime/scaled_products.py", "penstock/emulated.py", "penstock/user_loss.py"),
        "hwprofiles/probe",
        *(f"planner/model/{name}.py" for name in ("record", "layer_traces")),
    },
    **{library: {"planner/show/page.py"} for library in ("jinja2", "markupsafe")},
    "scipy": {"planner/bounds/integer.py"},
    "numba": {"runtime/compiled.py", "runtime/host/compiled_loops.py"},
    "llvmlite": {"runtime/host/compiled_loops.py"},
    "transformers": {
        *("runtime/layers/transformers_patches.py", "penstock/checkpoint/conversion.py", "penstock/hf"),
        *(f"penstock/data/{name}.py" for name in ("chat", "tokenizer", "documents", "image_processor")),
    },
    "PIL": {"penstock/data/images.py"},
    "safetensors": {"penstock/checkpoint/tensor_files.py"},
    "tokenizers": {"penstock/data/tokenizer.py", "penstock/data/documents.py"},
    "datasets": {"penstock/data/documents.py", "penstock/data/sampling.py", "penstock/arguments/objects.py"},
    "pyarrow": {"penstock/data/files.py"},
    "yaml": {"penstock/run_config.py"},
    "peft": {"penstock/checkpoint/adapter_files.py", "penstock/hf"},  # hf: the user's configuration is one of PEFT
    **{library: {"penstock/training/monitors.py"} for library in ("wandb", "mlflow")},
    "numpy": {
        *("penstock/data", "planner/bounds", "planner/lower", "planner/predict", "planner/search"),
        *("planner/show/memory.py", "runtime/compiled.py"),
        *(f"runtime/host/{name}.py" for name in ("chunks", "compiled_loops", "rounding")),
    },
}

# Distributions with another name than their module
IMPORTED_AS = {"PyYAML": "yaml", "Jinja2": "jinja2", "MarkupSafe": "markupsafe", "pillow": "PIL"}
MONITORS = {"wandb", "mlflow"}  # optional, imported on request

# Modules that must not import torch, because planning works without it. The command-line layer imports it when a command needs it.
TORCH_FREE = (
    *("planner", "runtime/plan", *(f"runtime/{name}.py" for name in ("compiled", "errors", "files", "units"))),
    *("penstock/cli", "penstock/run_config.py"),
    *(f"penstock/{name}.py" for name in ("__init__", "__main__", "api", "ranks", "results", "run_files")),
    *(f"penstock/{name}.py" for name in ("settings", "signals", "version")),
    *(f"hwprofiles/{name}.py" for name in ("schema", "components", "quantity", "op_laws", "curves")),
    "hwprofiles/probe/cliffs.py",
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_files() -> list[Path]:
    return [path for path in sources() if path.relative_to(ROOT).parts[0] in PACKAGES]


def package_of(module: str) -> str:
    """Return the package of a module, or the module itself if it is directly in a top-level package."""
    parent = module.rpartition(".")[0]
    return parent if parent and parent not in PACKAGES else module


def _is_in(name: str, homes: Collection[str]) -> bool:
    """True if a file is one of these, or in one of these folders."""
    return any(name == home or name.startswith(f"{home}/") for home in homes)


def wrong_directions(module: str, tree: ast.Module) -> list[str]:
    """Return the imports of a file that violate the directions."""
    top = module.partition(".")[0]
    allowed = MAY_IMPORT.get(package_of(module), MAY_IMPORT[top])
    wrong = []
    for target, level in imports(tree):
        if level > 1:
            wrong.append(f"{'.' * level}{target}: import other packages by their full name")
        elif level == 0 and target.partition(".")[0] in PACKAGES:
            is_own = target.partition(".")[0] == top and (module == top or package_of(module) not in MAY_IMPORT)
            if package_of(target) == package_of(module) and target != module:
                wrong.append(f"{target}: use a relative import inside a package")
            elif not is_own and not any(target == permitted or target.startswith(f"{permitted}.") for permitted in allowed):
                wrong.append(f"{target}: {package_of(module)} may import {sorted(allowed) or 'no other package'}")
    return wrong


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """Syntax trees of all files, parsed once."""
    return {path: ast.parse(path.read_text()) for path in package_files()}


def arrows(trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return the packages that each package imports, late imports included."""
    edges: dict[str, set[str]] = {}
    for path, tree in trees.items():
        importer = package_of(_module(path))
        for target, level in imports(tree):
            if level == 0 and target.partition(".")[0] in PACKAGES:
                imported = target if is_package(target) or target == "runtime.plan" else package_of(target)
                if imported != importer:
                    edges.setdefault(importer, set()).add(imported)
    return edges


def forbidden(name: str, tree: ast.Module) -> list[str]:
    """Return the third-party libraries that a file imports without permission."""
    known = {*sys.stdlib_module_names, *PACKAGES}
    libraries = {target.partition(".")[0] for target, level in imports(tree) if level == 0}
    return sorted(library for library in libraries - known if not _is_in(name, HOME.get(library, set())))


def smells(name: str, text: str) -> list[str]:
    """Return code smells of a file, one line each."""
    problems: list[str] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id="hasattr")):
                problems.append(f"{node.lineno}: hasattr is not a type test")
            case ast.ExceptHandler(type=None):
                problems.append(f"{node.lineno}: a bare except hides other errors")
            case ast.Global():
                problems.append(f"{node.lineno}: global")
            case ast.Attribute(value=ast.Name(id="sys"), attr="path"):
                problems.append(f"{node.lineno}: sys.path")
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv") if not name.startswith("penstock/"):
                if name.partition("/")[0] in PACKAGES:
                    problems.append(f"{node.lineno}: only penstock may read the environment")
            case ast.ClassDef() if node.name.endswith(("Manager", "Helper", "Util", "Base")):
                problems.append(f"{node.lineno}: {node.name} is a vague name")
    if re.search(r"_(util|helper)s?\.py$", name):
        problems.append("vague file name")
    words = re.search("type: ignore|temporarily", text)  # fast check before tokenizing
    for token in tokenize.generate_tokens(StringIO(text).readline) if words else ():
        if token.type == tokenize.COMMENT and re.search(r"type: ignore(?!\[)", token.string):
            problems.append(f"{token.start[0]}: type: ignore without a code")
        if token.type == tokenize.COMMENT and "temporarily" in token.string:
            problems.append(f"{token.start[0]}: temporarily")
    return problems


def tree_files() -> list[Path]:
    kinds = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".html", ".css", ".js", ""}
    files = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        is_made = {".git", "build", "dist", "out", "__pycache__"} & set(parts) or ".egg-info" in str(path)
        if not hidden and not is_made and path.suffix in kinds and path.is_file():
            files.append(path)
    return files


_MACHINE_PATH = re.compile(r"(?<![\w.~<])/(?:work|root|home/\w+|Users/\w+|tmp/\w+)/")


def test_the_first_line_of_a_file_says_what_it_is_about() -> None:
    lines = Counter(first_line(path) for path in package_files())
    assert [line for line, n in lines.items() if n > 1 or not line] == []


def test_imports_run_one_way(trees: dict[Path, ast.Module]) -> None:
    wrong = {_name(path): wrong_directions(_module(path), tree) for path, tree in trees.items()}
    assert {name: problems for name, problems in wrong.items() if problems} == {}


def short_imports(tree: ast.AST) -> list[str]:
    """Return imports of LINKED folders without `penstock.`; in the root of the tree they would import a second copy of a module."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return [name for name in names if name.partition(".")[0] in LINKED]


def test_modules_are_imported_by_their_full_names() -> None:
    files = [*sources(), *(ROOT / "benchmarks").rglob("*.py")]
    assert {_name(path): names for path in files if (names := short_imports(ast.parse(path.read_text())))} == {}
    assert short_imports(ast.parse("import planner.search\nfrom runtime import plan")) == ["planner.search", "runtime"]
    assert short_imports(ast.parse("from penstock.runtime import plan\nfrom .runtime import x")) == []


def test_package_imports_have_no_cycle(trees: dict[Path, ast.Module]) -> None:
    """Package imports have no cycle, late imports included, and no package imports penstock."""
    graph = arrows(trees)
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) > 20
    packages = {package: imported for package, imported in graph.items() if not package.startswith("penstock")}
    assert [package for package, imported in packages.items() if any(name.startswith("penstock") for name in imported)] == []
    with pytest.raises(CycleError):
        TopologicalSorter(graph | {"runtime.plan": {"planner.search"}}).prepare()


def test_file_imports_have_no_cycle(trees: dict[Path, ast.Module]) -> None:
    graph = needs(trees)
    assert len(list(TopologicalSorter(graph).static_order())) > 150
    with pytest.raises(CycleError):
        TopologicalSorter(graph | {"runtime.plan.ops": {"runtime.executor"}}).prepare()


def test_folders_and_packages_are_within_their_ceilings() -> None:
    folders = Counter(path.parent for path in package_files() if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > MOST_FILES} == {}
    lines = Counter[str]()
    for path in (*sources(), *(ROOT / "benchmarks").rglob("*.py")):
        name = _name(path)
        lines["runtime/plan" if name.startswith("runtime/plan/") else name.partition("/")[0]] += len(path.read_text().splitlines())
    assert {package: n for package, n in lines.items() if n > MOST_LINES.get(package, n)} == {}


def test_a_policy_has_few_knobs_and_the_language_few_kinds_of_op() -> None:
    assert len(fields(Policy)) <= MOST_KNOBS
    assert len(OPS) == len(Kind) <= MOST_KINDS


def test_third_party_libraries_are_imported_where_permitted(trees: dict[Path, ast.Module]) -> None:
    wrong = {_name(path): forbidden(_name(path), tree) for path, tree in trees.items()}
    assert {name: libraries for name, libraries in wrong.items() if libraries} == {}


def test_files_have_no_code_smells() -> None:
    wrong = {_name(path): smells(_name(path), path.read_text()) for path in sources()}
    assert {name: problems for name, problems in wrong.items() if problems} == {}


def test_each_rule_finds_what_it_forbids_and_nothing_else() -> None:
    for module, code in (
        ("runtime.executor", "def f():\n    import hwprofiles.schema"),
        ("planner.lower.lower", "from runtime import executor"),
        ("planner.lower.lower", "import planner.lower.waits"),
        ("planner.lower.lower", "from ..predict import cost"),
        ("hwprofiles.schema", "from penstock.runtime.plan import Plan"),
        ("planner.search.search", "from penstock.cli.main import main"),
    ):
        assert wrong_directions(module, ast.parse(code))
    for module, code in (
        ("penstock.cli.run", "def plan():\n    from runtime.executor import execute"),
        ("planner.lower.lower", "from penstock.runtime.plan import Plan\nfrom .waits import waits_of\nimport hwprofiles.schema"),
        ("hwprofiles.probe.kernels_to_time", "from runtime.host.optimizer import Step"),
    ):
        assert wrong_directions(module, ast.parse(code)) == []
    for code in (
        "hasattr(x, 'y')",
        "def f():\n    global x",
        "import os\nos.environ['X']",
        "x = 1  # type: ignore",
        "class AManager: ...",
    ):
        assert smells("runtime/lanes.py", code)
    assert smells("penstock/cli/run.py", "import os\nos.environ['X']") == []
    assert forbidden("planner/lower/lower.py", ast.parse("import torch.nn\nimport requests\nimport json")) == ["requests", "torch"]


def test_every_permitted_import_is_used(trees: dict[Path, ast.Module]) -> None:
    imported = {_name(path): {target for target, level in imports(tree) if level == 0} for path, tree in trees.items()}
    for library, homes in HOME.items():
        for home in homes:
            imports_of = (target for name, targets in imported.items() if _is_in(name, {home}) for target in targets)
            assert any(target.partition(".")[0] == library for target in imports_of), f"{home} does not import {library}"
    for permit, permitted in MAY_IMPORT.items():
        used = {target for name, targets in imported.items() if _is_in(name, {permit.replace(".", "/")}) for target in targets}
        for module in permitted:
            assert any(target == module or target.startswith(f"{module}.") for target in used), f"{permit} imports no {module}"


def test_declared_dependencies_are_those_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]  # num2words is imported by a processor of transformers
    declared = [*project["dependencies"], *extras["run"], *extras["fast"], *extras["images"][:1]]
    imported = {IMPORTED_AS.get(name, name) for name in (line.partition(">=")[0] for line in declared)}
    assert imported | MONITORS == set(HOME)


def test_every_declared_dependency_is_pinned_within_its_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins("constraints.txt")
    for group in (project["dependencies"], *project["optional-dependencies"].values()):
        for name, _, bound in (declared.partition(">=") for declared in group):
            assert Version(pinned[name]) >= Version(bound.partition(";")[0]), name


def test_generated_pages_are_those_of_today(trees: dict[Path, ast.Module]) -> None:
    pages = {tour.PAGE: tour.tour(), tour.LEVELS: tour.levels(trees), tour.API: tour.api(), tour.ARGUMENTS: tour.arguments()}
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text, f"regenerate {page.name} with `make tour`"
    assert sorted(READING) == sorted({_name(path.parent) for path in package_files()} - {"planner"})


def test_planning_does_not_import_torch() -> None:
    files = [
        path for path in package_files() if _is_in(_name(path), TORCH_FREE) and path.name not in ("record.py", "layer_traces.py")
    ]
    assert len(files) > 50
    code = (
        f"import importlib, sys\nfor name in {[full_name(_module(path)) for path in files]}: importlib.import_module(name)\n"
        "imported = {'torch', 'transformers', 'safetensors', 'tokenizers'} & set(sys.modules)\nassert not imported, imported"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("words", "exit_code", "text"),
    [
        (["plan", "qwen2.5-7b", "--machine", "rtx4090-server", "--batch-size", "2"], 0, "it fits: device"),
        (["run", "plan.json", "--data", "."], 2, "error: this needs torch, which the base install leaves out"),
    ],
)
def test_the_base_install_plans_and_names_what_else_is_needed(tmp_path: Path, words: list[str], exit_code: int, text: str) -> None:
    """With the libraries of `pip install .` only; all other declared libraries are missing."""
    if words[0] == "run":
        plan = str(tmp_path / words[1])
        assert penstock("plan", "qwen2.5-0.5b", "--machine", "rtx4090-server", "--policy", "megatrain", "-o", plan).exit_code == 0
        words = ["run", plan, *words[2:]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {line.partition(">=")[0] for group in project["optional-dependencies"].values() for line in group}
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {extras}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import penstock.cli.main\n"
        f"penstock.cli.main.cli({words})"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == exit_code, result.stderr
    assert text in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {library: version for library, _, version in (line.partition("==") for line in lines) if version}


def test_the_oldest_allowed_versions_are_those_of_the_tests() -> None:
    """Constraints differ in torch, transformers, and huggingface_hub, which the older transformers requires."""
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    bounds = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["run"]
    allowed = {library: version for library, _, version in (line.partition(">=") for line in bounds)}
    for library in ("torch", "transformers"):
        assert oldest[library].removesuffix(".0") == allowed[library]
    assert oldest.keys() == newest.keys()
    assert {library for library in oldest if oldest[library] != newest[library]} == {"torch", "transformers", "huggingface_hub"}


def test_the_distribution_has_every_package_and_its_data() -> None:
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    held = find_packages(ROOT, include=file["tool"]["setuptools"]["packages"]["find"]["include"])
    assert sorted(held) == sorted({full_name(_module(path.parent)) for path in package_files()})
    assert "Private :: Do Not Upload" in file["project"]["classifiers"]
    assert (ROOT / "penstock" / "py.typed").exists()
    assert {name: (ROOT / "penstock" / name).resolve() for name in LINKED} == {name: ROOT / name for name in LINKED}
    for package, patterns in file["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        named = {path for pattern in patterns for path in folder.glob(pattern)}
        paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        data_files = {path for path in paths if path.suffix != ".py"}
        assert named == data_files, f"{package}: files without a pattern in pyproject.toml, or patterns without a file"


def test_every_link_of_a_page_leads_somewhere() -> None:
    links = [
        (page, target)
        for page in tree_files()
        if page.suffix == ".md"
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 300
    assert [f"{_name(page)}: {link}" for page, link in links if "://" not in link and not (page.parent / link).exists()] == []


_FIGURE = re.compile(r"(?<![\w.])(?<!\w-)\d[\d.,]*\s?(?:%|x\b|[munµ]?s\b|tokens/s|(?:[KMGT]i?)?B(?:/s)?\b|[GTP]?FLOP)")


def test_every_number_in_the_readme_links_to_its_page() -> None:
    places = re.split(r"\n\n|\n(?=\|)", (ROOT / "README.md").read_text(encoding="utf-8"))
    prose = [place for place in places if "\n$ penstock " not in place]  # tests/house/test_docs.py runs these
    assert [place for place in prose if _FIGURE.search(place) and "](docs/" not in place] == []


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = {line.split()[1] for line in readme.splitlines() if line.startswith("penstock ")}
    assert commands == set(COMMANDS)


def test_no_file_contains_a_path_of_a_machine() -> None:
    paths_by_file = {_name(path): _MACHINE_PATH.findall(path.read_text(encoding="utf-8")) for path in tree_files()}
    assert {name: paths for name, paths in paths_by_file.items() if paths} == {}
    assert _MACHINE_PATH.search("see " + "/wor" + "k/main/x")
