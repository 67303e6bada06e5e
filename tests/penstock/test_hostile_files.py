"""Is every file taken, or refused in one line, whatever is in it?

Good files of every format are changed and given to the functions that commands read them with. What counts as failure is shown to
be found, in readers that fail on purpose and in our own with a fault put into them. `benchmarks/fuzz.py` does the same for hours.
"""

import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from runtime.errors import CheckpointError, PenstockError, PlanError
from runtime.plan import PlanFile, plan
from tests import fuzz_formats, fuzz_formats_run
from tests.fuzz_formats import Format, plan_files
from tests.fuzz_judge import FailureError, World, judged
from tests.fuzz_mutations import TREES, mutate_json, mutated, places, read_json, write_json
from tests.fuzz_planted import PLANTED, inputs_until_found

FORMATS = fuzz_formats.FORMATS | fuzz_formats_run.FORMATS
N_EXAMPLES = {"published runs": 10, "metrics.jsonl": 25, "samples.jsonl": 25, "timeline.json": 25}  # slow ones
NAMES = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def world_of(tmp_path_factory) -> Callable[[str], World]:
    """The folders of a format, with all that belongs to a file of it."""
    worlds: dict[str, World] = {}

    def world(name: str) -> World:
        if name not in worlds:
            worlds[name] = World(tmp_path_factory.mktemp("world"))
            FORMATS[name].prepare(worlds[name])
        return worlds[name]

    return world


@pytest.mark.fast("some")
@NAMES
def test_a_good_file_is_taken(world_of, name):
    for seed in FORMATS[name].seeds():
        assert FORMATS[name].judge(world_of(name), seed)


