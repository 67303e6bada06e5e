"""Training of test cases by several ranks, and digests of the resulting bits.

A process is started per rank with the environment of `torchrun` and the arguments OUT TYPE:POLICY:GROUPS[:BATCH] ..., for example
`out.json llama:plain:4`. Rank 0 writes the digests; `trained_alone` returns the digest of one process.
"""

import hashlib
import json
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from penstock.planner.check import contract
from penstock.planner.check.check import check
from penstock.runtime.executor import execute
from penstock.runtime.machines.processes import Processes, connected_ranks, meeting_place
from penstock.runtime.plan import Policy, Semantics, Update, saves, setup
from penstock.runtime.plan.objective import parse_objective
from penstock.runtime.plan.optimizer import optimizing
from penstock.runtime.plan.train import Lora, Train
from penstock.training.follower import obey
from penstock.training.rank0 import Leader
from tests import training
from tests.forks import Forked
from tests.tiny import EXPERT_TYPES, STRUCTURES, tiny_config
from tests.training import Hostile, plan_of, semantics_of

ROOT = Path(__file__).resolve().parent.parent
HOST_VARIABLES = (("LOCAL_WORLD_SIZE", "WORLD_SIZE"), ("LOCAL_RANK", "RANK"))  # variable per host, and its fallback for all hosts
BY_MEMORY = "RANKS_BY_MEMORY"
BATCH = 8  # default number of sequences
POLICIES = {
    "plain": Policy(),
    "deferred": Policy(update=Update.DEFERRED, prefetch_depth=2, gradient_slots=2),
    "early": Policy(update=Update.DEFERRED, speculate_blocks=(0, 2, 4), resident_blocks=(0, 1)),
    "spilling": Policy(update=Update.DEFERRED, save=saves(all=(3,)), spill_blocks=(0, 1)),
    "eager": Policy(update=Update.EAGER),
    "lean": Policy(update=Update.DEFERRED, speculate_blocks=(1, 2)),
    "lion": Policy(update=Update.DEFERRED),
    "int8": Policy(update=Update.DEFERRED, speculate_blocks=(1, 2)),
    "adapters": Policy(update=Update.DEFERRED, save=saves(products=(2,))),
    "packed": Policy(prefetch_depth=2, resident_blocks=(1,)),
    "scaled": Policy(prefetch_depth=2, resident_blocks=(1,)),
    "fp8": Policy(update=Update.DEFERRED, speculate_blocks=(1, 2), resident_blocks=(2,)),
    "parts": Policy(update=Update.DEFERRED, gradient_slots=2, resident_blocks=(0, 1)),
    "table": Policy(update=Update.DEFERRED),
    "summed": Policy(update=Update.DEFERRED, sum_blocks=(0, 1, 2, 3, 4), gradient_slots=2, speculate_blocks=(1,)),
}
SEMANTICS = {
    "eager": {"clip_norm": None},
    "lean": optimizing("adamw:moments=bf16,master=bf16", None),
    "int8": optimizing("adamw:moments=int8,master=bf16", None),
    "lion": optimizing("lion:moments=int8,master=split24", None),
    "adapters": {"train": Train(lora=Lora(rank=4)), "gradient_dtype": "fp32"},
    "packed": {"train": Train(lora=Lora(rank=8)), "base": "nf4"},
    "scaled": {"train": Train(lora=Lora(rank=8)), "base": "fp8-rows"},
    "fp8": {"products": "fp8"},
    "parts": {"train": Train(names=("*.1.*norm*", "*.2.*norm*"))},  # the lowest layer is frozen
    "table": {"train": Train(names=("model.embed_tokens.weight", "*.0.*norm*"))},  # tied to the head
    "balanced": {"router_loss": 0.1},
}


