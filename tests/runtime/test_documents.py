"""Packed sequences: document isolation under any policy, in the memory that plans book."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, cycle
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaMLP

from penstock.model_checks.document_isolation import supports_documents
from penstock.planner.check.check import check
from penstock.planner.lower.forward import forward_plan
from penstock.planner.model.workload import supported_attention
from penstock.runtime.batch import Batch, positions_of
from penstock.runtime.errors import WorkloadError
from penstock.runtime.executor import execute
from penstock.runtime.layers import documents, kernels
from penstock.runtime.layers.layer_chain import trace
from penstock.runtime.layers.meta_models import meta_model
from penstock.runtime.layers.model_parts import ModelParts
from penstock.runtime.plan import Kind, Policy, Update, saves
from penstock.runtime.plan.footprint import document_bytes, padded_tokens
from penstock.runtime.plan.workload import Model
from penstock.training.validation import evaluate
from tests import reference, training
from tests.every_type import tiny
from tests.forwards import HostileToBoth, LateForBoth, exact, resident, sequences_of
from tests.lanes import mostly_slow
from tests.late_streams import LateStreams, Poisoned
from tests.real_layers import hf_model
from tests.tiny import EAGER_ONLY, EXPERT_TYPES, MODEL_TYPES, tiny_config
from tests.training import N_STEPS, batches_of, differences, initial_masters, plan_of, semantics_of, settings_of_torch, state_of

from .test_host_never_waits import Watching
from .test_replay import WIDE, device_bytes
from .test_sides import SHARED
from .test_sides import TYPES as SIDES

# Latent attention and experts, part of heads rotated, none, other scales, windows in some layers
FURTHER = ("deepseek_v3", "glm4_moe", "olmoe", "phi3", "glm4", "gpt2", "granite", "gemma3_text", "olmo3", "gpt_neox")
POLICIES = {
    "one by one": Policy(),
    "kept": Policy(save=saves(all=(1, 2, 3)), accumulation_group=4, resident_blocks=(0,)),
    "attention": Policy(save=saves(attention=(1, 2)), accumulation_group=2, sum_blocks=(0, 2, 4)),
    "products": Policy(save=saves(products=(1, 3)), spill_blocks=(0, 1), accumulation_group=4, update=Update.DEFERRED),
    "on the host": Policy(save=saves(products=(1, 2), attention=(3,)), offload_blocks=(1, 2, 3), accumulation_group=2),
    "strided": Policy(boundary_stride=2, accumulation_group=4),
}
# Sequences of a step: long and short documents, single tokens, one that fills the sequence, and one repeated
CUTS = ((1, 7, 3, 5), (16,), (9, 1, 1, 5), (9, 1, 1, 5))
OTHER_CUTS = ((4, 12), (2,) * 8, (16,), (15, 1))


def config_of(model_type: str, **overrides) -> dict:
    return tiny(model_type) if model_type in FURTHER else tiny_config(model_type, **({"num_hidden_layers": 3} | overrides))


def packed_batches(*cuts: Sequence[Sequence[int]] | None, seq_len: int = 16) -> list[Batch]:
    """Cut the test batches into documents. The last token of a document has no label."""
    result = []
    for batch, cut in zip(batches_of(96, 4, seq_len), cuts, strict=True):
        targets = batch.targets.clone()
        for row, lengths in enumerate(cut or ()):
            targets[row, torch.tensor(lengths).cumsum(0) - 1] = -100
        result.append(Batch(batch.input_ids, targets, cut and tuple(map(tuple, cut))))
    return result


def trained(config, semantics, policy, batches, machine_type=HostileToBoth, n_steps=N_STEPS, **options):
    plan = plan_of(config, semantics, policy)
    check(plan)
    return training.trained(plan, machine_type, n_steps, batches=batches, **options)


def plainly(config, semantics, batches) -> reference.Reference:
    return reference.train(config, semantics, initial_masters(config, semantics), batches, settings_of_torch(N_STEPS))


WAYS = [*(("llama", name, {}, {}) for name in POLICIES)]
WAYS += [("gemma4_text", "kept", SHARED, {})] if "gemma4_text" in SIDES else []
WAYS += [(t, "kept" if t in EAGER_ONLY else name, {}, {}) for t, name in zip(MODEL_TYPES, cycle(["products", "kept", "attention"]))]
WAYS += [("mistral", "on the host", {"sliding_window": n}, {}) for n in (16, 9, 8)]  # no effect, or within one document
WAYS += [("qwen2", "kept", {}, {"micro_batch": 2}), ("qwen2", "one by one", {}, {"micro_batch": 3, "compute_dtype": "fp32"})]
WAYS += [("qwen2", "attention", {}, {"mlp_tile_tokens": 5}), ("llama", "strided", {}, {"attention": "eager", "micro_batch": 2})]


@mostly_slow(("model_type", "name", "overrides", "fields"), WAYS)
def test_documents_train_the_plain_loops_bits_on_any_policy(model_type, name, overrides, fields):
    """Use different documents in each micro-batch and step; the second step attends across the sequence."""
    config, semantics = config_of(model_type, **overrides), semantics_of(model_type, **fields)
    batches, policy = packed_batches(CUTS, None, OTHER_CUTS), POLICIES[name]
    policy = replace(policy, accumulation_group=min(policy.accumulation_group, semantics.n_micro_batches))
    assert differences(trained(config, semantics, policy, batches, delay_seed=3), plainly(config, semantics, batches)) == []


def test_every_policy_draws_the_same_dropout():
    config, semantics = config_of("llama", attention_dropout=0.3), semantics_of("llama")
    batches = packed_batches(CUTS, OTHER_CUTS, CUTS)
    expected = training.as_expected(trained(config, semantics, POLICIES["kept"], batches))
    for name in ("products", "strided"):
        assert differences(trained(config, semantics, POLICIES[name], batches), expected) == [], name


def each_alone(config, semantics, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients by name, one document at a time through transformers' model without packing."""
    model = resident(config, semantics)
    loss_sum = torch.zeros(())
    for row, lengths in enumerate(batch.document_tokens):
        for tokens, targets in zip(batch.input_ids[row].split(lengths), batch.targets[row].split(lengths), strict=True):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            loss_sum = loss_sum + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    loss = loss_sum / batch.n_supervised
    loss.backward()
    return loss.item(), {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


@mostly_slow("model_type", [*MODEL_TYPES, *FURTHER])
def test_loss_and_gradients_are_those_of_the_documents_alone(model_type):
    """Derive gradients from the first moment after one step: (1 - beta1) times the gradient."""
    config, semantics = config_of(model_type), exact(model_type, clip_norm=None, micro_batch=2)
    (batch, *_) = batches = packed_batches(CUTS, CUTS, CUTS)
    machine = trained(config, semantics, Policy(save=saves(all=(1,))), batches, n_steps=1)
    loss, gradients = each_alone(config, semantics, batch)
    assert machine.results[0].loss == pytest.approx(loss, rel=1e-6)
    for name, exp_avg in state_of(machine)[1].items():
        gradient = exp_avg / (1 - training.scheduled(0).beta1)
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=2e-6)