@pytest.mark.fast("some")
@NAMES
def test_a_changed_file_is_taken_or_refused_in_one_line(world_of, name):
    world, of = world_of(name), FORMATS[name]

    @settings(max_examples=N_EXAMPLES.get(name, 60), suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def holds(rng):
        data = of.mutant(rng)
        note(repr(data[:2000]))
        of.judge(world, data)

    holds()


# -- what counts as failure is found ------------------------------------------------------------------------------------


def _spin() -> None:
    while True:
        pass


def _caught(read: Callable[[], None]) -> None:
    try:
        read()
    except Exception:
        raise PlanError("whatever it was") from None


def _native(path: Path) -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    os.close(libc.open(os.fsencode(path), os.O_RDONLY))


def _import(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("evil", folder / "evil.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another error": (lambda folder: {}["x"], "KeyError"),
    "an error without words": (lambda folder: (_ for _ in ()).throw(PlanError("")), "0 characters"),
    "a traceback for words": (lambda folder: (_ for _ in ()).throw(PenstockError('File "x", line 1')), "is a traceback"),
    "no end": (lambda folder: _spin(), "no answer"),
    "no end that is caught": (lambda folder: _caught(_spin), "no answer"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe") or (folder / "pipe").read_bytes(), "no answer: waits"),
    "much memory": (lambda folder: len(b"x" * (500 * 2**20)), "memory"),
    "leaving": (lambda folder: sys.exit(3), "left the process"),
    "a file outside": (lambda folder: (folder.parent / "outside" / "secret.json").read_bytes(), "outside: opened"),
    "a folder outside": (lambda folder: list(folder.parent.iterdir()), "outside: opened"),
    "writing outside": (lambda folder: (folder.parent / "new").write_bytes(b""), "outside: wrote"),
    "deleting outside": (lambda folder: (folder.parent / "outside" / "secret").unlink(), "outside: os.remove"),
    "native code outside": (lambda folder: _native(folder.parent / "outside" / "secret.json"), "native code"),
    "a process": (lambda folder: subprocess.run(["true"], check=False), "subprocess.Popen"),
    "a shell": (lambda folder: os.system("true"), "os.system"),
    "a connection": (lambda folder: socket.create_connection(("127.0.0.1", 9)), "socket"),
    "code beside the file": (_import, "ran "),
    "a pickle": (lambda folder: pickle.loads(b"cbuiltins\nprint\n."), "pickle.find_class"),
    "native words": (lambda folder: os.write(2, b"thread panicked at x.rs\nnote\n"), "several lines"),
}


@pytest.mark.fast("some")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_reader_that_fails_is_found_out(tmp_path, fault):
    read, said = FAULTS[fault]
    world = World(tmp_path)
    for name in ("secret", "secret.json"):
        (world.outside / name).write_bytes(b"{}")
    with pytest.raises(FailureError, match=said):
        judged(world, lambda: read(world.inside), cpu_s=0.3 if "end" in fault or fault == "a pipe" else 9.0)
    world.close()


def test_a_reader_that_takes_or_refuses_is_not_blamed(tmp_path):
    world = World(tmp_path)
    assert judged(world, (world.inside / "evil.py").read_text)

    def refuse(error: Exception) -> None:
        raise error

    assert not judged(world, lambda: refuse(CheckpointError("no")))
    assert not judged(world, lambda: refuse(click.UsageError("a\nb")))
    with pytest.raises(KeyboardInterrupt):
        judged(world, lambda: refuse(KeyboardInterrupt()))  # type: ignore[arg-type]


@pytest.mark.fast("some")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_our_own_readers_is_found(world_of, fault):
    planted = PLANTED[fault]
    assert inputs_until_found(planted, FORMATS[planted.format], world_of(planted.format), most=600)


@pytest.mark.fast("some")
@pytest.mark.parametrize("name", sorted({planted.format for planted in PLANTED.values()}))
def test_without_the_fault_the_same_files_show_nothing(world_of, name):
    """The readers are put back as they were, and the files that showed a fault do not show another one."""
    rng = Random(0)
    for _ in range(40):
        FORMATS[name].judge(world_of(name), FORMATS[name].mutant(rng))


# -- how files are changed ----------------------------------------------------------------------------------------------


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_a_tree_is_written_as_it_was_read(tree):
    assert json.loads(write_json(read_json(json.dumps(tree).encode()))) == tree


def test_every_part_of_a_tree_can_be_changed():
    tree = read_json(b'{"a": [1, {"b": 2}], "c": {}}')
    assert len(places(tree)) == 5
    changed = {mutate_json(b'{"a": [1, {"b": 2}], "c": {}}', Random(seed)) for seed in range(300)}
    assert len(changed) > 200


def test_what_is_put_into_files_is_itself_never_changed():
    before = repr(TREES)
    for seed in range(60):
        rng, tree = Random(seed), read_json(b'{"a": [1, {"b": 2}], "c": {}}')
        for _ in range(4):
            tree = mutated(tree, rng)
    assert repr(TREES) == before


@NAMES
def test_the_same_random_numbers_make_the_same_file(name):
    assert FORMATS[name].mutant(Random(7)) == FORMATS[name].mutant(Random(7))


# -- size ---------------------------------------------------------------------------------------------------------------


def _sized(world: World, of: Format, data: bytes, *, taken: bool) -> None:
    assert of.judge(world, data) is taken


def test_an_object_of_many_keys_one_of_them_twice_is_refused_at_once(world_of):
    keys = ",".join(f'"k{i}":0' for i in range(200_000))
    _sized(world_of("plan (JSON)"), FORMATS["plan (JSON)"], f'{{{keys},"k199999":1}}'.encode(), taken=False)


PARTS = {"blocks": "more than", "parameters": "weights in one of them", "dimensions": "dimensions"}


@pytest.mark.fast("some")
@pytest.mark.parametrize("part", PARTS)
def test_a_plan_of_more_parts_than_any_model_is_refused(world_of, part):
    fields = json.loads(plan_files()[0])
    blocks = fields["workload"]["blocks"]
    if part == "blocks":
        blocks[1:1] = [blocks[1]] * 20_000
    elif part == "parameters":
        blocks[1]["parameters"] = [{"name": f"p{i}", "shape": [1]} for i in range(50_000)]
    else:
        blocks[1]["parameters"][0]["shape"] = [2**53 - 1] * 20_000
    of, world = FORMATS["plan (JSON)"], world_of("plan (JSON)")
    _sized(world, of, json.dumps(fields).encode(), taken=False)
    with pytest.raises(PlanError, match=PARTS[part]):
        of.read(world.inside)


@pytest.mark.soak
def test_a_plan_of_very_many_ops_is_answered(tmp_path):
    fields = json.loads(plan_files()[0])
    fields["ops"] = [fields["ops"][0].partition(" ^")[0]] * 100_000
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    assert len(PlanFile.read(tmp_path / "plan.json").plan.ops) == 100_000
    with (tmp_path / "plan.json").open("r+b") as file:
        file.truncate(plan.MAX_PLAN_FILE_BYTES + 1)
    with pytest.raises(PlanError, match="larger than"):
        PlanFile.read(tmp_path / "plan.json")


@pytest.mark.soak
def test_many_published_runs_are_told_apart_in_no_time(world_of):
    run = json.loads(FORMATS["published runs"].seeds()[0])["runs"][0]
    runs = [run | {"id": f"r{i}", "machine": "none"} for i in range(60_000)]
    runs.append(runs[-1])
    _sized(world_of("published runs"), FORMATS["published runs"], json.dumps(runs).encode(), taken=False)
