"""Losses: compared with plain torch definitions, streamed under several policies, rejected if unsupported."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from transformers import AutoConfig, AutoModelForSequenceClassification

from penstock.planner.model.workload import build_workload
from penstock.runtime.batch import Batch
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.compute.losses import LossFunction, grpo, known_loss, top_and_rest
from penstock.runtime.errors import PlanError
from penstock.runtime.executor import execute
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.plan import Policy, Semantics, Update, saves
from penstock.runtime.plan.objective import KNOWN, LossUnit, Objective, parse_objective
from penstock.runtime.plan.workload import Model
from tests.lanes import mostly_slow
from tests.real_layers import peak_bytes
from tests.tiny import tiny_config
from tests.training import Remembering, batches_of, fused, machine_for, plan_of, same_state, semantics_of

NAMES = ("dpo:beta=0.3,label_smoothing=0.1", "ipo", "hinge", "robust", "orpo", "simpo", "label-smoothing:0.2", "z-loss:0.01")
KTO = "kto:beta=0.3,desirable_weight=1.5,undesirable_weight=0.5,group=2"
DISTILL = ("distill:7,temperature=2", "distill:7,beta=1", "distill:96,beta=0.3")
GRPO = ("grpo:epsilon_high=0.4", "dapo:beta=0.5", "dr-grpo:max_completion_length=9")
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -2])
TEACHER = torch.randn(4, 16, 96, generator=torch.Generator().manual_seed(8)) * 2
EXTRAS = {"label": torch.tensor([1.0, 1, 0, 0]), "advantage": ADVANTAGES, "old": torch.linspace(-9, -1, 64).view(4, 16)}


def obvious(objective: Objective, logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the sum of a loss from complete fp64 logits, as in its paper."""
    n, mask = objective.numbers, targets != -100
    logps = logits.log_softmax(-1)
    logp = logps.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * mask
    if objective.name in ("cross-entropy", "label-smoothing"):
        epsilon = n.get("epsilon", 0.0)
        return (-(1 - epsilon) * logp - epsilon * logps.mean(-1) * mask).sum()
    if objective.name == "z-loss":
        return (-logp + n["weight"] * logits.exp().sum(-1).log() ** 2 * mask).sum()
    if objective.name == "distill":  # each distribution with one outcome for all but the teacher's likeliest tokens
        ids = TEACHER.topk(int(n["k"])).indices
        top = [(z / n["temperature"]).double().softmax(-1).gather(-1, ids) for z in (TEACHER, logits)]
        exact, q = (torch.cat([t, 1 - t.sum(-1, keepdim=True)], -1).clamp(min=1e-20) for t in top)
        p = teacher_of(objective)["teacher"][..., -ids.shape[-1] - 1 :].contiguous().view(torch.float16).double().softmax(-1)
        torch.testing.assert_close(p, exact, rtol=5e-3, atol=1e-15)  # rounded like the file
        kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
        beta, mixed = n["beta"], (1 - n["beta"]) * q + n["beta"] * p
        losses = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)
        return (losses * mask).sum()
    sums, means = logp.sum(1), logp.sum(1) / mask.sum(1)
    (chosen, rejected), (mean_c, mean_r) = ((t[0::2], t[1::2]) for t in (sums, means))
    z, e = n["beta"] * ((chosen - reference[0::2]) - (rejected - reference[1::2])), n.get("label_smoothing", 0.0)
    if objective.name in ("grpo", "dapo", "dr-grpo"):
        ratio, over = (logp - EXTRAS["old"]).exp(), reference[:, None] - logp
        a, near = ADVANTAGES[:, None], ratio.clamp(1 - n["epsilon_low"], 1 + n["epsilon_high"])
        losses = (n["beta"] * (over.exp() - over - 1) - torch.minimum(ratio * a, near * a)) * mask
        losses = losses / mask.sum(1, keepdim=True) if objective.name == "grpo" else losses / n.get("max_completion_length", 1)
        return losses.sum()
    if objective.name == "kto":  # of two answers, the second is undesirable
        gain = sums - reference
        over = gain[0::2] - gain[1::2].mean().detach().clamp(min=0)
        wanted, unwanted = 1.5 * (1 - (n["beta"] * over[0]).sigmoid()), 0.5 * (1 - (-n["beta"] * over[1]).sigmoid())
        return wanted + unwanted
    of_means = ((sums - reference) / mask.sum(1)).view(-1, 2)
    match objective.name:
        case "dpo":
            return (-(1 - e) * z.sigmoid().log() - e * (-z).sigmoid().log()).sum()
        case "robust":
            return ((-(1 - e) * z.sigmoid().log() + e * (-z).sigmoid().log()) / (1 - 2 * e)).sum()
        case "hinge":
            return (1 - z).clamp(min=0).sum()
        case "ipo":
            return ((of_means[:, 0] - of_means[:, 1] - 1 / (2 * n["beta"])) ** 2).sum()
        case "orpo":
            odds = (mean_c.exp() / (1 - mean_c.exp())) / (mean_r.exp() / (1 - mean_r.exp()))
            return (-mean_c - n["beta"] * odds.log().sigmoid().log()).sum()
    return -(n["beta"] * (mean_c - mean_r) - n["gamma"]).sigmoid().log().sum()


