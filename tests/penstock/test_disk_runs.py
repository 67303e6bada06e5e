"""Runs with NVMe offload of frozen layers: same files as in host memory, and error messages."""

import errno
import json
import os
import shutil

import pytest

from penstock.runtime.host import base_file
from tests.lanes import mostly_slow
from tests.penstock.test_adapter_runs import BYTES, LORA, files, trained, with_weights
from tests.running import one_line, penstock, plan_in, train

POLICY = {"update": "deferred", "disk_blocks": [1, 3], "prefetch_depth": 1}


@pytest.fixture
def home(home):
    with_weights(home / "model", "qwen3")
    (home / "policy.json").write_text(json.dumps(POLICY))
    return home


def planned(home, *extra):
    return plan_in(home, *LORA, "--disk-read", "1GB", "--policy", home / "policy.json", *extra, name="disk.json")


@mostly_slow("base", ["bf16", "nf4"])
def test_checkpoints_are_those_of_a_run_in_memory(home, base):
    in_memory = trained(home, plan_in(home, *LORA, "--base", base), "--save-every", 2)
    plan = planned(home, "--base", base)
    on_disk = trained(home, plan, "--save-every", 2, "--disk", home / "disk", "--eval-data", home / "data", out="of-disk")
    assert files(on_disk) == files(in_memory)
    assert files(on_disk.with_name("checkpoint-2")) == files(in_memory.with_name("checkpoint-2"))
    (file,) = (home / "disk").iterdir()
    written = file.stat().st_mtime_ns
    shutil.rmtree(on_disk)
    assert files(trained(home, plan, "--resume", "--disk", home / "disk", out="of-disk")) == files(in_memory)
    assert [(path, path.stat().st_mtime_ns) for path in (home / "disk").iterdir()] == [(file, written)]


def test_another_model_or_form_has_another_file(home):
    trained(home, planned(home), "--disk", home / "disk")
    with_weights(home / "model", "qwen3", seed=4)
    trained(home, planned(home), "--disk", home / "disk", out="other")
    assert len([*(home / "disk").iterdir()]) == 2


def test_a_run_asks_for_the_disk_of_its_plan_in_one_line(home):
    message = "the plan reads frozen weights from a disk: name a folder there with --disk"
    one_line(train(home, planned(home), scratch=BYTES), 2, message)
    (home / "file").write_text("no folder")
    one_line(train(home, planned(home), "--disk", home / "file", scratch=BYTES), 2, "file", "cannot be opened (File exists)")


def test_a_plan_needs_the_rate_of_its_disk_and_says_how_it_is_run(home):
    words = ("--seq-len", 32, *LORA, "--policy", home / "policy.json", "-o", home / "plan.json")
    plan = ("plan", home / "model", "--machine", "cpu-2core", *words)
    one_line(penstock(*plan), 2, "cpu-2core: its profile has no disk; say how fast its disk is read with --disk-read")
    assert "plan.json --data FOLDER --disk FOLDER" in penstock(*plan, "--disk-read", "1GB").stderr


def test_a_disk_pulled_out_in_mid_run_leaves_the_last_checkpoint(home, monkeypatch):
    plan = planned(home)
    unbroken = trained(home, plan, "--save-every", 1, "--disk", home / "disk")
    real, calls = os.preadv, []

    def preadv(*args):
        calls.append(args)
        if len(calls) > 5:  # one page at the start, then two per step
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(base_file.os, "preadv", preadv)
        result = train(home, plan, "--save-every", 1, "--disk", home / "disk", out="lost", scratch=BYTES)
    one_line(result, 2, "cannot be read at byte", "(Input/output error)", "--resume")
    assert [path.name for path in (home / "lost").glob("checkpoint-*")], "a checkpoint stands"
    assert not (home / "lost" / "checkpoint-4").exists()
    assert files(trained(home, plan, "--resume", "--disk", home / "disk", out="lost")) == files(unbroken)


def test_an_emulated_run_reads_a_stand_in(home):
    result = train(home, planned(home), "--disk", home / "disk", "--device", "emulated", "--time-scale", "1", scratch=())
    assert result.exit_code == 0, result.output