def logits_of(machine, batch: Batch) -> torch.Tensor:
    """Return logits of every token, computed by the machine."""
    plan = forward_plan(machine.plan, len(batch.input_ids))
    logits = []

    def note(last):
        logits.append(last.templates.head.logits(last.weights, last.hidden_BTD.flatten(0, 1)))

    execute(plan, machine.forwards(plan, lambda step: batch, note), 1)
    return torch.stack(logits)


@mostly_slow("model_type", [*MODEL_TYPES, *FURTHER])
def test_other_documents_change_nothing_of_a_documents_logits(model_type):
    """Compare bitwise. Experts also receive tokens of other documents, and round differently."""
    config, semantics = config_of(model_type), exact(model_type)
    machine = trained(config, semantics, Policy(), packed_batches(CUTS, CUTS, CUTS), n_steps=0)
    batch = packed_batches(CUTS, CUTS, CUTS)[0]
    expected = logits_of(machine, batch)
    tokens = batch.input_ids.clone()
    tokens[0, :1], tokens[0, 8:] = 5, (tokens[0, 8:] + 1) % 96  # all but the second document of the first sequence
    changed = logits_of(machine, Batch(tokens, batch.targets, batch.document_tokens))
    same = partial(torch.allclose, atol=1e-6) if model_type in EXPERT_TYPES or "num_experts_per_tok" in config else torch.equal
    assert same(expected[0, 1:8], changed[0, 1:8])
    assert not torch.allclose(expected[0, 8:], changed[0, 8:])
    across = logits_of(machine, Batch(batch.input_ids, batch.targets))
    assert not torch.allclose(expected[0, 1:8], across[0, 1:8])
    alone = Batch(batch.input_ids[:1].roll(-1, 1), batch.targets[:1], ((7, 9),))  # its offset in the sequence has no effect
    assert torch.allclose(logits_of(machine, alone)[0, :7], expected[0, 1:8], atol=1e-5)


