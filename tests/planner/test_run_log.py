"""Logs are read as runs leave them: resumed, killed in the middle of a line, or damaged."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.show.run_log import read_log


def lines(*rows):
    return [json.dumps(row).encode() + b"\n" if isinstance(row, dict) else row for row in rows]


def test_later_lines_of_a_step_trained_twice_count():
    first = [{"step": n, "loss": float(n)} for n in range(1, 8)] + [{"step": 6, "eval_loss": 1.0}, {"step": 7, "eval_loss": 2.0}]
    again = [{"step": n, "loss": 100.0 + n} for n in (6, 7, 8)] + [{"step": 8, "eval_loss": 3.0}]
    log = read_log(lines(*first, *again))
    assert log.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert log.columns["loss"] == [1, 2, 3, 4, 5, 106, 107, 108]
    assert (log.evaluated, log.n_damaged) == ([(8, 3.0)], 0)


@pytest.mark.parametrize("damaged", [b"{", b"[" * 100_000, b'{"step": true, "loss": 2}'])
def test_a_damaged_line_is_left_out_and_counted(damaged):
    log = read_log(lines({"step": 1, "loss": 3.0}, damaged + b"\n", b"\n", {"step": 2, "loss": 2.0}))
    assert (log.steps, log.n_damaged) == ([1, 2], 1)


@pytest.mark.parametrize("loss", ["null", "NaN", '"3"'])
def test_a_loss_that_is_not_finite_is_a_gap(loss):
    log = read_log([b'{"step": 1, "loss": %s}\n' % loss.encode(), *lines({"step": 2, "loss": 1.0})])
    assert log.columns["loss"] == [None, 1.0]


KEYS = st.sampled_from(["step", "loss", "eval_loss", "lr", "step_s", "tokens", "tokens_per_s"])


@given(st.lists(st.dictionaries(KEYS, st.integers(-2, 9) | st.floats() | st.text(max_size=3) | st.none()), max_size=12))
def test_steps_rise_and_columns_are_as_long_whatever_a_log_holds(rows):
    log = read_log(lines(*rows))
    assert log.steps == sorted(set(log.steps))
    assert {len(column) for column in log.columns.values()} == {len(log.steps)}
    assert all(v is None or math.isfinite(v) for column in log.columns.values() for v in column)
    evaluated = [step for step, _ in log.evaluated]
    assert evaluated == sorted(set(evaluated))
