"""Several ranks, also on several hosts: same files as one rank, also after faults."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from penstock.checkpoint.checkpoint import latest
from penstock.ranks import start
from penstock.runtime.plan import PlanFile
from penstock.runtime.plan.footprint import host_needs
from tests import rank_runs
from tests.bytes_of_files import write_lines
from tests.forks import Forked
from tests.lanes import mostly_slow
from tests.penstock.checkpoint.test_dequantised import published
from tests.rank_runs import begun, by_hand, contents, is_that_of_one, pid_of, planned, run_to_end, said_by, step_of, wait_for, words
from tests.running import lines_of, penstock, plan_in, succeeded
from tests.tour import ROOT


def logged(home, out):
    """Return the fields of the log that do not depend on the clock."""
    keys = ("step", "loss", "grad_norm", "eval_loss", "supervised_tokens")
    return [{key: line[key] for key in keys if key in line} for line in lines_of(home, out)]


@mostly_slow("is_forked", [True, False], ids=["forked", "started anew"])
def test_another_number_of_ranks_goes_on_to_the_same_bytes(home, is_forked):
    looks = ("--eval-data", home / "data" / "b.txt", "--eval-every", 2, "--prompt", "To be", "--save-every", 2)
    succeeded(penstock(*words(home, planned(home, 1), *looks, out="alone")))
    shared = run_to_end(words(home, planned(home, 2), *looks, steps=2), is_forked)
    assert shared.returncode == 0, shared.stderr
    assert shared.stderr.count("step 1/2") == 1, "the first rank speaks, the other is silent"
    assert contents(home / "out" / "checkpoint-2") == contents(home / "alone" / "checkpoint-2")
    succeeded(penstock(*words(home, home / "1.json", *looks, "--resume")))
    assert contents(home / "out" / "checkpoint-4") == contents(home / "alone" / "checkpoint-4")
    assert logged(home, "out") == logged(home, "alone")
    assert (home / "out" / "samples.jsonl").read_text() == (home / "alone" / "samples.jsonl").read_text()


LOOP = """
import sys
import penstock

out, plan, data, held_out, *adapter = sys.argv[1:]
settings = {"tokenizer": "bytes", "evaluation.data": held_out} | {"adapter": path for path in adapter}
for turn in penstock.stream(plan, data, out=out, every=2, steps=9, lr=1e-2, from_scratch=True, device="cpu", settings=settings):
    norm = sum(float(weight.double().square().sum()) for _, weight in turn.weights())
    print(turn.step, turn.lr, norm, turn.evaluate()["eval_loss"], sorted(turn.gradient_norms().items()), flush=True)
    turn.lr /= 3
    if turn.step == 6:
        turn.save()
        break
