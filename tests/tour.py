"""Generated pages: docs/tour.md (one line per folder), docs/imports.md (files by level of imports), docs/api.md (Python interface),
docs/training-arguments.md (fields of transformers' and TRL's configurations).

`python -m tests.tour` writes them again below their words, which are in the pages only; tests compare them with the code.
"""

import ast
import inspect
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import penstock
from penstock.arguments.options import StepOptions, TrainOptions
from penstock.results import Planned, Trained

ROOT = Path(__file__).resolve().parent.parent
PAGE, LEVELS, API, ARGUMENTS = (ROOT / "docs" / f"{name}.md" for name in ("tour", "imports", "api", "training-arguments"))
FOLDERS = ("penstock", "planner", "hwprofiles", "runtime", "demo", "tests")
LINKED = ("planner", "runtime", "hwprofiles")  # top-level folders that are packages below `penstock` by symbolic links
# Order of reading: the plan language, the planner, the runtime, and the command-line layer
READING = (
    *("runtime/plan", "planner/model", "planner/lower", "planner/predict", "planner/bounds", "planner/search", "planner/check"),
    *("planner/show", "hwprofiles", "hwprofiles/probe", "runtime", "runtime/machines", "runtime/compute", "runtime/layers"),
    *("runtime/host", "runtime/cuda", "penstock", "penstock/arguments", "penstock/data", "penstock/vision"),
    *("penstock/model_checks", "penstock/training", "penstock/checkpoint", "penstock/chat", "penstock/hf", "penstock/cli"),
)


def words_before(page: Path, generated: str) -> str:
    """Return the start of a page, written by hand, up to the line that begins with `generated`."""
    words, start, _ = page.read_text(encoding="utf-8").partition(f"\n{generated}")
    assert start, f"{page}: no line begins with {generated}"
    return f"{words}\n"


@cache
def first_line(path: Path) -> str:
    """Return the first line of a file's docstring, or an empty string."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def sources() -> list[Path]:
    """Return every Python file of the project, by package, in a fixed order."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if "out" not in path.parts]


def tour() -> str:
    """Return docs/tour.md."""
    lines = [f"- [{folder}](../{folder}) {first_line(ROOT / folder / '__init__.py')}" for folder in READING]
    return words_before(PAGE, "- [") + "\n".join(lines) + "\n"


# -- arguments of other trainers ---------------------------------------------------------------------------------------


def arguments() -> str:
    """Return docs/training-arguments.md."""
    table = tomllib.loads((ROOT / "penstock" / "other_trainers.toml").read_text(encoding="utf-8"))
    kinds = {"mapped": ("Mapped", "in Penstock"), "same": ("Without an influence", "because"), "refused": ("Refused", "instead")}
    parts: list[str] = []
    for heading, column, entries in [(*kinds[kind], entries) for kind, entries in table["training_arguments"].items()] + [
        ("Parameters of a trainer, refused", "instead", table["trainer_arguments"])
    ]:
        rows = (f"| `{names.replace('|', '`, `')}` | {words.replace('|', chr(92) + '|')} |" for names, words in entries.items())
        parts.append("\n".join([f"## {heading}\n", f"| | {column} |", "|---|---|", *rows]) + "\n")
    _, differences, words = ARGUMENTS.read_text(encoding="utf-8").partition("## Differences on purpose\n")
    return words_before(ARGUMENTS, "## Mapped") + "\n".join([*parts, differences + words])


# -- imports ------------------------------------------------------------------------------------------------------------


@cache
def imports(tree: ast.Module) -> list[tuple[str, int]]:
    """Return (module, relative level) of every import, also late ones and those for types; `from package import a` is package.a."""
    modules: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if is_package(short_name(node.module or "")) or not node.module:  # from runtime import plan
                modules += ((f"{node.module or ''}.{alias.name}".lstrip("."), node.level) for alias in node.names)
            else:
                modules.append((node.module, node.level))
    return [(short_name(name), level) for name, level in modules]


