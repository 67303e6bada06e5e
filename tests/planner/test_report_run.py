"""Is a run's log read as it was left, however that was?"""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.show.report_run import MOST_POINTS, read_log, read_samples, thinned
from tests.report_cases import line


def test_of_steps_that_were_trained_twice_the_later_lines_count():
    lines = [line(step=n, loss=float(n)) for n in range(1, 8)] + [line(step=6, eval_loss=1.0), line(step=7, eval_loss=2.0)]
    lines += [line(step=n, loss=100.0 + n) for n in (6, 7, 8)] + [line(step=8, eval_loss=3.0)]
    log = read_log(lines)
    assert log.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert log.columns["loss"] == [1, 2, 3, 4, 5, 106, 107, 108]
    assert log.evaluated == [(8, 3.0)]
    assert log.n_damaged == 0


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"{", b"\xff\xfe\x00", b"[1]", b"null", b"[" * 100_000, b"9" * 5000),
        *(b'{"loss": 2}', b'{"step": 1}', b'{"step": "1", "loss": 2}', b'{"step": true, "loss": 2}', b'{"step": -1, "loss": 1}'),
        *(b'{"step": 1e3, "loss": 1}', b'{"step": 99999999999999999999, "loss": 1}'),
    ],
)
def test_a_line_that_is_none_is_left_out_and_counted(damaged):
    log = read_log([line(step=1, loss=3.0), damaged + b"\n", b"\n", line(step=2, loss=2.0)])
    assert log.steps == [1, 2]
    assert log.n_damaged == 1


@pytest.mark.parametrize("loss", ["null", "NaN", "Infinity", "-Infinity", "1e999", '"3"', "[]", "true", "9" * 400])
def test_a_loss_that_is_no_number_is_a_gap(loss):
    log = read_log([b'{"step": 1, "loss": %s}\n' % loss.encode(), line(step=2, loss=1.0)])
    assert log.columns["loss"] == [None, 1.0]
    assert log.n_not_finite == 1


values = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(values, st.integers(1, 300))
def test_a_thinned_curve_keeps_its_ends_its_extremes_and_its_gaps(pattern, repeats):
    column = pattern * repeats
    steps, kept = thinned(range(len(column)), column)
    assert len(steps) <= MOST_POINTS + 2
    assert steps == sorted(set(steps))
    assert all(column[step] == value for step, value in zip(steps, kept, strict=True))
    assert {steps[0], steps[-1]} == {0, len(column) - 1}
    finite = [v for v in column if v is not None]
    if finite:
        assert {min(finite), max(finite)} <= set(kept)
    assert (None in kept) == (None in column)


def test_samples_are_those_of_the_last_step_and_no_longer_than_can_be_read():
    lines = [line(step=1, prompt="a", text="old"), b"{", line(step=9, name="b", text="x" * 10_000), line(step=9, text=3)]
    assert [(s.step, s.prompt, len(s.text)) for s in read_samples(lines)] == [(9, "b", 2004)]
    assert len(read_samples([line(step=1, text=str(n)) for n in range(100)])) == 8


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["step", "loss", "eval_loss", "lr", "step_s", "tokens", "tokens_per_s"]),
            st.integers(-2, 9) | st.floats() | st.text(max_size=3) | st.none(),
        ),
        max_size=12,
    )
)
def test_whatever_a_log_holds_its_steps_rise_and_its_columns_are_as_long(lines):
    log = read_log([json.dumps(fields).encode() for fields in lines])
    assert log.steps == sorted(set(log.steps))
    assert {len(column) for column in log.columns.values()} == {len(log.steps)}
    for column in log.columns.values():
        assert all(v is None or math.isfinite(v) for v in column)
    evaluated = [step for step, _ in log.evaluated]
    assert evaluated == sorted(set(evaluated))