def case_of(model_type: str, policy: str, groups: int, batch: int, ranks: int) -> tuple[dict, Semantics, Policy]:
    """Return configuration, semantics of a rank, and policy, usually with one accumulation group of all its micro-batches."""
    tied = tiny_config(model_type)["tie_word_embeddings"] or policy in ("early", "spilling", "adapters", "table")
    config = tiny_config(model_type, num_hidden_layers=3, tie_word_embeddings=tied, attention_dropout=0.1)
    fields = SEMANTICS.get(policy, {})
    if policy in ("packed", "scaled") and model_type in EXPERT_TYPES:
        fields |= {"train": Train(lora=Lora(rank=8, targets=("q_proj", "experts")))}
    pairs = {"micro_batch": 2, "objective": parse_objective("orpo")} if policy == "pairs" else {"micro_batch": 1}
    attention = {"attention": "eager"} if model_type == "gpt_oss" else {}  # no fused attention has sinks and dropout
    total = semantics_of(model_type, batch_size=batch, sum_groups=groups, **attention, **pairs, **fields)
    semantics = total.shared_by(ranks)
    policy_of = POLICIES["plain" if policy in ("pairs", "balanced") else policy]
    n = semantics.n_micro_batches
    if policy_of.sum_blocks and n > 1:  # several accumulation groups of a rank
        return config, semantics, replace(policy_of, accumulation_group=n // 2)
    return config, semantics, replace(policy_of, accumulation_group=n, sum_blocks=())


def digest(state, reader, results) -> str:
    """Return the SHA-256 of losses, norms, master weights and moments. `reader`: of all ranks."""
    sha = hashlib.sha256(json.dumps([(r.loss, r.grad_norm) for _, r in sorted(results.items())]).encode())
    for block in range(len(state.plan.workload.blocks)):
        for p in state.owned[block]:
            for held in (reader.saved(p, name) for name in state.plan.semantics.saved_state):
                tensor = held if isinstance(held, torch.Tensor) else held.values()
                sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def trained(case: str, ranks: Processes | None) -> Hostile:
    """Train the case in this rank, with poisoned slots and random delays seeded by the rank."""
    model_type, policy, groups, *sizes = case.split(":")
    batch = int(sizes[0]) if sizes else BATCH
    config, semantics, policy_of = case_of(model_type, policy, int(groups), batch, 1 if ranks is None else ranks.n)
    plan = plan_of(config, semantics, policy_of)
    check(plan)
    machine = training.machine_for(plan, Hostile, delay_seed=0 if ranks is None else ranks.rank, ranks=ranks)
    if ranks is not None:
        ranks.gathered({})  # wait until rank 0 has written frozen parameters
    execute(plan, machine, training.N_STEPS)
    return machine


@cache
def trained_alone(case: str) -> str:
    machine = trained(case, None)
    return digest(machine.host, machine.host, machine.results)


def trained_by(ranks: int, cases: list[str], out: Path, hosts: int = 1, by_memory: bool = False) -> dict[str, str]:
    """Return the digest of each case by `ranks` processes with the environment of `hosts` hosts. `by_memory`: see `Ranks`."""
    store, rendezvous = meeting_place(ranks)
    common = os.environ | rendezvous | {"OMP_NUM_THREADS": "1", BY_MEMORY: "yes" if by_memory else ""}
    command = [sys.executable, "-c", "from tests.rank_law import main; main()", str(out), *cases]
    n_local = ranks // hosts
    places = [{"RANK": str(r), "LOCAL_RANK": str(r % n_local), "LOCAL_WORLD_SIZE": str(n_local)} for r in range(ranks)]
    started = [Forked(command, cwd=ROOT, env=common | place) for place in places]
    try:
        assert [process.wait(timeout=300) for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
    del store  # the rendezvous must live until here
    return json.loads(out.read_text())


def every_case(groups: int, batch: int, half: int) -> list[str]:
    """Return every second model type, with policies in rotation; int8 state is tested with llama only."""
    names = [name for name in POLICIES if name != "int8"]
    cases = [f"{model_type}:{names[i % len(names)]}:{groups}:{batch}" for i, model_type in enumerate(STRUCTURES)]
    return cases[half::2]


def main() -> None:
    out, cases = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    setup.EXCHANGED_BYTES = contract.EXCHANGED_BYTES = 2**14  # small, so that sums of tiny models need several exchanges
    digests = {}
    local_ranks, place = (int(os.environ.get(name, os.environ[of_all])) for name, of_all in HOST_VARIABLES)
    with connected_ranks("cpu", local_ranks, place, bool(os.environ[BY_MEMORY])) as ranks:
        for case in cases:
            machine = trained(case, ranks)
            if ranks.rank == 0:
                leader = Leader(machine, ranks)
                digests[case] = digest(machine.host, leader, machine.results)
                leader.end()
            else:
                obey(machine, ranks, lambda path: {})
        if ranks.rank == 0:
            out.write_text(json.dumps(digests))
    gloo = [name for path in Path("/proc/self/task").glob("*/comm") if "gloo" in (name := path.read_text())]
    assert not gloo, f"threads that outlive the meeting: {gloo}"  # at exit of Python such a thread could abort the process