def teacher_of(objective: Objective) -> dict[str, torch.Tensor]:
    """Return the fields of a teacher file."""
    if objective.n_top is None:
        return {}
    return {"teacher": top_and_rest(TEACHER.flatten(0, 1), objective.n_top, objective.numbers["temperature"]).view(4, 16, -1)}


def head_of(semantics: Semantics, vocab_size: int = 96) -> tuple[Templates, dict[str, torch.Tensor], int]:
    """Return templates, random weights of their head, and its booked bytes."""
    config = tiny_config("llama", vocab_size=vocab_size)
    workload = build_workload(Model(config), semantics)
    weights = {p.name: torch.randn(p.shape) * 0.2 for p in workload.blocks[-1].parameters}
    return Templates(config, workload, semantics), weights, workload.blocks[-1].transient_bytes


def batch_of_pairs(seq_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, targets of four sequences with different answers, and log-probabilities of a reference."""
    torch.manual_seed(1)
    hidden, targets = torch.randn(4, seq_len, 32), torch.randint(0, 96, (4, seq_len))
    targets[:, :3], targets[1, -4:], targets[2, -1:] = -100, -100, -100
    return hidden, targets, torch.randn(4, dtype=torch.float64) * 3 - 30


def packed(batch: Batch, rows_each: int, n_each: int = 3) -> Batch:
    """Pack documents into each sequence. Documents of a pair or a group span all sequences of their unit, in random order."""
    n_rows, seq_len = batch.targets.shape
    ends = torch.linspace(0, seq_len, n_each + 1).long()
    targets = batch.targets.index_fill(1, ends[1:] - 1, -100)
    member, number = torch.arange(n_rows)[:, None], torch.arange(n_each)
    first = (member + number) % rows_each * seq_len  # its row in the batch
    answer, lengths = torch.stack([first + ends[:-1], first + ends[1:]], dim=2), tuple(ends.diff().tolist())
    extras = {"answer": answer, "last": answer[..., 1] - 2, "label": (member // 2 + number) % 2.0}
    extras["reference"] = torch.linspace(-20, -10, answer[..., 0].numel(), dtype=torch.float64).view(n_rows, -1)
    return replace(batch, targets=targets, document_tokens=(lengths,) * n_rows, n_answers=n_rows * n_each, extras=extras)


@pytest.mark.parametrize("kernels", ["eager", "fused"])
@pytest.mark.parametrize("name", ["cross-entropy", *NAMES, KTO, *GRPO, *DISTILL])
def test_a_loss_by_tiles_is_its_definition_on_whole_logits(name, kernels):
    objective = parse_objective(name)
    options = fused("llama") | ({"loss": "eager"} if objective.takes_eager else {}) if kernels == "fused" else {}
    semantics = replace(semantics_of("llama", compute_dtype="fp32", micro_batch=4, **options), objective=objective)
    templates, weights, _ = head_of(semantics)
    hidden, targets, reference = batch_of_pairs(semantics.seq_len)
    reference -= 50 * (objective.name == "kto")  # so that the mean gain of mismatched answers is positive, too
    reference /= 10 if objective.per is not objective.of or objective.name == "dapo" else 1  # per token
    n, total = semantics.n_losses(int((targets != -100).sum())), torch.zeros_like(weights[templates.head.weight])
    extras = EXTRAS | {"reference": reference} | teacher_of(objective)
    loss, gradient, _ = templates.head.loss(weights, hidden, targets, n, total, extras)
    leaf, head = hidden.clone().requires_grad_(), weights[templates.head.weight].clone().requires_grad_()
    expected = obvious(objective, F.linear(templates.head._normed(weights, leaf), head).double(), targets, reference)
    by_hidden, by_head = torch.autograd.grad(expected / n, [leaf, head])
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    for actual, wanted in ((gradient, by_hidden), (total, by_head)):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()))


ALONE = ("cross-entropy", "dpo", "label-smoothing", "z-loss", "dapo:beta=0.1", "distill:16,beta=0.5,temperature=2")


@mostly_slow(
    ("name", "n_packed"), [*product(ALONE, [0]), *product(("dpo", "grpo", "reward"), [256])], fast=(0, 1, 2, 3, 4, 5, 6, 8)
)
def test_the_head_takes_no_more_memory_than_its_loss_is_booked(name, n_packed):
    """Logits dominate, or per-token values if answers share long sequences."""
    tile, seq_len, vocab_size = (16, 512, 96) if n_packed else (128, 64, 4096)
    sizes = {"compute_dtype": "fp32", "micro_batch": 4, "seq_len": seq_len, "loss_tile_tokens": tile}
    semantics = replace(semantics_of("llama", **sizes), objective=parse_objective(name))
    templates, weights, booked = head_of(semantics, vocab_size)
    hidden, targets, reference = batch_of_pairs(seq_len)
    total = torch.zeros_like(weights[templates.head.weight])
    extras = EXTRAS | {"reference": reference, "old": reference}
    if n_packed:
        batch = packed(Batch(targets, targets), semantics.objective.rows_each, n_packed)
        targets, extras = batch.targets, extras | batch.extras
    if (k := semantics.objective.n_top) is not None:
        extras["teacher"] = top_and_rest(torch.randn(4 * 64, 4096), k, 1.0).view(4, 64, -1)
    work = lambda: templates.head.loss(weights, hidden, targets, 4, total, extras)  # noqa: E731
    work()
    assert peak_bytes(work) <= booked <= 1.5 * peak_bytes(work)


ANY = ("dpo", "kto:group=2", "grpo:beta=0.1", "reward")


def with_loss(name: str, is_packed: bool) -> tuple[Semantics, list[Batch]]:
    """Return semantics of four micro-batches with a loss, and batches with its extras."""
    n = max((objective := parse_objective(name)).rows_each, 2)
    semantics = semantics_of("llama", batch_size=4 * n, micro_batch=n, objective=objective, loss_tile_tokens=12)
    extras = {"reference": torch.linspace(-40, -30, 4 * n, dtype=torch.float64), "label": torch.arange(4 * n) // 2 % 2}
    extras |= {"last": torch.arange(4 * n) % 9 + 3, "advantage": torch.linspace(-1, 1, 4 * n)}
    extras["old"] = torch.full((4 * n, semantics.seq_len), -4.5)
    if objective.n_top is not None:
        extras["teacher"] = top_and_rest(torch.randn(4 * n * 16, 96), objective.n_top, 1.0).view(4 * n, 16, -1)
    batches = list(batches_of(96, 4 * n, semantics.seq_len))
    if is_packed:
        batches = [packed(batch, objective.rows_each) for batch in batches]
        extras |= batches[0].extras
    if objective.of is LossUnit.TOKENS:
        extras["reference"] = torch.full((4 * n, semantics.seq_len), -4.0)
    batches = [replace(batch, extras=extras) for batch in batches]
    return semantics, batches


@mostly_slow(
    ("name", "is_packed"),
    [*product((*ANY, "distill:9,beta=0.5", "classify:mean=1"), [False]), *product((*ANY, "classify"), [True])],
    fast=(0, 2, 3, 4, 7, 10),
)
def test_five_policies_train_the_same_bits_with_any_loss(name, is_packed):
    """Use tiles that begin in the middle of a sequence."""
    semantics, batches = with_loss(name, is_packed)
    policies = [
        Policy(),
        Policy(accumulation_group=4, update=Update.DEFERRED),
        Policy(accumulation_group=2, resident_blocks=(1,), gradient_slots=2, sum_blocks=(0, 1, 3), square_on_device=True),
        Policy(save=saves(all=(1, 2)), prefetch_depth=2),
        Policy(spill_blocks=(0, 1), accumulation_group=4),
    ]
    machines = []
    for policy in policies:
        plan = plan_of(tiny_config("llama"), semantics, policy)
        machines.append(machine_for(plan, Remembering, batches))
        execute(plan, machines[-1], 3)
    first, *rest = machines
    assert all(same_state(first, machine) for machine in rest)
    assert [m.results[2].loss for m in rest] == [first.results[2].loss] * 4
    assert first.results[0].loss != first.results[2].loss


def test_extras_of_a_function_reach_the_rows_that_they_are_of():
    """Sequences and tokens have weights."""
    objective = Objective("own.py:f", {}, LossUnit.TOKENS, ("weight", "advantage"), 3, "0" * 64)
    semantics = semantics_of("llama", compute_dtype="fp32", micro_batch=4, objective=objective)
    function = lambda logits, targets, weight, advantage: (  # noqa: E731  # it changes targets but no mask
        F.cross_entropy(logits, targets.clamp_(min=0), reduction="none") * weight * advantage
    )
    workload = build_workload(Model(tiny_config("llama")), semantics)
    templates = Templates(tiny_config("llama"), workload, semantics, loss=LossFunction(objective, function))
    _, weights, _ = head_of(replace(semantics, objective=Objective()))
    hidden, targets, _ = batch_of_pairs(16)
    extras = {"weight": torch.rand(4), "advantage": torch.rand(4, 16)}
    loss, _, _ = templates.head.loss(weights, hidden, targets.clone(), 1, None, extras)
    logits = F.linear(templates.head._normed(weights, hidden), weights[templates.head.weight])
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(4, 16)
    torch.testing.assert_close(loss.float(), (losses * extras["weight"][:, None] * extras["advantage"]).sum())


def test_an_unlikely_rollout_has_a_finite_gradient():
    logits = torch.zeros(4, 8, requires_grad=True)
    arguments = torch.zeros(4).long(), torch.tensor([1.0, -1, 1, -1]), torch.tensor([-200.0, -200, -1e30, -2]), 0.2, 0.2, 0.1
    losses = grpo(logits, *arguments, reference=torch.tensor([-2.0, 200, -2, -2]))
    (gradient,) = torch.autograd.grad(losses.sum(), [logits])
    assert bool(losses.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert bool(gradient[3].any())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["classify:3", "reward:0.1"])
def test_a_head_of_ones_own_is_that_of_transformers(name, dtype):
    """Compare loss and gradients on the last token, like transformers' model for sequence classification."""
    objective, config = parse_objective(name), tiny_config("llama", vocab_size=96)
    torch.manual_seed(2)
    hf_config = AutoConfig.for_model(**config | {"num_labels": objective.n_labels, "pad_token_id": 0})
    model = AutoModelForSequenceClassification.from_config(hf_config, dtype=DTYPE[dtype])
    ids, ends = torch.randint(1, 96, (4, 16)), torch.tensor([15, 9, 3, 12])
    ids[torch.arange(16) > ends[:, None]] = 0
    labels, hidden = torch.tensor([0, 2, 1, 1]), []

    def remember(_, args):
        args[0].retain_grad()
        hidden.append(args[0])

    model.model.norm.register_forward_pre_hook(remember)
    scores = model(ids, labels=labels if objective.name == "classify" else None)
    chosen, rejected = scores.logits[0::2, 0], scores.logits[1::2, 0]
    loss = (0.1 * (chosen + rejected) ** 2 - F.logsigmoid(chosen - rejected)).mean() if objective.name == "reward" else scores.loss
    loss.backward()
    semantics = replace(semantics_of("llama", compute_dtype=dtype, micro_batch=4), objective=objective)
    templates = Templates(config, build_workload(Model(config), semantics), semantics)
    held = dict(model.named_parameters())
    head = {p.name: held[p.name].detach() for p in templates.workload.blocks[-1].parameters}
    total, n, extras = torch.zeros(head["score.weight"].shape), semantics.n_losses(9), {"last": ends, "label": labels.float()}
    arguments = hidden[0].detach(), torch.where(ids > 0, ids, -100), n, total, extras
    loss_sum, of_hidden, of_norm = templates.head.loss(head, *arguments)
    assert abs(float(loss_sum) / n / float(loss.detach()) - 1) < (1e-6 if dtype == "fp32" else 5e-3)
    actual = of_hidden, total, of_norm["model.norm.weight"]
    for result, leaf in zip(actual, (hidden[0], held["score.weight"], held["model.norm.weight"]), strict=True):
        wanted = leaf.grad
        error = float((result.float() - wanted.float()).norm() / wanted.float().norm())
        assert error < (1e-5 if dtype == "fp32" else 1e-2), error


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "simpo"])
def test_a_pair_with_a_half_without_tokens_teaches_nothing(name):
    loss, logps, reference = known_loss(parse_objective(name)), torch.tensor([-20.0, 0, -3, -4]).double(), torch.zeros(4)
    total, slopes = loss.of_sequences(logps, torch.tensor([4, 0, 2, 2]), {"reference": reference})
    alone, slopes_alone = loss.of_sequences(logps[2:], torch.tensor([2, 2]), {"reference": reference[2:]})
    assert total == alone
    assert slopes.tolist() == [0, 0, *slopes_alone.tolist()]


