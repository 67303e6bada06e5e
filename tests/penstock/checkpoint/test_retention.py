"""Retention of the last checkpoints; partial files never count as a checkpoint."""

import os
import shutil
from pathlib import Path

import pytest

from penstock.checkpoint import retention
from penstock.checkpoint.checkpoint import complete_checkpoints, load_state
from penstock.checkpoint.retention import clean, keep_last, refuse_later
from penstock.runtime.errors import CheckpointError
from tests.accidents import forked_to_die
from tests.checkpoints import refused, small
from tests.lanes import mostly_slow


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("n", "expected"), [(1, [11, 30]), (2, [10, 11, 30]), (5, [2, 9, 10, 11, 30])])
def test_the_last_few_stay_and_later_ones_are_left_alone(tmp_path, n, expected):
    for step in (2, 9, 10, 11, 30):
        small(tmp_path, step)
    (tmp_path / "checkpoint-x").mkdir()
    keep_last(tmp_path, n, 11)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == expected
    assert names(tmp_path) == sorted(["checkpoint-x", *(f"checkpoint-{step}" for step in expected)])


def test_a_checkpoint_of_a_later_step_is_refused(tmp_path):
    """Otherwise a run killed before its first save would resume from it, with a gap in its log."""
    for step in (5, 9, 12):
        small(tmp_path, step)
    refuse_later(tmp_path, 12)
    assert "checkpoint-12, checkpoint-9, of a later step" in refused(lambda: refuse_later(tmp_path, 5))


@mostly_slow("n_removed", range(6))
def test_a_run_killed_while_it_deletes_leaves_nothing_half(tmp_path, n_removed):
    for step in (1, 2):
        small(tmp_path, step)
    forked_to_die(lambda: keep_last(tmp_path, 1, 2), (os, "unlink"), n_removed)
    for _, path in complete_checkpoints(tmp_path):
        load_state(path)
    clean(tmp_path)
    assert [step for step, _ in complete_checkpoints(tmp_path)][-1] == 2
    assert all(name in ("checkpoint-1", "checkpoint-2") for name in names(tmp_path))


def test_leftovers_of_killed_runs_are_deleted_and_nothing_else(tmp_path):
    retained = small(tmp_path, 3)
    for name in ("checkpoint-4.partial", "checkpoint-1.removed"):
        shutil.copytree(retained, tmp_path / name)
    unrelated = ["checkpoint-x.partial", "my.removed", "checkpoint-4.partial.txt", "metrics.jsonl.partial"]
    for name in unrelated:
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("")
    (tmp_path / "checkpoint-9.removed").symlink_to(tmp_path / "elsewhere")
    clean(tmp_path)
    assert names(tmp_path) == sorted(["checkpoint-3", "elsewhere", *unrelated])
    assert (tmp_path / "elsewhere" / "precious").exists()
    clean(tmp_path / "nowhere")


def test_what_cannot_be_removed_is_one_line(tmp_path, monkeypatch):
    for step in (1, 2):
        small(tmp_path, step)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(retention.shutil, "rmtree", refuse)
    for work in (lambda: keep_last(tmp_path, 1, 2), lambda: clean(tmp_path)):
        with pytest.raises(CheckpointError, match=r"checkpoint-1.removed: cannot be removed \(Permission denied\)"):
            work()
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [2]
