"""Loss functions on two ranks, one of them killed: bitwise identical to a single process."""

import os
import shutil
import signal

from tests.bytes_of_files import write_lines
from tests.lanes import mostly_slow
from tests.rank_runs import begun, contents, pid_of, run_to_end, said_by, step_of, wait_for, words
from tests.running import penstock, plan_in, succeeded

TEXTS = [{"text": ("good " if n % 2 else "bad ") + "x" * (n % 5 + 9), "label": n % 2} for n in range(16)]
PAIRS = [{"prompt": f"tea {n}? ", "chosen": f"yes, {n}", "rejected": f"no {n} never"} for n in range(8)]
ANSWERS = [{"prompt": f"tea {n}? ", "completion": "yes" + "!" * n, "label": n % 2 == 0} for n in range(8)]
LOGPROBS = {"logprobs": [[-5.5], [-5, -6, -5]]}
GROUPS = [LOGPROBS | {"prompt_ids": [n, 9], "completion_ids": [[n + 1], [2, 3, n]], "rewards": [0, n]} for n in range(1, 9)]
LORA = ("--train", "lora:r=4")
CASES = [("classify", TEXTS, ()), ("reward", PAIRS, LORA), ("kto:group=2", ANSWERS, ()), ("grpo:beta=0.1", GROUPS, LORA)]
CASES += [("dpo", PAIRS, ()), ("orpo", PAIRS, LORA), ("z-loss", TEXTS, ())]


@mostly_slow(("loss", "rows", "extra"), CASES, ids=[loss for loss, _, _ in CASES])
def test_two_ranks_one_of_them_killed_learn_as_one_does(home, loss, rows, extra):
    shutil.rmtree(home / "data")
    write_lines(home / "data" / "rows.jsonl", rows)
    options = ("--loss", loss, *extra, "--policy", "megatrain", "--batch-size", 8, "--micro-batch", 4, "--sum-groups", 2)
    plans, victim = [plan_in(home, *options, "--gpus", n, name=f"{n}.json") for n in (1, 2)], len(loss) % 2
    running = begun(words(home, plans[1], "--save-every", 1, "--keep", 2, steps=10**5))
    wait_for(lambda: step_of(home / "out") > 1, running)
    os.kill(pid_of(running, victim), signal.SIGKILL)
    assert f"rank {victim} was ended by SIGKILL" in said_by(running)
    n = step_of(home / "out") + 1
    resumed = run_to_end(words(home, plans[1], "--resume", steps=n), is_forked=True)
    assert resumed.returncode == 0, resumed.stderr
    alone = succeeded(penstock(*words(home, plans[0], out="alone", steps=n)))
    assert ("that share them" in alone.output) == (rows in (PAIRS, ANSWERS))
    assert contents(home / "out" / f"checkpoint-{n}") == contents(home / "alone" / f"checkpoint-{n}")