def test_a_loss_that_is_printed_is_read_back():
    for name in (*NAMES, KTO, *GRPO, *DISTILL, *KNOWN):
        objective = parse_objective(name)
        assert parse_objective(str(objective)) == objective
    file, user_loss = TypeAdapter(Semantics), Objective("own.py:f", {}, LossUnit.PAIRS, ("reference",), 3, "0" * 64)
    for objective in (Objective(), parse_objective("dpo:0.25"), user_loss):
        semantics = semantics_of("llama", micro_batch=2, objective=objective)
        assert file.validate_json(file.dump_json(semantics)) == semantics


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dop", "is not known"),
        ("dpo:gamma=1", "its numbers are beta, label_smoothing"),
        ("dpo:beta=x", "is no number"),
        ("dpo:label_smoothing=0.5", "at least 0 and below 0.5"),
        ("dpo:beta=0", "nothing is learned"),
        ("dpo:0.1,beta=0.2", "beta is given twice"),
        ("dpo:beta=nan", "beta is nan"),
        ("distill:beta=1.5", "beta must be 0 (forward KL) to 1"),
        ("distill:k=0", "k is 0; it must be at least 1 and below 1e+06"),
        ("kto:group=2.5", "group is 2.5; it is a whole number of answers"),
    ],
)
def test_a_loss_that_does_not_exist_is_refused_in_a_line(text, says):
    with pytest.raises(PlanError, match=re.escape(says)) as error:
        parse_objective(text)
    assert "\n" not in str(error.value)


def test_half_a_pair_in_a_micro_batch_is_refused():
    for sizes in ({"micro_batch": 1}, {"micro_batch": 2, "batch_size": 5}):
        with pytest.raises(PlanError, match="each 2 sequences must share a micro-batch"):
            plan_of(tiny_config("llama"), semantics_of("llama", objective=parse_objective("orpo"), **sizes), Policy())
