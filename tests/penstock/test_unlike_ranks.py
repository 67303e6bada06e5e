"""Inconsistent ranks are rejected if their results would differ from one rank."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.runtime.plan import PlanFile
from penstock.runtime.plan.footprint import host_needs, planned_device_needs
from penstock.runtime.units import show_bytes
from tests.lanes import mostly_slow
from tests.rank_runs import COMMAND, by_hand, command_with, planned, words
from tests.running import make_home, plan_in, succeeded, train, weights_in


def refused_by_the_first(outcomes, line, code=2):
    """Assert an error in rank 0's last line, with this exit code; other ranks end without output."""
    first, *followers = outcomes
    assert first[1] == code, first
    assert first[0][1].splitlines()[-1].startswith(f"error: {line}")
    assert "Traceback" not in first[0][1]
    assert all(code in (1, 2) and "rror" not in output[1] for output, code in followers), followers


@mostly_slow("case", ["settings", "plan", "version"])
def test_unlike_ranks_are_refused_in_a_line_of_the_first(case, home):
    """Includes a plan for another number of ranks."""
    second = words(home, planned(home, 4 if case == "plan" else 2), *(["--seed", "7"] if case == "settings" else []))
    older = command_with("from penstock import ranks", "ranks.version_in_words = lambda: 'penstock 0'")
    outcomes = by_hand([words(home, planned(home, 2)), second], commands=[COMMAND, older if case == "version" else COMMAND])
    refused_by_the_first(outcomes, f"rank 1 has another {case} than rank 0; start all ranks with the same command")
    assert not (home / "out").exists()


def changed(path, old, new):
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))


def trained_apart(path):
    """Change one weight by the smallest amount."""
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int16)[-1, -1] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})


UNLIKE = {
    "data": (
        lambda home: changed(home / "data" / "b.txt", "suffer. Whether", "suffer? Whether"),
        "rank 1 reads other data than rank 0; give all ranks the same files",
    ),
    "weights": (
        lambda home: trained_apart(home / "model" / "model.safetensors"),
        "rank 1 reads other weights than rank 0; give all ranks the same files",
    ),
    "no weights": (lambda home: (home / "model" / "model.safetensors").unlink(), "rank 1: model: holds no weights; train random"),
}


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """Folders of two ranks with a model, weights and data, and a plan for both."""
    home = make_home(tmp_path_factory.mktemp("alike"))
    succeeded(train(home, plan_in(home), steps=1))
    planned(home, 2)
    shutil.copy(home / "out" / "checkpoint-1" / "config.json", home / "model")
    save_file(weights_in(home / "out" / "checkpoint-1"), home / "model" / "model.safetensors")
    for rank in ("0", "1"):
        for name in ("data", "model"):
            shutil.copytree(home / name, home / rank / name)
    return home


def in_folders(home):
    """Start two ranks with equal arguments in separate folders."""
    files = ["--data", "data", "--model", "model", "--out", home / "out"]
    run = [str(word) for word in ["run", home / "2.json", *files, "--steps", 2, "--tokenizer", "bytes"]]
    return by_hand([run, run], [home / "0", home / "1"])


@pytest.mark.slow
@pytest.mark.parametrize("case", UNLIKE)
def test_a_rank_that_reads_something_else_is_named(case, alike, tmp_path):
    home = shutil.copytree(alike, tmp_path / "home", ignore=shutil.ignore_patterns("out"))
    change, line = UNLIKE[case]
    change(home / "1")
    refused_by_the_first(in_folders(home), line)
    assert not (home / "out").exists()


@pytest.mark.slow
def test_ranks_that_read_the_same_in_folders_of_their_own_train(alike, tmp_path):
    """Control for the rejections above."""
    home = shutil.copytree(alike, tmp_path / "home", ignore=shutil.ignore_patterns("out"))
    outcomes = in_folders(home)
    assert [code for _, code in outcomes] == [0, 0], outcomes
    assert (home / "out" / "checkpoint-2").is_dir()


@pytest.mark.slow
def test_a_rank_without_a_gpu_of_its_own_is_refused(home):
    plan = planned(home, 2)
    run_words = words(home, plan, "--device", "cuda")
    outcomes = by_hand([run_words, run_words], CUDA_VISIBLE_DEVICES="0")
    refused_by_the_first(outcomes, "CUDA_VISIBLE_DEVICES names 1 devices for 2 ranks; give one to each")
    with_cuda = command_with("from penstock.runtime.machines import streams", "streams.has_cuda = lambda: True")
    unseen = command_with("from penstock.runtime.machines import streams", "streams.has_cuda = lambda: False")
    outcomes = by_hand([words(home, plan)] * 2, commands=[with_cuda, unseen])
    refused_by_the_first(outcomes, "of 2 ranks 1 see a GPU; give each of them one, or choose --device cpu")
    assert not (home / "out").exists()


@pytest.mark.slow
def test_the_memory_of_a_host_must_be_enough_for_all_its_ranks(home):
    path = planned(home, 2)
    plan = PlanFile.read(path).plan
    needed_bytes = 2 * (sum(host_needs(plan).values()) + sum(planned_device_needs(plan, False).values()))
    free = command_with("from penstock.runtime.host import memory", f"memory.available_host_bytes = lambda: {needed_bytes - 1}")
    outcomes = by_hand([words(home, path, steps=1)] * 2, commands=[free, free])
    refused_by_the_first(outcomes, f"the plan needs {show_bytes(needed_bytes)} here, 1 B more than are free; plan again", code=3)
    assert not (home / "out").exists()