def test_an_evaluation_attends_by_document_too():
    config, semantics = config_of("llama"), semantics_of("llama", micro_batch=2)
    batches = packed_batches(CUTS, OTHER_CUTS, CUTS)
    machine = trained(config, semantics, Policy(), batches, LateForBoth, n_steps=0, streams=LateStreams(0, 0.5))
    padded = evaluate(machine, sequences_of(batches[0]), 3)
    evaluated = evaluate(machine, sequences_of(batches[0]), 4)
    execute(machine.plan, machine, 1)
    assert evaluated["eval_loss"] == machine.results[0].loss
    assert padded["eval_tokens"] == int((batches[0].targets[:3] != -100).sum())


def test_no_device_is_waited_for_after_two_micro_batches():
    waits = []

    class Watched(Poisoned):
        def work(self, index, op, step):
            with Watching([]) as watching:
                super().work(index, op, step)
            if step and op.kind in (Kind.FORWARD, Kind.BACKWARD):
                waits.extend(watching.calls)

    batches = [replace(batch, n_counted=batch.n_supervised) for batch in packed_batches(CUTS, OTHER_CUTS, CUTS)]  # on the host
    trained(config_of("llama"), semantics_of("llama"), Policy(), batches, Watched, streams=LateStreams(0, 0.5))
    assert waits == []


@mostly_slow(
    ("model_type", "way"),
    [
        *(("llama", Policy(save=save)) for save in (saves(), saves(attention=(1, 2)), saves(all=(1, 2, 3)))),
        *((model_type, Policy(save=saves(products=(1, 2)))) for model_type in ("qwen3_moe", "ernie4_5")),
        *((model_type, Policy(save=saves(all=(1, 2)))) for model_type in ("gemma2", "mistral", "ernie4_5")),
        *(("gpt_oss", Policy(save=save)) for save in (saves(all=(1, 2)), saves(attention=(1, 2)))),
    ],
)
def test_documents_take_the_memory_that_the_plan_books(model_type, way):
    policy = replace(way, accumulation_group=2)
    semantics = semantics_of(model_type, seq_len=96, micro_batch=2, compute_dtype="fp32", loss_tile_tokens=16)
    plan = plan_of(tiny_config(model_type, **WIDE), semantics, policy)
    plan = replace(plan, profile=plan.profile | {"device": plan.profile["device"] | {"kind": "cpu"}})
    batches = [Batch(b.input_ids, b.targets, ((48, 30, 17, 1), (10,) * 9 + (6,)) * 2) for b in batches_of(96, 4, 96)]
    without_bytes, _ = device_bytes(plan)
    left_bytes, peak_bytes = device_bytes(plan, batches)
    assert peak_bytes <= plan.kept_bytes + plan.transient_bytes + document_bytes(plan, on_cuda=False)
    assert left_bytes - without_bytes <= document_bytes(plan, on_cuda=False)


REFUSED = {
    **dict.fromkeys(("qwen3_next", "falcon", "lfm2", "jamba"), "DecoderLayer mixes tokens outside of transformers'"),
    **{"mamba": "MambaBlock mixes tokens", "llama4_text": "computes positions from offsets"},
    **{"deepseek_v32": "computes other masks"},
}


@mostly_slow("model_type", REFUSED)
def test_a_model_that_lets_documents_meet_is_refused_with_why(model_type):
    config = tiny(model_type)
    semantics = semantics_of(model_type, attention=supported_attention(Model(config))[0])
    assert REFUSED[model_type] in (supports_documents(config, semantics) or "")


def stretched(model_type: str, rope_type: str) -> dict[str, Any]:
    """Return a configuration with other frequencies for documents of more than 8 tokens."""
    config = tiny(model_type)
    width = config.get("qk_rope_head_dim") or config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = {"rope_theta": 1e4, **(config.get("rope_parameters") or {}), "rope_type": rope_type, "factor": 4.0}
    n = int(width * rope.get("partial_rotary_factor", 1)) // 2
    if rope_type == "dynamic":
        return config | {"rope_parameters": rope, "max_position_embeddings": 8}
    rope |= {"short_factor": [1.5] * n, "long_factor": [3.0 + i for i in range(n)], "original_max_position_embeddings": 8}
    rope |= {"short_mscale": 1.0, "long_mscale": 1.3} if model_type == "phimoe" else {}
    return config | {"rope_parameters": rope, "max_position_embeddings": 64, "original_max_position_embeddings": 8}


STRETCHED = [("phi3", "longrope"), ("phimoe", "longrope"), ("minicpm3", "longrope"), ("internlm3", "dynamic"), ("llama", "dynamic")]


