"""Failures: all lanes stop, the error has a name, and the run resumes bitwise from its checkpoint."""

import json
import shutil
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from subprocess import PIPE

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.checkpoint.checkpoint import latest
from penstock.planner.model.workload import build_workload
from penstock.runtime.errors import DataError, PenstockError
from penstock.runtime.executor import OpError
from penstock.runtime.host.updates import NonFiniteError
from penstock.runtime.plan import Kind, Plan, Policy, Update, saves
from penstock.runtime.plan.workload import Model
from penstock.training.session import Session
from tests.accidents import ENDED_S, LeavesOut, Poisoned, Struck, can_be_poisoned, in_time, whole_checkpoints
from tests.forks import Forked
from tests.lanes import examples, mostly_slow
from tests.running import make_home, plan_in
from tests.sessions import lines, resumed, same_state, session_of, train
from tests.strategies import policies
from tests.tiny import tiny_config
from tests.tour import ROOT
from tests.training import Tensors, plan_of, semantics_of, state_of

pytestmark = pytest.mark.usefixtures("no_fsync")

N_STEPS = 4
ACCIDENTS = settings(
    max_examples=examples(16),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],  # an example takes a second; shrinking would need a thousand of them
)
ERRORS = (
    *(OSError(28, "No space left on device"), MemoryError(), KeyError("boom"), AssertionError("ours"), StopIteration()),
    *(KeyboardInterrupt(), SystemExit(3), GeneratorExit(), DataError("data: a user's mistake")),
)
Fields = tuple[tuple[str, object], ...]


def drawn_plan(data: st.DataObject, **fields) -> Plan:
    semantics = semantics_of("llama", **fields)
    policy = data.draw(policies(semantics, build_workload(Model(tiny_config("llama")), semantics)), label="policy")
    return plan_of(tiny_config("llama"), semantics, policy)


@lru_cache(maxsize=16)
def undisturbed(folder: Path, fields: Fields = (), left_out: int | None = None) -> tuple[Tensors, Tensors, Tensors]:
    """Return the state after N_STEPS, optionally without the updates of one step."""

    class Runs(LeavesOut):
        pass

    Runs.left_out = N_STEPS if left_out is None else left_out
    return state_of(train(session_of(folder / f"undisturbed-{left_out}-{hash(fields)}", Policy(), Runs, **dict(fields))).store)


def go_on(session: Session) -> int:
    """Resume from the last checkpoint or start anew; return the step it resumed from."""
    if latest(session.folder) is not None:
        return train(resumed(session)).first_step
    host = session.store.host
    session.store.initialise(7)
    for moment in (m for b in range(len(session.plan.workload.blocks)) for p in host.owned[b] for m in host.param_state(p).moments):
        moment.zero_()
    host.n_updates = 0
    return train(session).first_step


def awaited(plan: Plan) -> list[int]:
    return sorted({wait.op for op in plan.ops for wait in op.waits if wait.distance == 0})


