"""Which lies can our files tell, and who notices?

A lie is a file of ours in which one thing is not as it was written. It is caught (a command refuses the file), told (the command
goes on, and says what is odd), mended (made anew), or believed, where nobody could know better: then the reason stands beside it.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from pydantic import TypeAdapter

from hwprofiles.schema import Profile
from penstock.checkpoint.checkpoint import sum_of
from penstock.cli.main import cli
from planner.check.check import check
from planner.predict.memory import footprint
from runtime.errors import PenstockError
from runtime.plan import Op, Plan, PlanFile
from runtime.plan.workload import Model

from .running import SCRATCH
from .tiny import tiny_config

Fields = dict[str, Any]
Edit = Callable[[Fields], object]

ASKED, FOUND, SLOW, STATE = "asked.json", "found.json", "slow.json", "run/checkpoint-2/trainer_state.json"
LOOK = ("check", "--quick")
SEARCH = ("check",)
AGAIN = ("run", FOUND, "--data", "text", "--out", "run", "--steps", "3", *SCRATCH, "--resume")
DRAW = ("report", FOUND, "run", "-o", "page.html")
POLICY = {
    "prefetch_depth": 2, "gradient_slots": 2, "accumulation_group": 4, "update": "deferred",
    "save": {"all": [24], "products": [3, 4]},
    "spill_blocks": [0, 1], "resident_blocks": [2], "speculate_blocks": [5, 6], "square_blocks": [7, 8], "device_blocks": [8],
}  # fmt: skip
ASKED_OF = ("qwen2.5-0.5b", "--machine", "rtx4090-server", "--seq-len", "512", "--batch-size", "4", "--micro-batch", "1")
FOUND_OF = ("model", "--machine", "cpu-2core", "--seq-len", "32", "--batch-size", "4", "--micro-batch", "2")


@dataclass(frozen=True)
class Lie:
    """What is said in which file, which command is given it, and what that says. `why`: nobody can know better."""

    what: str
    file: str
    edit: Callable[[Path], object]
    said: str = ""
    command: tuple[str, ...] = LOOK
    told: bool = False
    mended: bool = False  # the file is made anew, without a word
    why: str = ""

    @property
    def words(self) -> list[str]:
        return [*self.command, self.file] if self.command in (LOOK, SEARCH) else [*self.command]


def of_json(edit: Edit) -> Callable[[Path], object]:
    """The same file with its fields edited."""

    def change(path: Path) -> None:
        fields = json.loads(path.read_text())
        edit(fields)
        path.write_text(json.dumps(fields))

    return change


def of_line(number: int, **said: object) -> Callable[[Path], object]:
    """One line of a log, with other values."""

    def change(path: Path) -> None:
        lines = path.read_text().splitlines()
        lines[number] = json.dumps(json.loads(lines[number]) | said)
        path.write_text("\n".join(lines) + "\n")

    return change


def put(place: str, value: object) -> Edit:
    """`a.0.b` set to a value; a function is given what stood there."""

    def change(fields: Fields) -> None:
        at: Any = fields
        *parents, last = place.split(".")
        for key in parents:
            at = at[int(key) if isinstance(at, list) else key]
        key = int(last) if isinstance(at, list) else last
        at[key] = value(at[key]) if callable(value) else value

    return change


def both(*edits: Edit) -> Edit:
    return lambda fields: [edit(fields) for edit in edits]


def times(factor: float) -> Callable[[float], float]:
    return lambda value: value * factor


def scaled(factor: float) -> Edit:
    """All of a claim as if the machine were so many times as fast, each number going with the others."""

    def change(fields: Fields) -> None:
        said, proof = fields["claim"]["prediction"], fields["claim"]["certificate"]
        for name in ("step_s", "p10_step_s", "p90_step_s"):
            said[name] /= factor
        for name in ("tokens_per_s", "model_flop_per_s"):
            said[name] *= factor
        said["busy_s"] = {lane: busy_s / factor for lane, busy_s in said["busy_s"].items()}
        for name in ("policy_bound_s", "machine_bound_s"):
            proof[name] /= factor

    return change


def bounded(factor: float) -> Edit:
    """The bound on policies moved, the gap with it."""

    def change(fields: Fields) -> None:
        proof, step_s = fields["claim"]["certificate"], fields["claim"]["prediction"]["step_s"]
        proof["policy_bound_s"] = proof["machine_bound_s"] + (step_s - proof["machine_bound_s"]) * factor
        proof["gap_fraction"] = step_s / proof["policy_bound_s"] - 1

    return change


def of_blocks(name: str, value: object) -> Edit:
    def change(fields: Fields) -> None:
        for block in fields["workload"]["blocks"]:
            block[name] = value(block[name]) if callable(value) else value

    return change


def of_rates(part: str, factor: float) -> Edit:
    """Every rate below a part of the profile, so many times as high."""

    def grown(at: Any) -> None:
        if isinstance(at, dict):
            if "value" in at:
                at["value"] *= factor
            for value in at.values():
                grown(value)
        elif isinstance(at, list):
            for value in at:
                grown(value)

    def change(fields: Fields) -> None:
        at: Any = fields["profile"]
        for key in part.split("."):
            at = at[key]
        grown(at)

    return change


def without_transient_bytes(fields: Fields) -> None:
    for block in fields["workload"]["blocks"]:
        block["transient_bytes"] = 0
        for tier in block["tiers"]:
            tier["saved_bytes"] = tier["transient_bytes"] = 0


def peaks(fields: Fields) -> None:
    """The claim's memory made to fit what else was changed."""
    plan = TypeAdapter(Plan).validate_json(json.dumps({k: v for k, v in fields.items() if k not in ("claim", "fingerprint")}))
    needs = footprint(plan, Profile.from_json(plan.profile))
    fields["claim"]["prediction"]["device_peak_bytes"] = needs.device_peak_bytes
    fields["claim"]["prediction"]["host_peak_bytes"] = needs.host_peak_bytes


