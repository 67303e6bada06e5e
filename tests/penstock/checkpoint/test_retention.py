"""Do the last checkpoints stay, and does nothing half written or half deleted ever pass for one?"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from penstock.checkpoint import retention
from penstock.checkpoint.checkpoint import latest, load_state, whole
from penstock.checkpoint.retention import clean, keep_last, offers
from penstock.checkpoint.saving import save
from runtime.errors import CheckpointError
from tests.accidents import forked_to_die


def small(folder: Path, step: int) -> Path:
    weights = {"model.a": torch.full((2, 3), float(step))}
    return save(folder, step, weights, [("000", {"m": torch.arange(5.0)})], {"model_type": "llama"}, {"seed": step})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_last_few_stay_and_later_ones_are_left_alone(tmp_path, n):
    """Those of later steps are of a course that was left when the run went on from an earlier one: they are the user's."""
    for step in (2, 9, 10, 11, 30):
        small(tmp_path, step)
    (tmp_path / "checkpoint-x").mkdir()
    keep_last(tmp_path, n, 11)
    expected = {1: [11, 30], 2: [10, 11, 30], 5: [2, 9, 10, 11, 30]}
    assert [step for step, _ in whole(tmp_path)] == expected[n]
    assert names(tmp_path) == sorted(["checkpoint-x", *(f"checkpoint-{step}" for step in expected[n])])


def test_what_was_set_aside_counts_as_kept_and_goes_first(tmp_path):
    for step in (5, 9, 10, 12):
        small(tmp_path, step)
    for step in (9, 12):
        (tmp_path / f"checkpoint-{step}").rename(tmp_path / f"checkpoint-{step}.left")
    (tmp_path / "checkpoint-mine.left").mkdir()
    keep_last(tmp_path, 3, 10)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-12.left", "checkpoint-5", "checkpoint-mine.left"]
    (tmp_path / "checkpoint-12.left").rename(tmp_path / "checkpoint-12.left.removed")  # killed meanwhile
    clean(tmp_path)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-5", "checkpoint-mine.left"]


@pytest.mark.fast("some")
@pytest.mark.parametrize("n_removed", range(6))
def test_a_run_that_is_killed_while_it_deletes_leaves_nothing_that_passes_for_whole(tmp_path, n_removed):
    """At whatever file: what is left of it has another name, and goes at the next start."""
    for step in (1, 2):
        small(tmp_path, step)
    forked_to_die(lambda: keep_last(tmp_path, 1, 2), (os, "unlink"), n_removed)
    for _, path in whole(tmp_path):
        load_state(path)
    clean(tmp_path)
    assert [step for step, _ in whole(tmp_path)][-1] == 2
    assert all(name in ("checkpoint-1", "checkpoint-2") for name in names(tmp_path))


@pytest.mark.parametrize("n_renamed", range(3))
def test_a_run_that_is_killed_while_it_replaces_a_checkpoint_leaves_the_old_one_or_the_new_one(tmp_path, n_renamed):
    small(tmp_path, 1)
    forked_to_die(lambda: save(tmp_path, 1, {"a": torch.ones(2)}, [], {}, {"seed": "new"}), (Path, "rename"), n_renamed)
    clean(tmp_path)
    assert names(tmp_path) == ["checkpoint-1"]
    assert load_state(tmp_path / "checkpoint-1").fields["seed"] in (1, "new")


def test_what_killed_runs_have_left_is_put_away_and_nothing_else(tmp_path):
    kept = small(tmp_path, 3)
    for name in ("checkpoint-4.partial", "checkpoint-3.replaced", "checkpoint-1.removed"):
        shutil.copytree(kept, tmp_path / name)
    others = ["checkpoint-x.partial", "my.removed", "checkpoint-4.partial.txt", "metrics.jsonl.partial"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("")
    (tmp_path / "checkpoint-9.removed").symlink_to(tmp_path / "elsewhere")
    clean(tmp_path)
    assert names(tmp_path) == sorted(["checkpoint-3", "elsewhere", *others])
    assert (tmp_path / "elsewhere" / "precious").exists()
    clean(tmp_path / "nowhere")


def test_the_newest_whole_checkpoint_before_a_damaged_one_is_offered(tmp_path):
    """Each is read to its last byte: one that only looks whole is not offered."""
    for step in (1, 2, 3, 4, 5):
        small(tmp_path, step)
    for step in (3, 4):
        path = tmp_path / f"checkpoint-{step}" / "optimizer-000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert offers(tmp_path, tmp_path / "checkpoint-4") == tmp_path / "checkpoint-2"
    assert offers(tmp_path, tmp_path / "checkpoint-2") == tmp_path / "checkpoint-1"
    assert offers(tmp_path, tmp_path / "checkpoint-1") is None
    assert latest(tmp_path) == tmp_path / "checkpoint-5"


def test_what_cannot_be_removed_is_one_line(tmp_path, monkeypatch):
    for step in (1, 2):
        small(tmp_path, step)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(retention.shutil, "rmtree", refuse)
    with pytest.raises(CheckpointError, match=r"checkpoint-1: cannot be removed \(Permission denied\)"):
        keep_last(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"checkpoint-1.removed: cannot be removed \(Permission denied\)"):
        clean(tmp_path)
    assert [step for step, _ in whole(tmp_path)] == [2]


def foreign(folder: Path, what: str) -> Path:
    """A folder that is no checkpoint of this version's."""
    folder = small(folder, 7)
    state = folder / "trainer_state.json"
    match what:
        case "a model":
            state.unlink()
        case "another trainer's":
            state.write_text(json.dumps({"best_metric": None, "global_step": 7, "log_history": []}))
            (folder / "optimizer.pt").write_bytes(b"\x80\x04")
        case "a later version's":
            state.write_text(state.read_text().replace('"format_version": 2', '"format_version": 3'))
        case "an empty folder":
            shutil.rmtree(folder)
            folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a model", "a model, not the state of a run .*--model"),
        ("another trainer's", "of another program's run; train from its weights with --model"),
        ("a later version's", "format_version is not 2; resume with the version that wrote it"),
        ("an empty folder", "trainer_state.json: cannot be read"),
    ],
)
def test_a_foreign_folder_is_refused_in_one_line_that_says_what_it_is(tmp_path, what, said):
    folder = foreign(tmp_path, what)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_state(folder)
    assert "checkpoint-7" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_checkpoint_that_somebody_took_away_is_not_missed(tmp_path):
    """On a full disk a run asks for room to be made."""
    first, second = small(tmp_path, 1), small(tmp_path, 2)
    shutil.rmtree(first)
    retention.remove([first, second])
    assert names(tmp_path) == []
