"""Which files do we read, by which functions, and what is a good file of each?

The functions are those that the commands call, in the same order, as far as reading goes: nothing is trained or searched for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.published.ops import validate_ops
from benchmarks.published.validate import validate_file
from hwprofiles.schema import Profile, read_profile, shipped_profiles
from penstock.cli.plan import _policy
from planner.check.check import check
from planner.check.claim import check_claim, check_origin, claimed, strangers
from planner.lower.lower import lower
from planner.model.config import read_model, refuse_another
from planner.model.workload import build_workload
from planner.predict.cost import costs, region_of
from planner.predict.simulate import simulate
from planner.search.search import search
from planner.show.facts import facts
from planner.show.page import page
from runtime.plan import Plan, PlanFile, Policy, Semantics, Update, saves
from runtime.plan.workload import Model

from .fuzz_judge import CPU_S, World, judged
from .fuzz_mutations import OUTSIDE, Mutate, mutate_json, mutate_plan_text, mutate_rows
from .strategies import MODEL, PROFILE, small_workload
from .tiny import EAGER_ONLY, MODEL_TYPES, tiny_config

ROOT = Path(__file__).parents[1]
N_SCRIPTS = 2  # of a report: the data, and what draws them
MOST_LAYERS, MOST_ELEMENTS = 40, 2**40  # of what is built after reading: more is work that was asked for, not a trick


@dataclass(frozen=True)
class Format:
    """A kind of file. `read` is given the folder in which one lies, as `file`, among its companions."""

    name: str
    file: str
    seeds: Callable[[], list[bytes]]
    mutate: Mutate
    read: Callable[[Path], Any]
    companions: Callable[[], Mapping[str, bytes]] = dict

    def prepare(self, world: World) -> None:
        """Write what belongs to a file, and good ones outside."""
        for name, content in self.companions().items():
            (world.inside / name).parent.mkdir(parents=True, exist_ok=True)
            (world.inside / name).write_bytes(content)
        for name in ("secret", "secret.json", "secret.safetensors", "secret.jsonl", self.file.rpartition("/")[2]):
            (world.outside / name).write_bytes(self.seeds()[0])
        for seed in self.seeds():
            (world.inside / self.file).write_bytes(seed)
            self.read(world.inside)  # what is imported the first time is no look outside

    def judge(self, world: World, data: bytes, cpu_s: float = CPU_S) -> bool:
        """Whether these bytes are taken; FailureError where they are neither taken nor refused as they should be."""
        path = world.inside / self.file
        path.write_bytes(data.replace(OUTSIDE.encode(), bytes(world.outside)))
        return judged(world, lambda: self.read(world.inside), cpu_s)

    def mutant(self, rng: Random, among: list[bytes] | None = None) -> bytes:
        """A good file, mutated once or a few times over."""
        data = rng.choice(among or self.seeds())
        for _ in range(rng.choice((1, 1, 2))):
            data = self.mutate(data, rng)
        return data


def as_json(fields: Any) -> bytes:
    return json.dumps(fields).encode()


# -- plans --------------------------------------------------------------------------------------------------------------

SEMANTICS = Semantics(seq_len=8, batch_size=2, micro_batch=1, loss_tile_tokens=5)


@cache
def sample_plans() -> list[Plan]:
    """Small plans that differ in most knobs, of made-up and of real model types."""
    policies = (
        Policy(),
        Policy(update=Update.DEFERRED, speculate_blocks=(0, 2), accumulation_group=2),
        Policy(spill_blocks=(0, 1), resident_blocks=(2,), gradient_slots=2),
        Policy(boundary_stride=2, square_on_device=True, accumulation_group=2),
    )
    plans = [lower(MODEL, small_workload(3, tied), SEMANTICS, p, PROFILE) for p, tied in zip(policies, (0, 1, 0, 0), strict=True)]
    for model_type in ("qwen3", "gpt_oss"):
        attention = "eager" if model_type in EAGER_ONLY else "sdpa"
        semantics, model = replace(SEMANTICS, attention=attention), Model(tiny_config(model_type), name=model_type)
        plans.append(lower(model, build_workload(model, semantics), semantics, Policy(), PROFILE))
    return plans


@cache
def plan_files() -> list[bytes]:
    return [_plan_json(plan) for plan in sample_plans()]


def _plan_json(plan: Plan) -> bytes:
    from pydantic import TypeAdapter

    fields = json.loads(TypeAdapter(Plan).dump_json(plan))
    peaks = {
        "device": plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes + PROFILE["device"]["context_bytes"]["value"],
        "host": plan.host_arena_bytes + PROFILE["host"]["runtime_bytes"]["value"],
    }
    prediction = {"step_s": 1.0, "p10_step_s": 0.9, "p90_step_s": 1.1} | {
        f"{place}_peak_bytes": n_bytes for place, n_bytes in peaks.items()
    }
    certificate = {"policy_bound_s": 0.9, "machine_bound_s": 0.5, "n_families": 12, "binding": "device compute"}
    claim = {"prediction": prediction, "certificate": certificate}
    return as_json(fields | {"fingerprint": plan.model.fingerprint, "claim": claim})


def _mutate_plan(data: bytes, rng: Random) -> bytes:
    """Anything in it; or only the model's configuration, with the fingerprint that it then has."""
    if rng.random() < 0.7:
        return mutate_json(data, rng)
    try:
        fields = json.loads(data)
        fields["model"]["config"] = json.loads(mutate_json(as_json(fields["model"]["config"]), rng))
        return as_json(fields | {"fingerprint": Model(fields["model"]["config"]).fingerprint})
    except (ValueError, KeyError, TypeError, RecursionError):
        return data


