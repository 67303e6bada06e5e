"""Benchmark of checkpoints: their cost is that of the stretches of steps that had one."""

import time

import pytest

from benchmarks.checkpointing import LOOK_S, Seen, costs, page, plainly, stretches, watched

STEP_S = 1.0


def ends_of(n_steps, every, extra_s, late=0):
    """Ends of steps of one second; the one after a checkpoint, or `late` steps later, takes longer."""
    ends_s, at_s = [], 0.0
    for step in range(1, n_steps + 1):
        at_s += STEP_S + (extra_s if step > every + late and (step - 1 - late) % every == 0 else 0.0)
        ends_s.append(at_s)
    return ends_s


@pytest.mark.parametrize("late", [0, 3, 9])
def test_the_cost_of_a_checkpoint_is_found_wherever_it_falls(late):
    pairs = stretches(ends_of(100, 20, 0.3, late), 10)
    assert len(pairs) == 4
    assert costs(pairs) == pytest.approx((0.03, 0.03, 0.03))
    slow_at_first = [end_s + 5.0 for end_s in ends_of(60, 20, 0.5)]
    assert costs(stretches(slow_at_first, 10)) == pytest.approx((0.05, 0.05, 0.05))
    assert costs([(10.0, 10.0), (10.1, 10.0), (12.0, 10.0)]) == pytest.approx((0.01, 0.0, 0.2)), "median, least, most"
    assert (stretches(ends_of(39, 20, 0.3), 10), len(stretches(ends_of(40, 20, 0.3), 10))) == ([], 1)


def test_a_checkpoint_is_seen_from_its_first_file_to_its_name(tmp_path):
    seen = Seen()
    with watched(tmp_path, seen):
        (tmp_path / "checkpoint-2.partial").mkdir()
        (tmp_path / "run.yaml.partial").touch()
        while not seen.durations_s():
            time.sleep(LOOK_S)
        (tmp_path / "checkpoint-2.partial").rename(tmp_path / "checkpoint-2")
        time.sleep(2 * LOOK_S)
    assert list(seen.written_s) == ["checkpoint-2.partial"]
    began_s, ended_s = seen.written_s["checkpoint-2.partial"][0], seen.written_s["checkpoint-2.partial"][-1]
    assert seen.is_writing(began_s - 1, began_s + 1e-9)
    assert seen.is_writing(began_s - 1, ended_s + 1)
    assert not seen.is_writing(ended_s + 1, ended_s + 2)


def test_the_page_says_what_it_costs_and_what_the_disk_could_do(tmp_path):
    background, drained = Seen(ends_of(60, 20, 0.2)), Seen(ends_of(60, 20, 1.0))
    for seen in (background, drained):
        seen.written_s["checkpoint-20.partial"] = [20.0, 21.5]
    text = "\n".join(page({"background": [background, background], "drained": [drained]}, 3 * 10**9, (1.5e9, 3e9)))
    assert "| background | +2.0% | +2.0% to +2.0% | 4 | 1.50 | 2.00 |" in text
    assert "2.00 s (1.50 GB/s)" in text
    assert all(rate > 0 for rate in plainly(tmp_path, 1000))
    assert not list(tmp_path.iterdir())
