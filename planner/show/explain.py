"""What does the plan say, in words?"""

from collections import Counter
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hwprofiles.schema import Profile
from planner.predict.memory import Footprint
from planner.predict.resident import advice
from planner.predict.rests_on import lines as rests_on_lines
from planner.search.search import Answer, Certificate
from runtime.plan import Lane, Plan, Policy, Semantics, Update
from runtime.plan.workload import Saved
from runtime.units import show_bytes, show_count, show_rate, show_seconds

from .price import hourly, job, job_in_words
from .price import in_words as price_in_words
from .waterfall import sensitivities, waterfall

LANE_TITLE = {Lane.GPU: "computing", Lane.H2D: "uploads", Lane.D2H: "downloads", Lane.CPU: "host optimizer", Lane.NET: "exchange"}
UPDATE_WORDS = {
    Update.EAGER: "each block as its gradient arrives",
    Update.BARRIER: "when the norm is known, all before the next step",
    Update.DEFERRED: "when the norm is known, block by block into the next forward",
}
# What parts of memory hold, in the field's words
GLOSS = {
    "state": "master weights and optimizer states; frozen weights",
    "packed": "weights as they come, to be unpacked",
    "device state": "optimizer states that stay on the device",
    "kept activations": "saved for backward",
    "saved": "on its way to the host, or back",
    "activations": "layer inputs",
    "spilled": "layer inputs, offloaded",
    "offloaded": "activations, offloaded",
    "sums": "accumulated gradients",
    "squares": "of gradients, for the norm",
    "received": "other ranks' sums, to be added",
    "host gradients": "of blocks, until they are updated by",
    "staging": "gradients being accumulated",
    "resident weights": "weights that stay",
    "runtime": "Python, torch and its libraries",
    "context": "the driver's",
}
SMALL_FRACTION = 0.002  # parts of memory below this share are summed up
PIPE_COLUMNS = 120
PROOF = "what is bounded is every order, buffer and choice that a plan may have, so no other plan gains more than the gap"
PROOF_OF_ONE = "what is bounded is the order in which this policy's work can be done"
CONVENTION = "forward and twice that, causal half of attention, no recompute"


def explain(
    answer: Answer,
    profile: Profile,
    console: Console,
    n_tokens: int | None = None,
) -> None:
    """Print the plan: what it is, how fast, what it takes, what binds, how sure; `n_tokens`: of a job whose hours and price are
    wanted."""
    group = Group(*_parts(answer, profile, n_tokens))
    if console.is_terminal:
        console.print(group)
        return
    console.width = PIPE_COLUMNS
    with console.capture() as captured:
        console.print(group)
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")  # a pipe wants neither colours nor the padding of tables


def kernels_in_words(semantics: Semantics) -> str:
    """`fused norm, loss and pointwise; cudnn attention`: what computes besides products."""
    fused = [part for part in ("norm", "loss", "pointwise") if getattr(semantics, part) == "fused"]
    attention = semantics.attention_kernel if semantics.attention == "sdpa" else "eager"
    others = f"fused {', '.join(fused[:-1])}{' and ' if fused[:-1] else ''}{fused[-1]}" if fused else "eager"
    return f"{others}; {attention} attention"


def trained_in_words(plan: Plan) -> str:
    """`41.9 M parameters: lora:r=16,alpha=32; the others frozen, packed in nf4`."""
    base = plan.semantics.base
    others = "the others frozen" + (f", their products' weights packed in {base}" if base != "bf16" else "")
    return f"{show_count(plan.workload.n_trained)} parameters: {plan.semantics.train}; {others}"


def _checkpoint_holds(plan: Plan) -> str:
    of = "" if plan.workload.trains_all else " of what is trained"
    return f"{'adapters' if plan.semantics.train.lora else 'weights'}, masters and moments{of}"


def _parts(answer: Answer, profile: Profile, n_tokens: int | None) -> Iterator[RenderableType]:
    held = _memory(answer.needs, answer.plan.semantics.ranks)
    for table in (_asked(answer, profile), _predicted(answer, profile, n_tokens), *_tables(answer, profile), held):
        yield table
        yield Text()
    yield _baselines(answer)
    yield Text("Schedules of other systems under the same semantics and costs; the systems themselves differ in more.", style="dim")
    if answer.resident is not None:
        yield Text("Resident: all state on the device, no copies, and AdamW in one pass there, with this micro-batch.", style="dim")
    yield Text()
    if answer.outside:
        yield Text(f"Outside what was measured, taken at the nearest point: {'; '.join(answer.outside)}.")


