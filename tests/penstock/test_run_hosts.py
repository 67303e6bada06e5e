"""Several hosts that start their ranks: same files as from one process."""

import os
import socket
import subprocess
import sys

import pytest

from tests.rank_law import ROOT
from tests.rank_runs import BATCH, QUIET, by_hand, is_that_of_one, planned, run_to_end, words
from tests.running import penstock, plan_in, succeeded

HOSTS = ["--gpus", 2, "--hosts", 2, "--network-gbit", 100]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_two_hosts_leave_the_files_of_one_process(home):
    """One rank per host, started by torchrun."""
    arguments = words(home, plan_in(home, "--policy", "megatrain", *BATCH, "--gpus", 1, *HOSTS[2:], name="hosts.json"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    hosts = [
        subprocess.Popen([*torchrun, "--node-rank", host, "-m", "penstock", *arguments], cwd=ROOT, env=os.environ | QUIET, **pipes)
        for host in "01"
    ]
    try:
        outputs = [process.communicate(timeout=120)[1] for process in hosts]
    finally:
        for process in hosts:
            process.kill()
    assert [process.returncode for process in hosts] == [0, 0], outputs
    assert "step 4/4" in outputs[0]
    assert "step" not in outputs[1], "the first rank speaks"
    assert is_that_of_one(home, 4)


@pytest.mark.slow
def test_hosts_with_different_numbers_of_ranks_are_refused(home):
    """One on the first, three on the second."""
    outcomes = by_hand([words(home, planned(home, 4))] * 4, LOCAL_RANK=[*"0012"], LOCAL_WORLD_SIZE=[*"1333"])
    assert all(code for _, code in outcomes)
    assert "hosts have different numbers of ranks" in outcomes[0][0][1]
    assert not (home / "out").exists()


def test_a_plan_for_several_hosts_is_not_started_on_one(home):
    plan = plan_in(home, "--policy", "megatrain", *BATCH, *HOSTS, name="hosts.json")
    refused = run_to_end(words(home, plan))
    assert refused.returncode == 2
    assert "torchrun --nnodes 2 --nproc-per-node 2" in refused.stderr
    arguments = ("plan", home / "model", "--machine", "h100-sxm", "--gpus", 2)
    assert "has no network; give the rate" in penstock(*arguments, "--hosts", 2).output
    alone = penstock(*arguments, "--network-gbit", 400)
    assert alone.exit_code == 2
    assert "give their number with --hosts" in alone.output


@pytest.mark.slow
def test_hosts_are_emulated_by_one_of_their_ranks(home):
    plan = plan_in(home, "--policy", "megatrain", *BATCH, *HOSTS, name="hosts.json")
    result = succeeded(penstock(*words(home, plan, "--device", "emulated", steps=3)))
    assert "emulated cpu-2core" in result.stdout