def configured(key: str, value: object) -> Edit:
    """Another configuration, with the fingerprint that it has."""

    def change(fields: Fields) -> None:
        fields["model"]["config"][key] = value
        fields["fingerprint"] = Model(fields["model"]["config"]).fingerprint

    return change


def serial(fields: Fields) -> None:
    """Every op waits for the one before it, so that nothing overlaps: legal, and slow."""
    for i in range(1, len(fields["ops"])):
        line, before = Op.parse(fields["ops"][i]), Op.parse(fields["ops"][i - 1])
        waits = fields["ops"][i].partition(" ^ ")[2].split()
        if line.lane is not before.lane and str(i - 1) not in waits:
            head = fields["ops"][i].partition(" ^ ")[0]
            fields["ops"][i] = f"{head} ^ {' '.join([*waits, str(i - 1)])}"


def summed(edit: Edit) -> Callable[[Path], object]:
    """A state file by one who knows how to make its sum."""

    def change(fields: Fields) -> None:
        edit(fields)
        fields["sha256"] = sum_of(fields)

    return of_json(change)


def claim_lies() -> Iterator[Lie]:
    """What a plan's claim can say."""
    p, c = "claim.prediction.", "claim.certificate."

    def lie(what: str, said: str, *edits: Edit, file: str = ASKED, command: tuple[str, ...] = LOOK) -> Lie:
        return Lie(what, file, of_json(both(*edits)), said, command)

    def to_bound(fields: Fields) -> None:
        fields["claim"]["prediction"]["step_s"] = fields["claim"]["certificate"]["machine_bound_s"]

    def certain(fields: Fields) -> None:
        said = fields["claim"]["prediction"]
        said["p10_step_s"] = said["p90_step_s"] = said["step_s"]

    yield lie("the step is the machine's bound", "do not ascend", to_bound)
    yield lie("a quarter of the step", "shorter than the claimed machine bound", put(p + "step_s", times(0.25)))
    yield lie("all times a tenth less, consistently", "prediction.step_s", scaled(1.1))
    yield lie("all times a thousandth more, consistently", "prediction.step_s", scaled(0.999))
    yield lie("a step without end", "claim.prediction.step_s", put(p + "step_s", 1e300))
    yield lie("a hundred times the tokens per second", "tokens_per_s", put(p + "tokens_per_s", times(100)))
    yield lie("a hundred times the model's work per second", "model_flop_per_s", put(p + "model_flop_per_s", times(100)))
    yield lie("p10 above p90", "do not ascend", put(p + "p10_step_s", times(9)))
    yield lie("p90 below the step", "do not ascend", put(p + "p90_step_s", times(0.1)))
    yield lie("an interval of no width", "prediction.p10_step_s", certain)
    yield lie("an interval half a percent wider", "prediction.p90_step_s", put(p + "p90_step_s", times(1.005)))
    yield lie("a gap of zero", "gap_fraction", put(c + "gap_fraction", 0.0))
    yield lie("a negative gap", "claim.certificate.gap_fraction", put(c + "gap_fraction", -5.0))
    yield lie("a policy bound above the step", "do not ascend", put(c + "policy_bound_s", times(100)))
    yield lie("a policy bound of zero", "claim.certificate.policy_bound_s", put(c + "policy_bound_s", 0.0))
    yield lie("a bound of its own policy at the step, the gap with it", "certificate.policy_bound_s", bounded(1.0))
    yield lie("a bound on all policies at the step, the gap with it", "policy_bound_s", bounded(1.0), file=FOUND, command=SEARCH)
    yield lie(
        "a bound on all policies at the machine's, the gap with it", "policy_bound_s", bounded(0.0), file=FOUND, command=SEARCH
    )
    yield lie("a machine bound of zero", "claim.certificate.machine_bound_s", put(c + "machine_bound_s", 0.0))
    yield lie("a machine bound one percent lower", "certificate.machine_bound_s", put(c + "machine_bound_s", times(0.99)))
    yield lie("another thing binds", "certificate.binding", put(c + "binding", "the weather"))
    yield lie("what binds is a page long", "claim.certificate.binding", put(c + "binding", "x" * 5000))
    yield lie("a GPU busy longer than the step", "busy_s.gpu", put(p + "busy_s.gpu", times(100)))
    yield lie("a GPU that is never busy", "busy_s.gpu", put(p + "busy_s.gpu", 0.0))
    yield lie("no word of the GPU", "busy_s names", lambda fields: fields["claim"]["prediction"]["busy_s"].pop("gpu"))
    yield lie("a lane that there is not", "busy_s", put(p + "busy_s.tpu", 1.0))
    yield lie("a byte less of device memory", "device_peak_bytes", put(p + "device_peak_bytes", lambda n: n - 1))
    yield lie("twice the host memory", "host_peak_bytes", put(p + "host_peak_bytes", lambda n: 2 * n))
    yield lie("fewer families than there are", "certificate.n_families", put(c + "n_families", 1), file=FOUND)
    yield lie("a negative number of families", "claim.certificate.n_families", put(c + "n_families", -1), file=FOUND)
    yield lie("a policy asked for that calls itself the best of all", "n_families", put(c + "n_families", 5))
    yield Lie("the same, with as many families as there are", SLOW, the_best_of_all, "another policy", SEARCH)
    yield lie("a million plans simulated", "n_simulated", put(c + "n_simulated", 10**6), file=FOUND, command=SEARCH)
    yield lie("no step is ever clipped", "prediction.step_s", put(c + "clipped_fraction", 0.0))
    yield lie("more clipped steps than steps", "claim.certificate.clipped_fraction", put(c + "clipped_fraction", 1.5))
    yield lie("an interval of one draw", "certificate.n_draws", put(c + "n_draws", 1))
    yield lie("an interval of other draws", "certificate.seed", put(c + "seed", 7))
    for what, value in (("null", None), ("a word", "fast"), ("true", True), ("a list", [])):
        yield lie(f"a step that is {what}", "claim.prediction.step_s", put(p + "step_s", value))
    yield lie("a step that is no number", "claim", put(p + "step_s", float("nan")))
    yield lie("a step of infinity", "claim", put(p + "step_s", float("inf")))
    yield lie("no prediction", "claim.prediction", put("claim.prediction", None))
    yield lie("no certificate", "claim.certificate", lambda fields: fields["claim"].pop("certificate"))
    yield lie("one key more", "claim.certificate.proven", put(c + "proven", True))
    yield lie("one key less", "claim.prediction.p10_step_s", lambda fields: fields["claim"]["prediction"].pop("p10_step_s"))
    yield lie("no claim at all", "`claim` is null", put("claim", None))