@pytest.mark.parametrize(("model_type", "rope_type"), STRETCHED)
def test_positions_of_a_document_are_those_that_transformers_gives_it_alone(model_type, rope_type):
    """Frequencies follow the length of the document, without padding, in packed rows and in rows of their own."""
    config = stretched(model_type, rope_type)
    assert supports_documents(config, semantics_of(model_type, seq_len=32)) is None
    chain = trace(ModelParts(meta_model(config, semantics_of(model_type, compute_dtype="fp32"))))
    lengths, tokens_BT = ((5, 9, 8, 10), (32,), (20, 12), (8, 24)), torch.zeros(4, 32, dtype=torch.long)
    padded = Batch(tokens_BT, tokens_BT, n_tokens=(5, 32, 20, 8)).padded_documents
    with chain.parts.zero_parameters():
        plain = chain.embed(None, tokens_BT)[1]
        _, packed = documents.embed_packed(chain, None, tokens_BT, positions_of(lengths), plain, lengths)
        _, alone = chain.embed(None, tokens_BT, padded)
    for calls, expected in ((packed, lengths), (alone, [row[:1] for row in lengths])):
        tables = [t for t in calls[0].leaves if isinstance(t, torch.Tensor) and t.shape[:2] == (4, 32) and t.dtype is torch.float32]
        assert len(tables) == 2, "cosine and sine"
        for row, of_row in enumerate(expected):
            for n, end in zip(of_row, accumulate(of_row), strict=True):
                rotary = next(
                    m
                    for m in hf_model(config, dtype=torch.float32).modules()
                    if "original_inv_freq" in dict(m.named_buffers(recurse=False))
                )
                right = rotary(torch.zeros(1, n, 1), torch.arange(n)[None])
                assert all(torch.equal(t[row, end - n : end], r[0]) for t, r in zip(tables, right, strict=True)), (row, n)


@pytest.mark.parametrize("share", [1e-4, 0.0])
def test_a_ten_thousandth_of_another_document_is_found(share, monkeypatch):
    config, forward = config_of("llama", rms_norm_eps=1e-6 * (2 + share)), LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) + share * x.cumsum(1))
    assert (supports_documents(config, semantics_of("llama")) is None) == (share == 0.0)