print("the loop is over")
"""


@mostly_slow("train", ["all", "lora:r=4"], fast=(1,))
def test_a_loop_of_ones_own_by_two_ranks_is_that_of_one(home, train):
    """Pairs, with a reference computed by rank 0 from all ranks' weights, adapters included if they are the start; and a loop that
    abandons its run."""
    shutil.rmtree(home / "data")
    rows = [{"prompt": f"tea {n}? ", "chosen": f"yes, {n}", "rejected": f"no {n} never"} for n in range(12)]
    write_lines(home / "data" / "pairs.jsonl", rows[:8])
    write_lines(home / "held-out.jsonl", rows[8:])
    options = ("--loss", "dpo", "--train", train, "--policy", "megatrain", "--batch-size", 8, "--sum-groups", 2)
    program, references = [sys.executable, "-c", LOOP], set[bytes]()
    for adapter in ([], [home / "1" / "checkpoint-6"])[: 1 + (train != "all")]:
        outputs, folders = [], [home / f"{n}{'-on' * len(adapter)}" for n in (1, 2)]
        for n, folder in enumerate(folders, start=1):
            plan = plan_in(home, *options, "--gpus", n, name=f"{n}.json")
            words = [str(word) for word in (folder, plan, home / "data", home / "held-out.jsonl", *adapter)]
            outcomes = by_hand([words] * n, commands=[program] * n)
            assert [code for _, code in outcomes] == [0] * n, outcomes
            assert not any(out for (out, _), _ in outcomes[1:])
            outputs.append(outcomes[0][0][0])
        assert outputs[0] == outputs[1]
        assert outputs[0].splitlines()[-1] == "the loop is over"
        assert contents(folders[0] / "checkpoint-6") == contents(folders[1] / "checkpoint-6")
        files = {(folder / "reference.safetensors").read_bytes() for folder in folders}
        assert len(files - references) == len(files) == 1, "the reference with an adapter is another"
        references |= files
    alone = Forked([*program, *words], env=os.environ | rank_runs.QUIET, stderr=subprocess.PIPE)
    assert "or a program with torchrun --nproc-per-node 2" in alone.communicate(timeout=60)[1]


@pytest.mark.slow
def test_a_signal_ends_the_step_of_all_ranks(home):
    running = begun(words(home, planned(home, 2), "--save-every", 2, "--keep", 1, out="long", steps=10**6))
    wait_for(lambda: step_of(home / "long"), running)
    running.send_signal(signal.SIGTERM)
    outputs = said_by(running)
    assert running.returncode == 0, outputs
    assert "terminated: stopped after step" in outputs
    assert latest(home / "long") is not None


def test_the_exit_code_of_ranks_is_that_of_the_first_to_fail(monkeypatch):
    """Processes replace ranks: one exits at once with code 3, the others would sleep for a minute."""
    monkeypatch.setattr("penstock.ranks.GRACE_S", 0.5)
    script = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    monkeypatch.setattr("penstock.ranks.COMMAND", [sys.executable, "-c", script])
    began_s = time.monotonic()
    assert start(3, []) == 3
    assert time.monotonic() - began_s < 20


@pytest.mark.slow
def test_ranks_share_a_packed_base_and_a_kill_costs_no_bit(home):
    """Adapters of attention and of published MXFP4 experts: two ranks, one of them killed, then one process."""
    published(home, "gpt_oss")
    options = ("--train", "lora:r=8,targets=q_proj+experts", "--base", "mxfp4", "--policy", "megatrain", *rank_runs.BATCH)
    plans = {n: plan_in(home, *options, "--gpus", n, name=f"{n}.json", model="few") for n in (1, 2)}
    shared = host_needs(PlanFile.read(plans[2]).plan, 2)["state"]
    assert shared < 0.6 * host_needs(PlanFile.read(plans[1]).plan)["state"], "of the base a host has one copy"

    def run_words(n, out, steps):
        run = ["run", plans[n], "--data", home / "data", "--out", home / out, "--steps", steps, "--save-every", 1, "--keep", 2]
        return [str(word) for word in [*run, "--tokenizer", "bytes", "--lr", "1e-3", "--resume"]]

    running = begun(run_words(2, "out", 10**5))
    wait_for(lambda: step_of(home / "out") > 1, running)
    os.kill(pid_of(running, 1), signal.SIGKILL)
    said_by(running)
    n = step_of(home / "out") + 1
    for out in ("out", "alone"):
        succeeded(penstock(*run_words(1, out, n)))
    checkpoint = home / "out" / f"checkpoint-{n}"
    assert contents(checkpoint) == contents(home / "alone" / f"checkpoint-{n}")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(home / "few", dtype=torch.float32), checkpoint)
    assert all(weight.abs().sum() > 0 for name, weight in loaded.named_parameters() if "lora_B" in name)


HOSTS = ["--gpus", 2, "--hosts", 2, "--network-gbit", 100]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_two_hosts_leave_the_files_of_one_process(home):
    arguments = words(home, plan_in(home, "--policy", "megatrain", *rank_runs.BATCH, "--gpus", 1, *HOSTS[2:], name="hosts.json"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    how = {"cwd": ROOT, "env": os.environ | rank_runs.QUIET, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    hosts = [subprocess.Popen([*torchrun, "--node-rank", host, "-m", "penstock", *arguments], **how) for host in "01"]
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
    outcomes = by_hand([words(home, planned(home, 4))] * 4, LOCAL_RANK=[*"0012"], LOCAL_WORLD_SIZE=[*"1333"])
    assert all(code for _, code in outcomes)
    assert "hosts have different numbers of ranks" in outcomes[0][0][1]
    assert not (home / "out").exists()


def test_a_plan_for_several_hosts_is_not_started_on_one(home):
    plan = plan_in(home, "--policy", "megatrain", *rank_runs.BATCH, *HOSTS, name="hosts.json")
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
    plan = plan_in(home, "--policy", "megatrain", *rank_runs.BATCH, *HOSTS, name="hosts.json")
    result = succeeded(penstock(*words(home, plan, "--device", "emulated", steps=3)))
    assert "emulated cpu-2core" in result.stdout
