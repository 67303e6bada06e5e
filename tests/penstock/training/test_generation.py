"""Generation by the streamed model, compared with transformers."""

from dataclasses import replace

import pytest
import torch

from penstock.runtime.errors import DataError, PenstockError
from penstock.runtime.plan import Policy
from penstock.training.inputs import check_prompts
from penstock.training.validation import generate
from tests.forwards import POLICIES, HostileToBoth, LateForBoth, exact, machine_of, resident
from tests.lanes import mostly_slow
from tests.late_streams import LateStreams
from tests.tiny import STRUCTURES, WITH_SINKS, tiny_config
from tests.training import semantics_of

# Lengths on both sides of a shape bucket, one of them within padding
PROMPTS = [[5, 17, 3], [1], list(range(20, 82)), [7, 7, 9, 40, 2, 11]]


def said_by_transformers(model, prompt: list[int], n: int, end_ids=()) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"eos_token_id": list(end_ids) or None, "pad_token_id": 0, "do_sample": False, "max_new_tokens": n}
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@mostly_slow("model_type", STRUCTURES)
def test_the_likeliest_tokens_are_those_of_transformers(model_type):
    """Windows shorter than the prompts, experts, three sequences per micro-batch: the last has only padding next to it.

    Large weights make every position matter; the output matrix does not repeat its input.
    """
    config = tiny_config(
        model_type, attention_dropout=0.5 * (model_type not in WITH_SINKS), initializer_range=0.3, tie_word_embeddings=False
    )
    semantics = exact(model_type, seq_len=96, batch_size=3, micro_batch=3)
    machine = machine_of(config, semantics, Policy(), delay_seed=1)
    model = resident(config, replace(semantics, attention="eager") if model_type in WITH_SINKS else semantics)  # it has a cache
    expected = [said_by_transformers(model, prompt, 6) for prompt in PROMPTS]
    assert len({i for new in expected for i in new}) > 8, "nothing could go wrong"
    assert generate(machine, PROMPTS, 6) == expected
    ends = {expected[0][2], expected[2][0]}
    shorter = generate(machine, PROMPTS, 6, end_ids=ends)
    assert shorter == [said_by_transformers(model, prompt, 6, ends) for prompt in PROMPTS]
    assert len(shorter[2]) == 1


@mostly_slow("policy", POLICIES.values(), ids=POLICIES)
def test_every_plan_and_lateness_writes_the_same(policy):
    config, semantics = tiny_config("qwen3", num_hidden_layers=3), semantics_of("qwen3", seq_len=80, batch_size=4)
    wanted = generate(machine_of(config, semantics, Policy(), HostileToBoth), PROMPTS, 4)
    assert generate(machine_of(config, semantics, policy, HostileToBoth, delay_seed=5), PROMPTS, 4) == wanted
    late = machine_of(config, semantics, policy, LateForBoth, streams=LateStreams(1, 0.5))
    assert generate(late, PROMPTS, 4) == wanted


def test_a_sequence_ends_where_the_plans_sequences_end():
    config, semantics = tiny_config("llama"), semantics_of("llama", seq_len=16)
    machine = machine_of(config, semantics, Policy())
    assert [len(new) for new in generate(machine, [[1] * 12, [1] * 15, [1]], 6)] == [4, 1, 6]
    assert generate(machine, [], 6) == []
    assert generate(machine, [[1]], 0) == [[]]


def test_prompts_and_weights_that_cannot_be_used_are_refused():
    machine = machine_of(tiny_config("llama"), semantics_of("llama"), Policy())
    long = "prompt 1 has 1,600 tokens, and a sequence .* holds 16; "
    for prompts, message in (([[1], []], "prompt 2 is empty; "), ([[1] * 1600], long)):
        with pytest.raises(DataError, match=f"^{message}"):
            check_prompts(prompts, 16)
    for p in machine.host.owned[1]:
        machine.host.set_weight(p, torch.full(p.shape, torch.nan))
    with pytest.raises(PenstockError, match=r"^the model's logits are not finite: its weights are spoilt"):
        generate(machine, [[1]], 1)