def _asked(answer: Answer, profile: Profile) -> Table:
    """What was asked for, and the policy that answers it."""
    plan = answer.plan
    semantics, policy = plan.semantics, plan.policy
    resident = advice(None if answer.resident is None else answer.resident.step_s, answer.step_s)
    return _rows(
        (
            "model",
            f"{plan.model.name or plan.model.path}: {show_count(plan.workload.n_params)} parameters, "
            f"{plan.workload.n_layers} layers",
        ),
        *((("trained", trained_in_words(plan)),) if not plan.workload.trains_all else ()),
        ("machine", f"{profile.name}: {profile.summary}"),
        *((("resident", resident),) if resident is not None else ()),
        (
            "step",
            f"{semantics.whole.batch_size} sequences of {semantics.seq_len} tokens, "
            f"in {micro_batches_in_words(semantics)}; "
            f"{semantics.compute_dtype} compute, {semantics.master_dtype} master, "
            f"clip {'none' if semantics.clip_norm is None else semantics.clip_norm}",
        ),
        ("kernels", kernels_in_words(semantics)),
        *(("" if i else "policy", text) for i, text in enumerate(clauses(policy, plan).values())),
    )


def _predicted(answer: Answer, profile: Profile, n_tokens: int | None) -> Table:
    """The step, what it rests on and costs, what binds it, and how far from the best it can be."""
    claim, certificate, hour = answer.prediction_json(), answer.certificate, hourly(profile)
    tokens_per_s = claim["tokens_per_s"]
    work = () if n_tokens is None else ((f"{show_count(n_tokens)} tokens", job_in_words(job(n_tokens, tokens_per_s, hour))),)
    return _rows(
        (
            "predicted",
            f"{show_seconds(claim['step_s'])} a step (P10 to P90: {show_seconds(claim['p10_step_s'])} to "
            f"{show_seconds(claim['p90_step_s'])}), {claim['tokens_per_s']:,.0f} tokens/s",
        ),
        ("", f"{show_rate(claim['model_flop_per_s'], 'FLOP')} of model work: {CONVENTION}"),
        *(("" if i else "rests on", words) for i, words in enumerate(rests_on_lines(answer.plan, profile))),
        *work,
        *(("" if i else "price", words) for i, words in enumerate(price_in_words(hour, tokens_per_s))),
        ("checkpoint", f"{show_bytes(answer.plan.checkpoint_bytes())} each: {_checkpoint_holds(answer.plan)}"),
        ("binding", certificate.binding),
        ("proof", certificate_sentence(certificate, claim["step_s"])),
        ("", PROOF if certificate.n_families else PROOF_OF_ONE),
        *(() if answer.next_best is None else (_next_best(answer, *answer.next_best),)),
        *(() if answer.clipped_step_s is None else (("clipped", _clipped(answer, answer.clipped_step_s)),)),
        *((("note", "no steady rhythm found: the step is the mean of the last steps"),) if not answer.prediction.periodic else ()),
    )


def _tables(answer: Answer, profile: Profile) -> Iterator[Table]:
    """Where the seconds go: by lane, by what holds the step up, and by what would shorten it."""
    plan, claim = answer.plan, answer.prediction_json()
    lanes = _table("lane", "busy", "share of the step")
    for lane in plan.lanes:
        busy_s = claim["busy_s"][str(lane)]
        lanes.add_row(f"{lane}: {LANE_TITLE[lane]}", show_seconds(busy_s), f"{busy_s / claim['step_s']:.0%}")
    yield lanes
    parts = _table("the step is", "takes", "in all", "share")
    for row in waterfall(plan, profile).rows():
        parts.add_row(*row)
    yield parts
    gains = _table("10 % more of", "saves", "of the step")
    for found in sensitivities(plan, profile):
        gains.add_row(*found.row())
    yield gains


def _baselines(answer: Answer) -> Table:
    """The schedules of other systems beside this one."""
    step_s = answer.prediction_json()["step_s"]
    others = _table("schedule", "step", "this plan is")
    for name, outcome in answer.all_baselines().items():
        if "step_s" in outcome:
            others.add_row(name, show_seconds(outcome["step_s"]), f"{outcome['step_s'] / step_s:.2f} times as fast")
        else:
            others.add_row(name, "does not fit", outcome["does_not_fit"])
    return others


def _next_best(answer: Answer, policy: Policy, step_s: float) -> tuple[str, str]:
    """The fastest plan of another kind, how much slower it is (or faster, than a policy that was asked for), and how it differs."""
    mine, other = clauses(answer.plan.policy, answer.plan), clauses(policy, answer.plan)
    differences = [text for topic, text in other.items() if text != mine.get(topic)]
    differences += [f"not: {text}" for topic, text in mine.items() if topic not in other]
    title = "next best" if step_s >= answer.step_s else "faster"
    return title, f"{show_seconds(step_s)} ({step_s / answer.step_s - 1:+.1%}), with {'; '.join(differences) or 'other blocks'}"


def _clipped(answer: Answer, clipped_step_s: float) -> str:
    """What it costs to have updated too early."""
    unclipped_s = answer.prediction.step_s
    return f"a step takes {show_seconds(unclipped_s)}, and {clipped_step_s / unclipped_s - 1:.1%} more if its gradient is clipped"


