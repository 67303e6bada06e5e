"""Published runs on several GPUs: their page, and the cost model of systems that shard a model."""

import pytest

from benchmarks import several
from benchmarks.several import exchange_bytes_per_s, layer_rows, machine_of, published_cells, read_published, sharded_rows
from benchmarks.sharded import SYSTEMS, Sharded, predict
from penstock.planner.predict.scaled_profile import Group, faster
from tests.tour import ROOT

PAGE = ROOT / "docs" / "accuracy.md"
GEFORCE = machine_of("8xrtx4090")
AGAIN = "write it again with `python benchmarks/ledger.py`"


@pytest.fixture(scope="module")
def published():
    return read_published()


@pytest.fixture(scope="module")
def explained(published):
    return several.explained_rates(published)


def run_of(system="fsdp-offload", gpus=8, batch=8, micro_batch=4, model="qwen3-1.7b"):
    return Sharded(system, GEFORCE.name, model, gpus, batch, micro_batch, 2048)


def test_the_page_holds_every_run_and_every_layer_of_today(published, explained):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [*sharded_rows(published, explained), *layer_rows(published)]
    assert len(rows) == len(published.sharded) + len(published.layers) + 4
    names = [run.id for run in published.sharded]
    assert {*several.NOTES} <= {*names}
    assert len({*names}) == len(names)
    assert [row for row in rows if row not in lines] == [], AGAIN


def test_the_page_holds_every_pipelined_run_with_a_plan(published):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for run in published.pipelines:
        (row,) = [line for line in lines if line.startswith(published_cells(run))]
        planned = row.removeprefix(published_cells(run)).split("|")[0].strip()
        assert planned == "does not fit" or float(planned.replace(",", "")) > 0, AGAIN


@pytest.mark.parametrize("system", SYSTEMS)
def test_slower_exchange_slows_a_step_of_several_gpus_alone(system):
    steps_s = [predict(run_of(system), faster(GEFORCE, {Group.PEERS: f})).step_s for f in (4.0, 1.0, 0.25, 0.05, 0.005)]
    assert steps_s == sorted(steps_s)
    assert steps_s[-1] / steps_s[-2] == pytest.approx(10, rel=0.2), "at last it binds"
    alone = [predict(run_of(system, gpus=1), faster(GEFORCE, {Group.PEERS: f})).step_s for f in (1.0, 0.01)]
    assert alone[0] == pytest.approx(alone[1])


def test_weights_are_gathered_per_micro_batch_and_gradients_once():
    """With slow exchange the step is its time: two gathers per micro-batch, one of the root's weights, and the gradients."""
    slow = faster(GEFORCE, {Group.PEERS: 1e-4})
    rate = exchange_bytes_per_s(slow)
    layers, table = 28 * 50_337_024, 151_936 * 2048  # parameters: q and k norms included; tied table

    def moved_s(n_params):
        return 2 * n_params * 7 / 8 / rate

    once, twice, thrice = (predict(run_of("fsdp", batch=n, micro_batch=1), slow).step_s for n in (1, 2, 3))
    assert twice - once == pytest.approx(moved_s(2 * layers + table), rel=0.01)
    assert thrice - twice == pytest.approx(twice - once)
    assert once == pytest.approx(moved_s(3 * layers + 2 * table), rel=0.01)
    once, twice = (predict(run_of("zero3-offload", batch=n, micro_batch=1), slow).step_s for n in (1, 2))
    assert twice - once == pytest.approx(moved_s(3 * layers + 2 * table), rel=0.01)


def test_the_rate_that_explains_a_step_predicts_it(published, explained):
    for run in published.sharded:
        if run.id in explained:
            machine = machine_of(run.machine)
            slower = faster(machine, {Group.PEERS: explained[run.id] / exchange_bytes_per_s(machine)})
            assert predict(run.run, slower).step_s == pytest.approx(run.run.tokens_per_step / run.tokens_per_s, rel=1e-3)
    assert len(explained) == 7