def attended(inputs: Sequence[torch.Tensor], n_tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the result of attention by document for queries, keys, values (B, H, T, E) and a result gradient (B, T, H, E), and the
    gradients of the first three; all with tokens second."""
    query, key, value, d_out = (x.detach().requires_grad_() for x in inputs)
    out = kernels.FusedAttention.apply(query, key, value, list(n_tokens), None)
    return [out.detach(), *(x.transpose(1, 2) for x in torch.autograd.grad(out, (query, key, value), d_out))]


def random_heads(seq_len: int, dtype: torch.dtype, seed: int = 0, n_sequences: int = 1, width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = [torch.randn(n_sequences, seq_len, n, width, generator=generator).to(dtype) for n in (4, 2, 2, 4)]
    return [*(x.transpose(1, 2) for x in heads[:3]), heads[3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 100, 191, 193, 255])
def test_a_documents_bits_are_the_same_wherever_it_is_packed(n, dtype):
    """Padding affects no result, even if values of another document are not finite."""
    seq_len = 256
    first, second = random_heads(seq_len, dtype), random_heads(seq_len, dtype, seed=1)
    for x in second[:3]:
        x[:, :, n:] = float("nan")
    for x, y in zip(first[:3], second[:3], strict=True):
        y[:, :, seq_len - n :] = x[:, :, :n]
    second[3][:, seq_len - n :] = first[3][:, :n]
    alone = attended(first, [n, seq_len - n])
    packed = attended(second, [*[1] * (seq_len - n), n])
    for x, y in zip(alone, packed, strict=True):
        assert torch.equal(x[:, :n], y[:, seq_len - n :])


def test_length_classes_are_whole_blocks_of_queries_and_few():
    classes = {padded_tokens(n) for n in range(1, 4097)}
    assert sorted(classes)[:8] == [64, 128, 192, 256, 320, 384, 448, 512]
    assert len([n for n in classes if n <= 768]) == 12
    assert all(n <= padded_tokens(n) < n + 256 and padded_tokens(padded_tokens(n)) == padded_tokens(n) for n in range(1, 4097))


def test_torch_has_the_calls_of_a_document_on_cuda():
    """Check names, arguments and shapes on fake CUDA tensors."""
    with FakeTensorMode(), torch.no_grad():
        query, key, value = (torch.empty(1, n, 48, 16, dtype=torch.bfloat16, device="cuda") for n in (4, 2, 2))
        sums = torch.empty(1, 4, 48, device="cuda")
        outputs = kernels._attend([query, key, value], 0.25)
        gradients = kernels._attend_backward([query, query, key, value, query, sums], 0.25)
        of_window = kernels._attend([query, key, value], 0.25, torch.empty(4, device="cuda"), 8)
        towards = kernels._attend_backward([query, query, key, value, query, sums], 0.25, 8)
    for results in ((*outputs, *gradients), (*of_window, *towards)):
        assert [x.shape for x in results] == [x.shape for x in (query, sums, query, key, value)]
    assert {x.device.type for x in (*of_window, *towards)} == {"cuda"}


def plainly_attended(query, key, value, sinks, window: int) -> torch.Tensor:
    """Return attention with sinks (B, T, H, E) by a softmax over the scores and the sink."""
    n, hidden = query.shape[2], torch.ones(query.shape[2], query.shape[2]).tril().triu(1 - window) == 0
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (0.3 * query @ key.transpose(2, 3)).masked_fill(hidden, -torch.inf)
    probabilities = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(len(query), -1, n, 1)], -1).softmax(-1)
    return (probabilities[..., :-1] @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("n_tokens", [(), (80, 80), (1, 63, 9, 7, 80)], ids=str)
def test_attention_with_sinks_has_the_gradients_of_autograd(n_tokens, window):
    """In fp64, with a sink that takes almost everything, and one that takes almost nothing."""
    heads = [x.double() for x in random_heads(80, torch.float32, n_sequences=2)]
    inputs = [x.requires_grad_() for x in (*heads[:3], torch.tensor([-30.0, 0.0, 1.5, 30.0], dtype=torch.float64))]
    out = kernels.FusedAttention.apply(*inputs[:3], [*n_tokens], 0.3, inputs[3], window)
    rows, (query, key, value, sinks) = [], inputs
    for end, n in zip(accumulate(n_tokens or (80, 80)), n_tokens or (80, 80), strict=True):
        row, place = (end - n) // 80, slice((end - n) % 80, (end - n) % 80 + n)
        rows.append(plainly_attended(*(x[row : row + 1, :, place] for x in (query, key, value)), sinks, window or 80))
    expected = torch.cat(rows, 1).view(2, 80, 4, 16)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    gradients, wanted = (torch.autograd.grad(x, inputs, heads[3]) for x in (out, expected))
    torch.testing.assert_close(gradients, wanted, rtol=1e-11, atol=1e-12)


@mostly_slow("model_type", ["gpt_oss", "flint", "granite_swa"])
def test_a_model_with_sinks_computes_what_its_eager_attention_does(model_type):
    """Loss and gradients in fp32, over sequences longer than the window."""
    config, results = (tiny_config if model_type in MODEL_TYPES else tiny)(model_type), []
    for attention in ("sdpa", "eager"):
        model, tokens = resident(config, exact(model_type, attention=attention)), torch.arange(48).view(2, 24)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(0.5 * name.endswith(".sinks"))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        gradients = torch.autograd.grad(loss, [*(parameters := dict(model.named_parameters())).values()], materialize_grads=True)
        results.append({"loss": loss} | dict(zip(parameters, gradients, strict=True)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=2e-6)
    assert min(float(g.abs().max()) for name, g in results[0].items() if name.endswith(".sinks")) > 1e-5


def test_masks_and_calls_of_other_attention_are_refused():
    """A mask must be that of the window; dropout, a bias, later tokens, and other widths of values need eager attention."""
    module, (query, key, value, _) = torch.nn.Identity(), random_heads(24, torch.float32)
    causal, sinks = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril(), torch.zeros(4)
    same = kernels.with_sinks(module, query, key, value, causal.triu(-7), s_aux=sinks, sliding_window=8)[0]
    assert torch.allclose(same, plainly_attended(query * 0.25 / 0.3, key, value, sinks, 8), atol=1e-6)
    with pytest.raises(WorkloadError, match="its attention computes other masks"):
        kernels.with_sinks(module, query, key, value, causal.triu(-8), s_aux=sinks, sliding_window=8)
    fields = {"dropout": 0.1, "softcap": 30.0, "position_bias": causal, "is_causal": False, "s_aux": None, "sliding_window": None}
    for name, field in fields.items():
        with pytest.raises(WorkloadError, match="use eager attention"):
            kernels.with_sinks(module, query, key, value, causal, **({"s_aux": sinks, "sliding_window": 8} | {name: field}))
    with pytest.raises(WorkloadError, match="use eager attention"):
        kernels.with_sinks(module, query, key, value[..., :8], None, s_aux=sinks)