@ACCIDENTS
@given(data=st.data())
def test_an_exception_anywhere_is_named_and_the_run_goes_on(tmp_path_factory, data):
    """Exceptions of any kind before, within or after any op of any plan, or at a handover between lanes. Then the run resumes
    from its checkpoint on the same machine, or on a new one with another plan."""
    plan, where = drawn_plan(data), data.draw(st.sampled_from(["before", "middle", "after", "mark", "follow"]), label="where")
    index = data.draw(st.sampled_from(awaited(plan) if where == "follow" else range(len(plan.ops))), label="op")
    step = data.draw(st.integers(0, N_STEPS - 1), label="step")

    class Breaks(Struck):
        pass

    Breaks.at, Breaks.where, Breaks.error = (step, index), where, data.draw(st.sampled_from(ERRORS), label="error")
    every, background = data.draw(st.integers(1, 2), label="every"), data.draw(st.booleans(), label="background")
    folder = tmp_path_factory.mktemp("struck")
    session = session_of(folder, plan.policy, Breaks, every=every, background=background)
    n_threads = threading.active_count()
    with pytest.raises((OpError, DataError)) as caught:
        in_time(lambda: train(session))
    assert threading.active_count() == n_threads, "a lane was left running"
    if isinstance(Breaks.error, PenstockError):
        assert caught.value is Breaks.error
    else:
        assert caught.value.__cause__ is Breaks.error
        assert f" failed: {type(Breaks.error).__name__}: " in str(caught.value)
        if where != "follow":  # the error then names the following lane
            assert str(caught.value).startswith(f"step {step + 1}, lane {plan.ops[index].lane}: {plan.ops[index].name} failed")
    stands = whole_checkpoints(folder)
    last = step // every * every
    # In the background lanes are not drained: one may fail in a step while another has not yet ended the step before.
    allowed = [last, (step - 1) // every * every if background and step else last]
    assert (stands[-1] if stands else 0) in allowed
    assert not list(folder.glob("*.partial"))
    if data.draw(st.booleans(), label="another plan"):
        session = session_of(folder, drawn_plan(data).policy)
    assert in_time(lambda: go_on(session)) == (stands[-1] if stands else 0)
    assert same_state(session, undisturbed(tmp_path_factory.getbasetemp()))
    assert [line["step"] for line in lines(folder)] == list(range(1, N_STEPS + 1))


COMPUTING = (Kind.FORWARD, Kind.LOSS, Kind.BACKWARD)


@mostly_slow(("kind", "step"), [*((kind, 3) for kind in COMPUTING), (Kind.UPDATE, 2), (Kind.SETTLE, 2)])
@mostly_slow("policy", [{"save": saves(all=(1, 2))}, {"save": saves(products=(1, 2))}], ids=["keeps", "saves"])
def test_a_machine_forgets_the_step_in_which_it_failed(tmp_path, kind, step, policy):
    """Drops autograd graphs if another step follows; drops the clip factor and update count if the same step is repeated."""
    policy = Policy(accumulation_group=4, update=Update.DEFERRED, speculate_blocks=(1,), **policy)
    of_kind = [i for i, op in enumerate(plan_of(tiny_config("llama"), semantics_of("llama"), policy).ops) if op.kind is kind]

    class Breaks(Struck):
        pass

    Breaks.at, Breaks.where, Breaks.error = (step, of_kind[len(of_kind) // 2]), "after", OSError("gone")
    session = session_of(tmp_path, policy, Breaks, every=2)
    with pytest.raises(OpError):
        in_time(lambda: train(session))
    assert in_time(lambda: go_on(session)) == 2
    assert same_state(session, undisturbed(tmp_path.parent))


def poisoned(data: st.DataObject, folder: Path, **fields) -> tuple[Session, int]:
    """Make a run of a sampled plan with an op that writes NaN in one step; return it and the step."""
    plan, step = drawn_plan(data, **fields), data.draw(st.integers(0, N_STEPS - 1), label="step")

    class Strikes(Poisoned):
        pass

    Strikes.at = (step, data.draw(st.sampled_from(can_be_poisoned(plan)), label="op"))
    return session_of(folder, plan.policy, Strikes, every=1, **fields), step


@ACCIDENTS
@given(data=st.data())
def test_nan_stops_the_run_with_the_name_of_a_parameter(tmp_path_factory, data):
    """NaN may start in a weight, boundary, gradient or sum. No update of that step is applied."""
    folder = tmp_path_factory.mktemp("stops")
    session, step = poisoned(data, folder)
    with pytest.raises(NonFiniteError) as caught:
        in_time(lambda: train(session))
    names = [p.name for b in range(len(session.plan.workload.blocks)) for p in session.store.host.owned[b]]
    assert str(caught.value).startswith(tuple(f"step {step + 1}: the gradient of {name} is not finite" for name in names))
    assert whole_checkpoints(folder) == list(range(1, step + 1))
    session = session_of(folder, drawn_plan(data).policy)
    assert in_time(lambda: go_on(session)) == step
    assert same_state(session, undisturbed(tmp_path_factory.getbasetemp()))


@ACCIDENTS
@given(data=st.data())
def test_nan_that_skips_a_step_touches_no_state(tmp_path_factory, data):
    folder, fields = tmp_path_factory.mktemp("skips"), {"on_nonfinite": "skip"}
    session, step = poisoned(data, folder, **fields)
    in_time(lambda: train(session))
    assert session.store.host.n_updates == N_STEPS - 1
    assert [line["skipped"] for line in lines(folder)] == [s == step for s in range(N_STEPS)]
    assert lines(folder)[step]["grad_norm"] is None
    assert same_state(session, undisturbed(tmp_path_factory.getbasetemp(), tuple(fields.items()), step))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = make_home(tmp_path_factory.mktemp("home"))
    policies = [
        {"accumulation_group": 1},
        {"accumulation_group": 4, "update": "deferred", "speculate_blocks": [0, 1, 3], "save": {"all": [1]}},
        {"accumulation_group": 4, "update": "deferred", "spill_blocks": [0, 1]},
    ]
    for i, policy in enumerate(policies):
        (home / "policy.json").write_text(json.dumps(policy))
        plan_in(home, "--micro-batch", 1, "--policy", home / "policy.json", name=f"plan-{i}.json")
    return home


def befallen(home: Path, folder: Path, accident: str, n_trials: int, seed: int, *prefix: str) -> str:
    """Run a failure of `accidents` in a separate process, in a copy of the home folder."""
    shutil.copytree(home, folder, dirs_exist_ok=True)
    command = [*prefix, sys.executable, "-m", "tests.accidents", accident, str(folder), str(seed), str(n_trials)]
    process = (subprocess.Popen if prefix else Forked)(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True)
    out, errors = process.communicate(timeout=ENDED_S)
    assert process.returncode == 0, out + errors
    print(out)
    return out


@mostly_slow(("n_trials", "seed"), [(1, 13), (3, 5)])
def test_a_run_killed_at_any_moment_goes_on_to_the_same_bits(home, tmp_path, n_trials, seed):
    """SIGKILL within ops and checkpoint files, or SIGTERM, as on preemptible machines; and again after the resume."""
    assert "killed" in befallen(home, tmp_path, "killed", n_trials, seed)


NAMESPACE = ("unshare", "-rm")  # systems on which any user can mount a disk of a few megabytes


def can_mount() -> bool:
    try:
        subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs a namespace in which to mount a small disk")
def test_a_disk_full_at_any_moment_is_one_line_and_resumable(home, tmp_path):
    assert "full" in befallen(home, tmp_path, "full_disk", 3, 5, *NAMESPACE)