def short_name(module: str) -> str:
    """Return a module name without `penstock.` if its folder is in LINKED: `planner.search` for `penstock.planner.search`."""
    rest = module.removeprefix("penstock.")
    return rest if rest.partition(".")[0] in LINKED else module


def full_name(module: str) -> str:
    """Return the name under which a module is imported; inverse of `short_name`."""
    return f"penstock.{module}" if module.partition(".")[0] in LINKED else module


def is_package(module: str | None) -> bool:
    """True if a module is a folder without names of its own, unlike `runtime.plan`."""
    return module is not None and (ROOT / module.replace(".", "/") / "__init__.py").exists() and module != "runtime.plan"


def module_of(path: Path) -> str:
    """Return the module name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def needs(trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return the files that each file imports, including late imports and imports for types."""
    every = {module_of(path): path for path in trees}
    needed: dict[str, set[str]] = {}
    for path, tree in trees.items():
        module = module_of(path)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for target, level in imports(tree):
            name = target if level == 0 else f"{package}.{target}" if target else package
            while name and name not in every:  # a name within a file
                name = name.rpartition(".")[0]
            if name and name != module and every[name].name != "__init__.py":
                needed.setdefault(module, set()).add(name)
    return needed


def levels(trees: Mapping[Path, ast.Module]) -> str:
    """Return docs/imports.md: files of each package by level, the highest first."""
    needed, page = needs(trees), [words_before(LEVELS, "## ").rstrip()]
    packages: dict[str, set[str]] = {}
    for path in trees:
        if path.name != "__init__.py":
            packages.setdefault(path.parent.relative_to(ROOT).as_posix(), set()).add(module_of(path))
    for package, files in sorted(packages.items()):

        @cache
        def level(file: str, files: frozenset[str] = frozenset(files)) -> int:
            return 1 + max((level(imported) for imported in needed.get(file, set()) & files), default=0)

        page.append(f"\n## {package}\n\n| level | files |\n|--:|---|")
        for n in range(max(map(level, files)), 0, -1):
            page.append(f"| {n} | {', '.join(sorted(file.rpartition('.')[2] for file in files if level(file) == n))} |")
    return "\n".join(page) + "\n"


def package_trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of every file of the four packages."""
    packages = {ROOT / name for name in ("penstock", "planner", "runtime", "hwprofiles")}
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources() if packages & {*path.parents}}


# -- the Python interface -------------------------------------------------------------------------------------------------


def api() -> str:
    """Return docs/api.md: signatures and docstrings of public functions and classes."""
    page: list[str] = []
    for thing in (
        *(getattr(penstock, name) for name in sorted(penstock.__all__, key=str.swapcase)),
        StepOptions,
        TrainOptions,
        Planned,
        Trained,
    ):
        source = inspect.getsource(thing)
        (node,) = ast.parse(source).body
        assert isinstance(node, ast.ClassDef | ast.FunctionDef)
        code = _header(source, node)
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
                code += source.splitlines()[part.lineno - 1 : part.end_lineno]
            elif isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                docstring = " ".join((ast.get_docstring(part) or "").partition("\n\n")[0].split())
                *lines, last = ["", *_header(source, part)][code[-1].endswith(":") :]
                code += [*lines, last if docstring else f"{last} ...", *([f'        """{docstring}"""'] if docstring else [])]
        page.append(f"## {node.name}\n\n{ast.get_docstring(node)}\n\n```python\n" + "\n".join(code) + "\n```\n")
    return words_before(API, "## ") + "\n".join(page)


def _header(source: str, node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Return the source lines of decorators and signature."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return source.splitlines()[first - 1 : node.body[0].lineno - 1]


if __name__ == "__main__":
    API.write_text(api(), encoding="utf-8")
    PAGE.write_text(tour(), encoding="utf-8")
    LEVELS.write_text(levels(package_trees()), encoding="utf-8")
    ARGUMENTS.write_text(arguments(), encoding="utf-8")
