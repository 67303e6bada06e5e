"""Does the benchmark for a GPU measure what its page says, as far as a CPU can tell?"""

import json
import time

import pytest
import torch

from benchmarks.gpu import NOT_INSTALLED, TINY_CONFIG, Benchmark, Sizes
from benchmarks.other_systems import fill, has_deepspeed
from runtime.plan import PlanFile


def test_each_system_trains_the_plans_model_and_the_page_has_a_row_for_each(tmp_path, capsys):
    benchmark = Benchmark(tmp_path, "cpu", tiny=True, limit_s=600)
    benchmark.sizes = Sizes(benchmark.sizes.model, 32, (4,), 4)
    ours = benchmark.measured("penstock", 4, "search")
    theirs = benchmark.measured("fsdp2", 4, "search")
    other = benchmark.measured("zero3", 4, "search")
    assert len(ours["times_s"]) == len(theirs["times_s"]) == 2, (ours, theirs)
    assert has_deepspeed() or other == {"failed": NOT_INSTALLED}
    plan = PlanFile.read(benchmark.plan(4, "search")).plan
    assert (plan.semantics.batch_size, plan.semantics.micro_batch, plan.model.config) == (4, 2, TINY_CONFIG)
    benchmark.plan(4, "megatrain")
    capsys.readouterr()
    benchmark.page()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| batch 4")]
    assert [row.partition(" | ")[0] for row in rows] == [
        "| batch 4, search", "| batch 4, megatrain", "| batch 4, FSDP2, CPUOffloadPolicy", "| batch 4, DeepSpeed ZeRO-3 offload",
    ]  # fmt: skip
    assert "not measured" in rows[1]
    assert "x the searched plan's" in rows[2]
    again = time.monotonic()
    benchmark.ends_s = again - 1.0
    assert benchmark.measured("fsdp2", 4, "search") == theirs, "what was measured is not measured again"
    with pytest.raises(SystemExit, match="call again with the same --home"):
        benchmark.measured("penstock", 4, "megatrain")


def test_a_model_too_large_for_the_host_has_fewer_layers(tmp_path, monkeypatch):
    benchmark = Benchmark(tmp_path, "cpu", tiny=False, limit_s=600)
    monkeypatch.setattr("runtime.memory.available_host_bytes", lambda: 64 * 10**9)
    assert json.loads(benchmark.model().read_text())["num_hidden_layers"] == 5  # 2.4 G parameters at 20 bytes in 48 GB
    (tmp_path / "model.json").unlink()
    monkeypatch.setattr("runtime.memory.available_host_bytes", lambda: 10**12)
    assert json.loads(benchmark.model().read_text())["num_hidden_layers"] == 28


def test_weights_are_filled_with_random_numbers_and_norms_with_ones():
    pattern, weight, norm = torch.arange(1.0, 8.0), torch.zeros(3, 5), torch.zeros(4)
    fill(weight, pattern)
    fill(norm, pattern)
    assert weight.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 1]
    assert norm.tolist() == [1, 1, 1, 1]
