"""Is every lie that a file of ours can tell caught, told, or known to be beyond anyone's knowledge?"""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from planner.check.claimed import Certified, Predicted, claimed
from planner.check.recount import check_claim
from planner.predict.arithmetic import arithmetic
from planner.search.search import Certificate
from runtime.errors import PlanError
from runtime.plan import PlanFile
from tests.lies import ASKED, FOUND, FOUND_OF, LOOK, Lie, answer, invoke, lies, prepare

LIES = {f"{lie.what} ({lie.file}, {lie.command[0]}{' --quick' if lie.command == LOOK else ''})": lie for lie in lies()}
ASKS: dict[str, list[str]] = {
    "searched": [],
    "a baseline": ["--policy", "slideformer"],
    "a baseline with recomputed boundaries": ["--policy", "megatrain"],
    "clipped steps": ["--clipped-steps", "0.3"],
    "no clipped steps": ["--clipped-steps", "0"],
    "memory": ["--device-memory", "64GB", "--host-memory", "2TB"],
    "skipping": ["--on-nonfinite", "skip"],
    "no clipping": ["--clip-norm", "none"],
    "a bf16 master": ["--master", "bf16"],
    "fp32": ["--compute", "fp32", "--gradient-dtype", "fp32"],
    "eager kernels": ["--kernels", "eager", "--loss-tile-tokens", "7"],
    "tiles": ["--mlp-tile-tokens", "9"],
    "another machine": ["--machine", "gh200", "--deterministic"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("honest")
    prepare(folder)
    return folder


@pytest.mark.fast("some")
@pytest.mark.parametrize("what", LIES)
def test_a_lie_is_noticed_unless_nobody_can_know(home, tmp_path, what):
    found = answer(home, tmp_path / "lying", LIES[what])
    assert found.is_noticed is not bool(LIES[what].why), found


def test_each_lie_has_a_name_of_its_own_and_those_that_are_believed_a_reason():
    assert len(LIES) == len(lies())
    assert all(lie.said or lie.mended or lie.why for lie in lies())


@pytest.mark.parametrize("file", [ASKED, FOUND])
def test_an_honest_plan_is_believed(home, file):
    for words in (["check"], ["check", "--quick"]):
        done = invoke(*words, home / file)
        assert (done.exit_code, done.stdout.count("\n"), done.stderr) == (0, 1, "")
        assert "claim recomputed" in done.stdout


@pytest.mark.fast("some")
@pytest.mark.parametrize("asked", ASKS)
def test_whatever_plan_is_asked_for_its_claim_holds(home, tmp_path, asked):
    path = tmp_path / "plan.json"
    words = ["plan", home / FOUND_OF[0], *FOUND_OF[1:], *ASKS[asked], "-o", path]
    assert invoke(*words).exit_code == 0
    done = invoke("check", path)
    assert done.exit_code == 0, done.stderr
    assert re.search(
        r"claim recomputed(, search and all|; not checked: that 30\.0% of steps are clipped, as was said)\n", done.stdout
    )


def test_what_is_claimed_is_all_that_is_checked():
    assert [f.name for f in fields(Certified)] == [f.name for f in fields(Certificate)]


def _with(home: Path, **changed: Any) -> PlanFile:
    """The honest plan, its claim changed: `step_s=...` by its name."""
    file = PlanFile.read(home / ASKED)
    claim = json.loads(json.dumps(file.claim))
    names = {f.name for f in fields(Predicted)}
    for name, value in changed.items():
        claim["prediction" if name in names else "certificate"][name] = value
    return PlanFile(file.plan, claim)


def test_rounding_is_no_lie_and_more_is(home):
    honest = PlanFile.read(home / ASKED).claim["certificate"]["machine_bound_s"]
    for off, is_lie in ((1e-12, False), (1e-10, False), (1e-7, True)):
        file = _with(home, machine_bound_s=honest * (1 - off))
        claim = claimed(file.claim, "plan.json")
        if is_lie:
            with pytest.raises(PlanError, match="machine_bound_s"):
                check_claim(file.plan, claim)
        else:
            assert check_claim(file.plan, claim) == []


def test_a_claim_of_an_older_version_is_held_as_far_as_it_goes(home, tmp_path):
    """It does not say by what it was worked out: what holds holds, and what does not is told."""
    text = json.loads((home / FOUND).read_text())
    for name in ("clipped_fraction", "n_draws", "seed", "arithmetic"):
        del text["claim"]["certificate"][name]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(text))
    assert "search and all" in invoke("check", path).stdout
    text["claim"]["certificate"]["binding"] = "something else"
    path.write_text(json.dumps(text))
    done = invoke("check", "--quick", path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "certificate.binding" in done.stdout
    assert "claimed by another version" in done.stdout
    text["workload"]["blocks"][1]["n_kernels"] += 1
    path.write_text(json.dumps(text))
    assert "n_kernels is" in invoke("check", "--quick", path).stdout
    text["workload"]["blocks"][1]["kept_bytes"] -= 256
    path.write_text(json.dumps(text))
    assert invoke("check", "--quick", path).exit_code == 1


def test_a_fingerprint_of_code_is_short_and_the_same_twice():
    assert re.fullmatch("[0-9a-f]{16}", arithmetic())
    arithmetic.cache_clear()
    assert arithmetic() == arithmetic()


def test_a_lie_that_nobody_notices_would_be_seen(home, tmp_path, monkeypatch):
    """Were the claim not worked out again, this test of lies would say so."""
    monkeypatch.setattr("planner.check.recount.check_claim", lambda plan, claim: [])
    lie = next(lie for lie in lies() if "consistently" in lie.what)
    assert isinstance(lie, Lie)
    assert not answer(home, tmp_path / "lying", lie).is_noticed
