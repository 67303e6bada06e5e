"""Answers packed into shared sequences: same losses as with one sequence per answer, less padding."""

import torch

from penstock.data.data import DataRequest, read_data
from penstock.planner.model.workload import build_workload
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.plan.objective import parse_objective
from penstock.runtime.plan.workload import Model
from penstock.settings import DataSettings
from tests.bytes_of_files import write_lines
from tests.lanes import mostly_slow
from tests.tiny import tiny_config
from tests.training import semantics_of

SEQ_LEN, N = 48, 24
PAIRS = [{"prompt": f"tea {'x' * (n % 3)}? ", "chosen": "yes" * (1 + n % 4), "rejected": "no" * (1 + n % 5)} for n in range(N)]
PAIRS[5] |= {"rejected": "never" * 8}  # in a sequence without other answers
ANSWERS = [{"prompt": f"tea {'x' * (n % 5)}? ", "completion": "yes" * (1 + n % 4), "label": n % 3 > 0} for n in range(N)]
TEXTS = [{"text": "good " * (1 + n % 3) + "tea", "label": n % 2} for n in range(N)]
GROUPS = [
    {"prompt_ids": [*range(9, 12 + n)], "completion_ids": [[3] * (1 + n), [4, 5, 6]]}
    | {"logprobs": [[-5.5] * (1 + n), [-6, -5, -6]], "rewards": [n, 1]}
    for n in range(N // 2)
]
ROWS = {"kto:group=3": ANSWERS, "classify": TEXTS, **dict.fromkeys(("grpo", "dapo", "dr-grpo"), GROUPS)}


def read(tmp_path, loss, **how):
    """Return all rows in one batch; with `by_document` they share sequences."""
    objective = parse_objective(loss)
    path = write_lines(tmp_path / "a.jsonl", ROWS.get(loss, PAIRS))
    settings, cache = DataSettings(str(path), shuffle=False), tmp_path / "run" / "t"
    load = lambda n: read_data(DataRequest(settings, None, 272, SEQ_LEN, n, 0, cache, objective=objective, **how))  # noqa: E731
    return load(load(objective.rows_each).n_sequences * objective.rows_each)


def by_text(batch, value):
    """Group per-position values by the tokens of their document."""
    groups = {}
    for ids, row_values, lengths in zip(batch.input_ids, value, batch.document_tokens or [[SEQ_LEN]] * len(value), strict=True):
        for row, values in zip(ids.split([*lengths]), row_values.split([*lengths]), strict=True):
            document = tuple(token for token in row.tolist() if token != 256)  # without padding
            groups.setdefault(document, []).append(values[: len(document)].tolist())
    groups.pop((), None)
    return groups


@mostly_slow(
    "loss",
    ["dpo", "ipo", "orpo", "simpo", "kto:group=3", "grpo", "dapo", "dr-grpo", "reward:center=0.1", "classify"],
    fast=(0, 4, 5, 8, 9),
)
def test_sharing_sequences_changes_no_loss_and_no_gradient(tmp_path, loss):
    """Sums over one answer are bitwise identical; fewer sequences, none longer than the plan's."""
    objective = parse_objective(loss)
    both = [read(tmp_path, loss, by_document=flag).batch(0) for flag in (False, True)]
    assert len(both[1].input_ids) <= 0.75 * len(both[0].input_ids)
    losses = []
    for batch in both:
        n = len(batch.input_ids)
        sizes = {"micro_batch": n, "batch_size": n, "seq_len": SEQ_LEN}
        semantics = semantics_of("llama", compute_dtype="fp32", objective=objective, **sizes)
        config = tiny_config("llama", vocab_size=272)
        templates = Templates(config, build_workload(Model(config), semantics), semantics)
        torch.manual_seed(4)
        weights = {p.name: torch.randn(p.shape) * 0.2 for p in templates.workload.blocks[-1].parameters}
        table, positions = torch.randn(997, 32), torch.arange(SEQ_LEN)
        starts = torch.zeros(n, SEQ_LEN).long()  # hidden states depend on the token and its document, as with attention
        for row, lengths in enumerate(batch.document_tokens or [(SEQ_LEN,)] * n):
            starts[row] = torch.cat([torch.full((length,), sum(lengths[:i])) for i, length in enumerate(lengths)])
        hidden = table[(batch.input_ids * 31 + (positions - starts) * 7) % 997]
        slots = () if batch.n_answers is None else (batch.extras["answer"].shape[1],)
        extras = {**batch.extras, "reference": torch.full((n, *slots), -40.0, dtype=torch.float64)}
        n_losses, total = semantics.n_losses(batch.n_supervised, batch.n_answers), torch.zeros(weights[templates.head.weight].shape)
        value, towards, _ = templates.head.loss(weights, hidden, batch.targets, n_losses, total, extras)
        losses.append((n_losses, value, total, by_text(batch, towards)))
    (n_alone, value, total, towards), (n_shared, of_shared, total_shared, towards_shared) = losses
    assert n_alone == n_shared > 0
    torch.testing.assert_close(of_shared, value, rtol=1e-6, atol=0)
    torch.testing.assert_close(total_shared, total, rtol=1e-4, atol=1e-6)
    assert towards.keys() == towards_shared.keys()
    for key, values in towards.items():
        both_ways = [torch.tensor(sorted(gradients)) for gradients in (values, towards_shared[key])]
        torch.testing.assert_close(both_ways[1], both_ways[0], rtol=1e-5, atol=1e-7)


def test_a_pair_stays_in_two_sequences_that_follow_each_other(tmp_path):
    """Any micro-batch of whole units then has both halves."""
    batch = read(tmp_path, "dpo", by_document=True).batch(0)
    spans = batch.extras["answer"]
    sizes = (spans[..., 1] - spans[..., 0]).view(-1, 2, spans.shape[1])
    assert int((sizes > 0).sum()) == batch.n_answers == 2 * N
    assert torch.equal(sizes[:, 0] > 0, sizes[:, 1] > 0)
    assert 0 <= int(spans.min()) < int(spans.max()) <= 2 * SEQ_LEN
    assert all(sum(lengths) == SEQ_LEN for lengths in batch.document_tokens)