def clauses(policy: Policy, plan: Plan) -> dict[str, str]:
    """What the schedule does, a clause per topic; no clause where it does the usual thing."""
    traits = {
        "order": _order(policy, plan.semantics.n_micro_batches),
        "weights": f"{counted(policy.prefetch_depth, 'layer')} prefetched",
        "gradients": counted(policy.gradient_slots, "gradient slot"),
        "activations": _saved(policy, plan.workload.n_layers),
    }
    if policy.resident_blocks:
        traits["resident"] = f"weights of {counted(len(policy.resident_blocks), 'block')} stay on the device"
    if policy.spill_blocks:
        traits["spilled"] = f"layer inputs of {counted(len(policy.spill_blocks), 'block')} wait on the host (activation offload)"
    if policy.square_on_device:
        traits["norm"] = "gradients squared on the device, for the norm that clips"
    if policy.device_blocks:
        traits["state"] = f"optimizer states of {counted(len(policy.device_blocks), 'block')} on the device, which updates them"
    early = f"; {counted(len(policy.speculate_blocks), 'block')} already before it is known" if policy.speculate_blocks else ""
    return traits | {"update": f"{policy.update} update: {UPDATE_WORDS[policy.update]}{early}"}


def _order(policy: Policy, n_micro_batches: int) -> str:
    """How micro-batches go through the layers."""
    if n_micro_batches == 1:
        return "one micro-batch: no gradient accumulation"
    if policy.accumulation_group >= n_micro_batches:
        return "gradient accumulation, layer by layer over all micro-batches"
    if policy.accumulation_group > 1:
        return f"gradient accumulation, layer by layer over groups of {policy.accumulation_group} micro-batches"
    return "gradient accumulation, one micro-batch after another"


def _saved(policy: Policy, n_layers: int) -> str:
    """What backward finds of each layer: `saved for backward: all of 5 layers, the inputs of 24; the rest is computed again`. Where
    it waits on the host, that is said."""
    words = {
        Saved.ALL: "all",
        Saved.PRODUCTS: "the products",
        Saved.ATTENTION: "what attention made",
        Saved.INPUT: "the inputs" if policy.boundary_stride == 1 else f"one input in {policy.boundary_stride}",
    }
    n_saving = Counter(policy.saved(b) for b in range(1, n_layers + 1))
    n_away = Counter(policy.saved(b) for b in policy.offload_blocks)
    n_words = ((what, n_saving[of], n_away[of]) for of, what in words.items())
    saved = [f"{what} of {counted(n, 'layer')}{_away(away, n)}" for what, n, away in n_words if n]
    again = "" if n_saving[Saved.ALL] == n_layers else "; the rest is computed again (gradient checkpointing)"
    return f"saved for backward: {', '.join(saved)}{again}"


def _away(n: int, of: int) -> str:
    return "" if n == 0 else " (on the host)" if n == of else f" ({n} of them on the host)"


def counted(n: int, noun: str, plural: str = "s") -> str:
    """`1 layer`, `2 layers`."""
    return f"{n} {noun}{'' if n == 1 else plural}"


def micro_batches_in_words(semantics: Semantics) -> str:
    """`5 micro-batches of 16, the last of 3`; of several ranks, those of each."""
    last = f", the last of {semantics.n_left}" if semantics.n_left else ""
    n_groups, ranks = semantics.whole.sum_groups, semantics.ranks
    apart = f", in {n_groups} sum groups" if n_groups > 1 else ""
    each = f" on each of {ranks} GPUs" if ranks > 1 else ""
    return f"{counted(semantics.n_micro_batches, 'micro-batch', 'es')} of {semantics.micro_batch}{last}{each}{apart}"


def certificate_sentence(certificate: Certificate, step_s: float) -> str:
    """How near to the best the plan is known to be."""
    whose = "no policy is" if certificate.n_families else "this policy is not"
    return (
        f"{whose} below {show_seconds(certificate.policy_bound_s)} "
        f"(gap {certificate.gap_fraction:.1%} of a step of {show_seconds(step_s)}); "
        f"no schedule with this micro-batch is below {show_seconds(certificate.machine_bound_s)}"
    )


def _memory(needs: Footprint, ranks: int) -> Table:
    table = _table("memory" if ranks == 1 else f"memory, each of {ranks} GPUs", "needs", "has")
    for title, parts, peak, has in (
        ("device", needs.device, needs.device_peak_bytes, needs.device_memory_bytes),
        ("host", needs.host, needs.host_peak_bytes, needs.host_memory_bytes),
    ):
        table.add_row(title, show_bytes(peak), show_bytes(has))
        shown = {name: n for name, n in parts.items() if n >= SMALL_FRACTION * peak}
        for name, n_bytes in sorted(shown.items(), key=lambda item: (-item[1], item[0])):
            said = name.replace("_", " ")
            table.add_row(f"  {said} ({GLOSS[said]})" if said in GLOSS else f"  {said}", show_bytes(n_bytes), "")
        rest = peak - sum(shown.values())
        if rest:
            table.add_row("  other", show_bytes(rest), "")
    return table


def _rows(*rows: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for title, text in rows:
        table.add_row(title, Text(text))
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i == 1 else "left")
    return table