def the_best_of_all(path: Path) -> None:
    """A policy that was asked for, as if it had been searched for: with the families that there are, and its own bound."""
    n_families = json.loads((path.parent / FOUND).read_text())["claim"]["certificate"]["n_families"]
    of_json(put("claim.certificate.n_families", n_families))(path)


def plan_lies() -> Iterator[Lie]:
    """What the rest of a plan can say."""
    layer = "workload.blocks.3."

    def lie(what: str, said: str, *edits: Edit, file: str = ASKED, command: tuple[str, ...] = LOOK) -> Lie:
        return Lie(what, file, of_json(both(*edits)), said, command)

    yield lie("no matrix products", "workload.blocks.1.matmuls", of_blocks("matmuls", []))
    yield lie("products of half the rows", f"{layer}matmuls.0.m", put(layer + "matmuls.0.m", lambda m: m // 2))
    yield lie("no transient or saved bytes", "transient_bytes", without_transient_bytes, peaks)
    yield lie("no kept bytes", "kept_bytes", of_blocks("kept_bytes", 0), peaks)
    yield lie("no pointwise work", "pointwise_bytes", of_blocks("pointwise_bytes", 0))
    yield lie("no calls of kernels", "n_kernels", of_blocks("n_kernels", 0))
    yield lie("no attention", f"{layer}attention", put(layer + "attention", None))
    yield lie("attention within a window", f"{layer}attention.window", put(layer + "attention.window", 16))
    yield lie("no sum of the head's own", "own_sum_bytes", put("workload.blocks.25.own_sum_bytes", 0))
    yield lie("boundaries of 256 bytes", "boundary_bytes", of_blocks("boundary_bytes", 256))
    yield lie("a weight renamed", f"{layer}parameters.0.name", put(layer + "parameters.0.name", "model.layers.2.q"))
    yield lie("a weight transposed", "parameters.2.shape", put(layer + "parameters.2.shape", lambda shape: shape[::-1]))
    yield lie("a block renamed", f"{layer}name", put(layer + "name", "another"))
    yield lie("sequences twice as long", "workload.blocks", put("semantics.seq_len", lambda n: 2 * n), peaks)
    yield lie("a loss by tiles of one token", "workload.blocks.25", put("semantics.loss_tile_tokens", 1))
    yield lie("an MLP by tiles of seven tokens", "workload.blocks.1", put("semantics.mlp_tile_tokens", 7))
    yield lie("attention with all its scores", "workload.blocks.1", put("semantics.attention", "eager"), peaks)
    yield lie("norms as transformers spells them out", "workload.blocks.1", put("semantics.norm", "eager"))
    yield lie("a weight is frozen", "not what the semantics train", put(layer + "parameters.0.frozen", True))
    yield lie("norms alone are trained", "not what the semantics train", put("semantics.train.names", ["*norm.weight"]))
    yield lie("weights come packed", "policy:", put("semantics.base", "nf4"))
    yield lie("no clipping", "certificate.n_families", put("semantics.clip_norm", None), file=FOUND)
    yield lie("a policy that keeps nothing", "claim:", put("policy.save", {"products": [3, 4]}))
    yield lie("a policy that saves no products", "claim:", put("policy.save", {"all": [24]}))
    yield lie("nothing overlaps", "prediction.step_s", serial)
    yield lie("a machine that multiplies a thousand times as fast", "claim:", of_rates("device.matmul", 1000))
    yield lie("a link a hundred times as fast", "claim:", of_rates("link.h2d.bytes_per_s", 100))
    yield lie("an optimizer a tenth faster", "claim:", of_rates("host.optimizer", 1.1))
    yield lie("a machine of which everything is certain", "p10_step_s", lambda fields: certain_machine(fields["profile"]))
    yield lie("a machine with a null", "profile", put("profile.host.n_cores", None))
    yield lie("a machine with a key more", "profile", put("profile.device.overclocked", True))
    yield lie("a machine of a tenth of the device memory", "device memory", put("profile.device.memory_bytes.value", times(0.1)))
    yield lie("another version of the format", "a plan of format 3", put("format_version", 3))
    yield lie("a configuration of another model", "fingerprint", put("model.config.rope_theta", 1.0))
    yield lie("a model of another width, fingerprint and all", "workload.blocks", configured("intermediate_size", 4096))
    yield lie("a model of one layer more, fingerprint and all", "workload.blocks", configured("num_hidden_layers", 25))
    for name in ARENAS:
        yield lie(f"256 bytes more in the last slot of {name}", name, with_larger(name), peaks)


ARENAS = ("weights", "activations", "gradients", "sums", "squares", "device_state", "state", "host_gradients", "spilled", "norm")


def with_larger(name: str) -> Edit:
    """The arena's last slot larger than what goes into it."""

    def change(fields: Fields) -> None:
        (sizes,) = (a["slot_bytes"] for a in fields["arenas"] if a["name"] == name)
        sizes[-1] += 256

    return change


def certain_machine(at: Any) -> None:
    """Every spread of a profile zero."""
    if isinstance(at, dict):
        if "spread_fraction" in at:
            at["spread_fraction"] = 0.0
        for value in at.values():
            certain_machine(value)
    elif isinstance(at, list):
        for value in at:
            certain_machine(value)


def told_lies() -> Iterator[Lie]:
    """What a plan says that need not be wrong: `check` goes on, and says what is odd."""

    def lie(what: str, said: str, *edits: Edit) -> Lie:
        return Lie(what, ASKED, of_json(both(*edits)), said, told=True)

    older = put("claim.certificate.arithmetic", "0123456789abcdef")
    yield lie("all times a tenth less, by another version of the planner", "claimed by another version", scaled(1.1), older)
    twice = put("profile.device.memory_bytes.value", times(2))
    yield lie("a shipped machine of twice the memory", "called rtx4090-server as a shipped one is", twice)
    yield lie("a shipped model with another rotary base", "called qwen2.5-0.5b as a shipped one is", configured("rope_theta", 1.0))
    yield lie("the name of another shipped model", "called qwen2.5-7b as a shipped one is", put("model.name", "qwen2.5-7b"))
    yield Lie("a shipped machine ten times as fast, and planned for", ASKED, planned_faster, "called rtx4090-server", told=True)
    left_out = "not checked: the search (--quick)"
    yield Lie("a policy asked for that calls itself the best of all", SLOW, the_best_of_all, left_out, told=True)
    often = "20.0% of steps are clipped, as was said"
    yield Lie("twice as many clipped steps, and planned for", ASKED, lambda path: asked(path.parent, 0.2), often, told=True)


def planned_faster(path: Path) -> None:
    """A plan whose claim is true of a machine that does not exist."""
    fields = json.loads(path.read_text())
    of_rates("device.matmul", 10)(fields)
    (path.parent / "fast.json").write_text(json.dumps(fields["profile"]))
    asked(path.parent, 0.1, "fast.json")


def run_lies() -> Iterator[Lie]:
    """What a run's files can say."""
    flip = lambda path: path.write_bytes(bytes([*path.read_bytes()[:-1], path.read_bytes()[-1] ^ 1]))  # noqa: E731
    yield Lie("other weights in a checkpoint", "run/checkpoint-2/model.safetensors", flip, "SHA-256", AGAIN)
    yield Lie("another step in a checkpoint", STATE, of_json(put("step", 1)), "SHA-256", AGAIN)
    yield Lie("another step, sum and all", STATE, summed(put("step", 1)), "the state of step 1", AGAIN)
    yield Lie("another seed, sum and all", STATE, summed(put("state.seed", 5)), "of another seed", AGAIN)
    yield Lie("other semantics, sum and all", STATE, summed(put("state.semantics.seq_len", 64)), "semantics", AGAIN)
    yield Lie("more updates than steps, sum and all", STATE, summed(put("state.n_updates", 9)), "n_updates", AGAIN)
    yield Lie(
        "one update fewer, sum and all", STATE, summed(put("state.n_updates", 1)), command=AGAIN,
        why="a skipped step makes no update; sums guard against accidents, not against one who makes them again",
    )  # fmt: skip
    light = of_json(both(put("workload.blocks.1.transient_bytes", 0), put("claim", None)))
    yield Lie("a plan without transient bytes and claim, to be performed", FOUND, light, "workload.blocks.1.transient_bytes", AGAIN)
    halved = of_json(lambda fields: [span.update(op=0) for span in fields["spans"]])
    yield Lie("a timeline of one op", "run/timeline.json", halved, "the timeline of another plan", DRAW)
    reverse = of_json(lambda fields: [s.update(op=max(t["op"] for t in fields["spans"]) - s["op"]) for s in fields["spans"]])
    yield Lie("a timeline backwards", "run/timeline.json", reverse, "the timeline of another plan", DRAW)
    yield Lie("a step that took no time", "run/timeline.json", of_json(put("spans.0.end_s", -1.0)), "cannot be", DRAW)
    yield Lie(
        "half the loss in a log", "run/metrics.jsonl", of_line(0, loss=1.0), command=DRAW,
        why="nobody else has it; a log is what a run said, and training does not read it",
    )  # fmt: skip
    measured = of_json(put("sources", lambda sources: {k: s | {"kind": "measured", "device": None} for k, s in sources.items()}))
    machine = ("plan", "model", "--machine", "machine.json", *FOUND_OF[3:])
    yield Lie("a machine measured on no device", "machine.json", measured, "measured, but on no device", machine)
    faster = of_json(lambda fields: of_rates("device.matmul", 2)({"profile": fields}))
    yield Lie(
        "a machine file of twice the rates", "machine.json", faster, command=machine,
        why="it may be such a machine; a run on it says predicted against measured, and `--recalibrate` corrects it",
    )  # fmt: skip
    yield Lie(
        "a setting that there is not", "run.yaml", lambda path: path.write_text("data: {path: text}\nstep: 3\n"), "step", CONFIG
    )
    rate = lambda path: path.write_text(path.read_text().replace("lr: 1.0e-05", "lr: 0.01"))  # noqa: E731
    yield Lie("another learning rate in the settings of a run", "run/run.yaml", rate, "lr was", RESUMED)
    for what, said in (("tokens of other data", {"tokens_sha256": "0" * 64}), ("files left out", {"n_left_out": 7})):
        yield Lie(f"{what}, in a cache", "run/tokens/tokens-*/about.json", of_json(dict_of(said)), command=AGAIN, mended=True)


def dict_of(said: Fields) -> Edit:
    return lambda fields: fields.update(said)


CONFIG = ("run", "--config", "run.yaml", "--out", "out")
RESUMED = ("run", "--config", "run/run.yaml", *AGAIN[2:])


def lies() -> list[Lie]:
    return [*claim_lies(), *plan_lies(), *told_lies(), *run_lies()]


# -- the files -----------------------------------------------------------------------------------------------------------


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def prepare(home: Path) -> None:
    """Honest files: a plan that was asked for, one that was searched for, a run of that, and a machine."""
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(tiny_config("qwen3", vocab_size=272)))
    (home / "text").mkdir()
    (home / "text" / "a.txt").write_text("The reservoir feeds the penstock, the penstock feeds the turbine. " * 20)
    (home / "policy.json").write_text(json.dumps(POLICY))
    made = [
        asked(home, 0.1),
        invoke("plan", home / FOUND_OF[0], *FOUND_OF[1:], "-o", home / FOUND),
        invoke("plan", home / FOUND_OF[0], *FOUND_OF[1:], "--policy", "megatrain", "-o", home / SLOW),
        invoke("run", home / FOUND, "--data", home / "text", "--out", home / "run", "--steps", 2, *SCRATCH),
    ]
    assert [done.exit_code for done in made] == [0] * len(made), [done.output for done in made]
    (home / "machine.json").write_text(json.dumps(json.loads((home / FOUND).read_text())["profile"]))
    (home / "run.yaml").write_text("data: {path: text}\nplan: found.json\nsteps: 3\nfrom_scratch: true\ntokenizer: bytes\n")


def asked(home: Path, clipped_fraction: float, machine: str = "") -> Result:
    """Make the plan that was asked for, anew."""
    model, option, shipped, *sizes = ASKED_OF
    words = ["plan", model, option, home / machine if machine else shipped, *sizes, "--policy", home / "policy.json"]
    return invoke(*words, "--clipped-steps", clipped_fraction, "-o", home / ASKED)


def lied(home: Path, folder: Path, lie: Lie) -> Path:
    """A copy of the honest files, one of which lies; the file."""
    shutil.copytree(home, folder, dirs_exist_ok=True)
    (path,) = folder.glob(lie.file)
    before = path.read_bytes()
    lie.edit(path)
    assert path.read_bytes() != before, f"{lie.what}: nothing was changed"
    return path


@dataclass(frozen=True)
class Answer:
    """What became of a lie."""

    lie: Lie
    exit_code: int
    said: str  # the line that matters
    is_noticed: bool


def answer(home: Path, folder: Path, lie: Lie) -> Answer:
    """Give the lying file to its command."""
    path = lied(home, folder, lie)
    with contextlib.chdir(folder):
        done = invoke(*lie.words)
    assert done.exception is None or isinstance(done.exception, SystemExit), (lie.what, done.exc_info)
    lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    named = [line for line in lines if lie.said and lie.said in line]
    if lie.mended:
        original = (home / path.relative_to(folder)).read_bytes()
        return Answer(lie, done.exit_code, "made anew", done.exit_code == 0 and path.read_bytes() == original)
    if lie.told or lie.why:
        return Answer(lie, done.exit_code, *named[:1] or lines[-1:], lie.told and bool(named) and done.exit_code == 0)
    is_one_line = bool(lines) and lines[-1].startswith("error: ") and len(done.stderr.splitlines()) == 1
    return Answer(lie, done.exit_code, lines[-1] if lines else "", done.exit_code in (1, 2) and is_one_line and bool(named))


def believed_before(path: Path) -> bool:
    """Whether the checker of structure, memory and two claims, which was all of `check` once, takes a plan."""
    try:
        file = PlanFile.read(path)
        check(file.plan, file.claim)
    except PenstockError:
        return False
    return True
