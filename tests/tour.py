"""Generated pages: docs/tour.md (one line per folder), docs/imports.md (files by level of imports), docs/api.md (Python interface),
docs/training-arguments.md (fields of transformers' and TRL's configurations).

`python -m tests.tour` writes them; tests compare them with the code.
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
_HEAD = """# A tour

```
config.json ──┐                         ┌── simulate ──► predicted timeline ──┐
              ├──► search ──► plan ─────┤                                     ├── the same type: compare
profile.json ─┘      ▲          └ check └── execute  ──► measured timeline  ──┘
                     └ bounds
```

Read first: [the ops](../runtime/plan/ops.py), [the compiler](../planner/lower/passes.py) that makes them, their two interpreters,
[the simulator](../planner/predict/simulate.py) and [the executor](../runtime/executor.py); then their tests. Then folder by folder:
"""


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
    return f"{_HEAD}\n" + "\n".join(lines) + "\n"


# -- arguments of other trainers ---------------------------------------------------------------------------------------

_ARGUMENTS = """# TrainingArguments → Penstock

`penstock.hf` has the classes `Trainer`, `SFTTrainer`, `DPOTrainer`, `KTOTrainer`, `RewardTrainer` and `GRPOTrainer` (on given
rollouts) with the constructors of transformers and TRL. A script changes one line, the import: `from penstock.hf import
SFTTrainer`. Its configuration, data sets, `peft_config` and callbacks stay. `machine="rtx4090-server"` or `penstock_plan=` (a
plan or its file) chooses the plan. Without them the machine is probed once, and the plan is printed. TRL and PEFT are not needed.

```python
from trl import SFTConfig
from penstock.hf import SFTTrainer

trainer = SFTTrainer("Qwen3-8B", SFTConfig("out", max_length=2048), train_dataset=rows, machine="rtx4090-server")
trainer.train(resume_from_checkpoint=True)
trainer.save_model("tuned")
```

Losses of 20 steps, learning rates and the saved files are [compared with the originals](benchmarks/trainers_2026-11-29.md). Every
field is in one of these tables. A field that is refused raises an error if it has another value than the default, one line for
each.
"""
_DIFFERENCES = """## Differences on purpose

- Rows are padded to the length of the plan: the longest row, rounded up to 64 tokens, at most `max_length`. Losses do not depend
  on it.
- bf16 computes with weights rounded to bf16, from fp32 masters; the original uses autocast.
- `eval_loss` is a mean over all tokens (pairs, answers). The original averages the means of its batches, which depend on their
  size.
- A loss of pairs or answers is a mean over the step. The original averages the means of its micro-batches, which differ for a
  last smaller batch with `gradient_accumulation_steps`. On several ranks the original fills an epoch's last batch with its first
  rows.
- Answers start at the first token with a character of them. TRL compares tokens of the prompt with those of both answers, which
  differs if a prompt ends with a space. Rows of `SFTTrainer` are tokenised as by TRL in this case, too.
- The reference of DPO and KTO is the model of the start, an adapter of the model included, and is computed before the first step.
- KTO leaves out rows at the end that fill no batch of `per_device_train_batch_size`, the group of a baseline.
- A score of a reward model is that of the last token before the end token, also if padding is another token.
- GRPO: the old log-probabilities are those of the rows. `rollout_func` and `reward_funcs` are called once for each prompt that a
  step takes, before training.
- `weight_decay` leaves out vectors that are neither biases nor norms, such as sinks of attention.
- A new adapter starts from random numbers of `seed`, not of the program's generator. Give a PeftModel to start from its own.
- Packing with bfd is first fit over whole documents, isolated in attention, in an order of Penstock.
- The last step is always saved. A folder with checkpoints of another run is refused, unless resumed. The file
  `trainer_state.json` of a checkpoint is Penstock's; `hf_trainer_state.json` has the fields of the original.
- Callbacks get `model=None`, and no events within a step. `should_epoch_stop` is an error. `metrics` have no `total_flos`.
"""


def arguments() -> str:
    """Return docs/training-arguments.md."""
    table = tomllib.loads((ROOT / "penstock" / "other_trainers.toml").read_text(encoding="utf-8"))
    kinds = {"mapped": ("Mapped", "in Penstock"), "same": ("Without an influence", "because"), "refused": ("Refused", "instead")}
    parts = [_ARGUMENTS]
    for heading, column, entries in [(*kinds[kind], entries) for kind, entries in table["training_arguments"].items()] + [
        ("Parameters of a trainer, refused", "instead", table["trainer_arguments"])
    ]:
        rows = (f"| `{names.replace('|', '`, `')}` | {words.replace('|', chr(92) + '|')} |" for names, words in entries.items())
        parts.append("\n".join([f"## {heading}\n", f"| | {column} |", "|---|---|", *rows]) + "\n")
    return "\n".join([*parts, _DIFFERENCES])


# -- imports ------------------------------------------------------------------------------------------------------------

_IMPORTS = """# Imports inside every package

A file imports only files of lower levels, within its package and within the project; a test checks that imports have no cycle, late
imports and imports for types included. The level of a file is one above the highest level of its imports in the same package.
"""


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
    needed, page = needs(trees), [_IMPORTS.rstrip()]
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

_API = """# From Python

What `import penstock` gives a program, as its code has it; `plan` returns a Planned, `train` a Trained. Errors are PenstockErrors.
"""


def api() -> str:
    """Return docs/api.md: signatures and docstrings of public functions and classes."""
    page = [_API]
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
    return "\n".join(page)


def _header(source: str, node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Return the source lines of decorators and signature."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return source.splitlines()[first - 1 : node.body[0].lineno - 1]


if __name__ == "__main__":
    API.write_text(api(), encoding="utf-8")
    PAGE.write_text(tour(), encoding="utf-8")
    LEVELS.write_text(levels(package_trees()), encoding="utf-8")
    ARGUMENTS.write_text(arguments(), encoding="utf-8")