def _read_plan(folder: Path) -> None:
    file = PlanFile.read(folder / "plan.json")
    check(file.plan, file.claim)
    text = page(facts(file, "plan.json"), "plan.json")
    assert text.count("</script>") == N_SCRIPTS, "what a file says has become a part of the page's program"
    _built(file.plan)


@cache
def honest_plan_files() -> list[bytes]:
    """Plans of a real model whose claims are true."""
    model, profile = Model(tiny_config("qwen3"), name="qwen3"), Profile.from_json(PROFILE)
    workload, made = build_workload(model, SEMANTICS), []
    for policy in (Policy(), Policy(update=Update.DEFERRED, speculate_blocks=(0, 2), save=saves(all=(1,)), accumulation_group=2)):
        answer = search(model, workload, SEMANTICS, profile, policy, clipped_fraction=0.25)
        fields = json.loads(_plan_json(answer.plan))
        made.append(as_json(fields | {"claim": answer.claim()}))
    return made


def _read_claim(folder: Path) -> None:
    file = PlanFile.read(folder / "plan.json")
    claim = claimed(file.claim, "plan.json")
    Profile.from_json(file.plan.profile)
    check(file.plan, file.claim)
    check_origin(file.plan, claim)
    check_claim(file.plan, claim)
    list(strangers(file.plan))


def _read_plan_text(folder: Path) -> None:
    check(Plan.parse((folder / "plan.txt").read_bytes().decode("utf-8", "replace")))


def _built(plan: Plan) -> None:
    """The modules, as `run` makes them, unless there are many or large ones."""
    from runtime.compute.blocks import Templates

    if plan.model.config == MODEL.config:
        return
    refuse_another(plan.model, plan.workload.n_layers)
    if plan.workload.n_layers <= MOST_LAYERS and plan.workload.n_params <= MOST_ELEMENTS:
        Templates(plan.model.config, plan.workload, plan.semantics, plan.policy)


def _read_policy(folder: Path) -> None:
    policy = _policy(str(folder / "policy.json"), SEMANTICS, small_workload(3, tied=False))
    assert policy is not None
    check(lower(MODEL, small_workload(3, tied=False), SEMANTICS, policy, PROFILE))


def _policies() -> list[bytes]:
    return [as_json(json.loads(file)["policy"]) for file in plan_files()]


# -- machines -----------------------------------------------------------------------------------------------------------


def _profiles() -> list[bytes]:
    names = shipped_profiles()
    folder = ROOT / "hwprofiles" / "profiles"
    return [
        as_json(PROFILE),
        *((folder / f"{name}.json").read_bytes() for name in names if name in ("cpu-2core", "rtx4090-server")),
    ]


def _read_profile(folder: Path) -> None:
    """As `plan --machine FILE` does, and the time of a plan on the machine."""
    profile = read_profile(str(folder / "profile.json"))
    profile.with_memory(10**9, 10**10)
    plan = replace(sample_plans()[1], profile=profile.to_json())
    simulate(plan, costs(plan, profile), region_of(profile), 2)


def _runs() -> list[bytes]:
    runs = json.loads((ROOT / "benchmarks" / "published_runs.json").read_text())["runs"]
    kinds = {(run["system"], run.get("variant")): run for run in runs}
    return [as_json({"runs": list(kinds.values())[:2]}), as_json(list(kinds.values())[3:4])]


def _read_runs(folder: Path) -> None:
    ledger = validate_file(str(folder / "runs.json"))
    ledger.table()
    ledger.to_json()


def _ops() -> list[bytes]:
    """A row of each kind, those of the first machine that has one."""
    header, *rows = (ROOT / "benchmarks" / "published_ops.csv").read_bytes().splitlines(keepends=True)
    kinds = {row.split(b",")[2]: row for row in reversed(rows)}
    return [header + b"".join(kinds.values()), header + rows[-1]]


def _read_ops(folder: Path) -> None:
    ledger = validate_ops(str(folder / "ops.csv"))
    ledger.table()
    json.dumps(ledger.to_json(), allow_nan=False)


# -- models -------------------------------------------------------------------------------------------------------------


def _configs() -> list[bytes]:
    shipped = [(ROOT / "planner" / "models" / f"{name}.json").read_bytes() for name in ("llama-3.1-8b", "gpt-oss-120b")]
    return [*(as_json(tiny_config(model_type)) for model_type in MODEL_TYPES), *shipped]


def _read_config(folder: Path) -> None:
    """As `plan MODEL` reads it, and as `run` builds it from the plan."""
    model = read_model(str(folder))
    attention = "eager" if model.config.get("model_type") in EAGER_ONLY else "sdpa"
    semantics = replace(SEMANTICS, attention=attention)
    workload = build_workload(model, semantics)
    _built(lower(model, workload, semantics, Policy(), PROFILE))


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("plan (JSON)", "plan.json", plan_files, _mutate_plan, _read_plan),
        Format("plan (its claim)", "plan.json", honest_plan_files, _mutate_plan, _read_claim),
        Format("plan (text)", "plan.txt", lambda: [str(p).encode() for p in sample_plans()], mutate_plan_text, _read_plan_text),
        Format("policy", "policy.json", _policies, mutate_json, _read_policy),
        Format("profile", "profile.json", _profiles, mutate_json, _read_profile),
        Format("published ops", "ops.csv", _ops, mutate_rows, _read_ops),
        Format("published runs", "runs.json", _runs, mutate_json, _read_runs),
        Format("config.json", "config.json", _configs, mutate_json, _read_config),
    )
}
