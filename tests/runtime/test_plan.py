"""Does the plan language say the same thing in text, in JSON and in memory?"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import PenstockError, PlanError
from runtime.plan import (
    CONTRACT,
    LANE_OF,
    Arena,
    Kind,
    Lane,
    Op,
    Place,
    Plan,
    PlanFile,
    Policy,
    Semantics,
    Slot,
    Update,
    Wait,
    saves,
)
from runtime.plan.timeline import Span, Timeline, chrome_trace
from runtime.plan.workload import ALIGN_ELEMENTS, Attention, Block, BlockKind, Matmul, Model, Parameter, Saved, Workload
from runtime.units import GB, TB, GiB, MiB, parse_bytes, show_bytes, show_rate, show_seconds

LOAD = "load h2d b1 state=state[1] weights=weights[0]"
LINES = (
    f"{LOAD} ^ 7@1",
    "forward gpu b0 m0 weights=weights[2] y=activations[0] ^ 0",
    "forward gpu b1 m0 weights=weights[0] x=activations[0] y=activations[1]",
    "loss gpu b2 m0 weights=weights[2] x=activations[1] sum=gradients[1]",
    "backward gpu b1 m0 weights=weights[0] y=activations[1] x=activations[0] gradient=gradients[0]",
    "offload_gradient d2h b1 gradient=gradients[0] arrived=host_gradients[1] ^ 4",
    "norm cpu b1 arrived=host_gradients[1] norm=norm[0] ^ 5",
    "update cpu b1 arrived=host_gradients[1] norm=norm[0] state=state[1]",
)


def small_plan() -> Plan:
    """One layer between embedding and head; not a schedule anyone would run, but every field is used."""
    layer = Block(
        "model.layers.0",
        BlockKind.LAYER,
        (Parameter("w", (8, 16)), Parameter("norm", (8,))),
        (Matmul(4, 8, 16, 2),),
        Attention(1, 2, 4, 8, 4),
        100,
        7,
        64,
        512,
        1024,
    )
    embedding = Block("model.embed_tokens", BlockKind.EMBEDDING, (Parameter("embed", (96, 8)),), boundary_bytes=64)
    head = Block("lm_head", BlockKind.HEAD, (Parameter("lm_head", (96, 8), tied_to="embed"),))
    sizes: dict[Place, dict[str, tuple[int, ...]]] = {
        Place.DEVICE: {"weights": (512, 512, 1536), "activations": (64, 64), "gradients": (512, 3072)},
        Place.HOST: {"state": (1, 2, 3), "host_gradients": (1, 2, 3), "norm": (1, 2, 3)},
    }
    return Plan(
        Semantics(8, 4, 2, clip_norm=None, mlp_tile_tokens=16, gradient_dtype="fp32"),
        Policy(2, 1, 1, 2, saves(all=(1,)), update=Update.DEFERRED),
        Model({"model_type": "llama", "hidden_size": 8, "rope": {"theta": 1e4}, "note": "ø"}, "models/small", "small"),
        Workload((embedding, layer, head)),
        tuple(Arena(name, place, slots) for place, arenas in sizes.items() for name, slots in arenas.items()),
        {"name": "h", "device": {"memory_bytes": {"value": 1e9, "spread_fraction": 0.0, "source": "a"}}},
        tuple(map(Op.parse, LINES)),
    )


PLAN = small_plan()

naturals = st.integers(0, 999_999_999)
slots = st.builds(Slot, st.from_regex(r"[a-z_]{1,40}", fullmatch=True), naturals)
waits = st.builds(Wait, naturals, st.integers(0, 1))


def operands_of(kind: Kind, places: st.SearchStrategy[Slot]) -> st.SearchStrategy[tuple[tuple[str, Slot], ...]]:
    """Operands that the contract allows an op of the kind."""
    contract = CONTRACT[kind]
    of_name = [
        st.lists(
            places.map(lambda slot, name=name: (name, slot)),  # type: ignore[misc]
            min_size=int(name in contract.required),
            max_size=3 if name in contract.repeated else 1,
        )
        for name in contract.names
    ]
    return st.tuples(*of_name).map(lambda lists: tuple(operand for found in lists for operand in found))


@st.composite
def ops(draw: st.DrawFn) -> Op:
    kind = draw(st.sampled_from(Kind))
    micro_batch, some_waits = draw(st.none() | naturals), tuple(draw(st.lists(waits, max_size=4)))
    return Op(kind, draw(naturals), micro_batch, draw(operands_of(kind, slots)), some_waits)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Small plans that refer only to what exists; semantics, policy and ops vary."""
    n_layers = draw(st.integers(1, 3))
    layers = tuple(Block(f"layer{i}", BlockKind.LAYER, (Parameter(f"w{i}", (i + 1, 3)),)) for i in range(n_layers))
    blocks = (Block("first", BlockKind.EMBEDDING, ()), *layers, Block("last", BlockKind.HEAD, ()))
    arena_sizes = st.lists(st.integers(0, 2**40), min_size=1, max_size=5).map(tuple)
    names = draw(st.lists(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), min_size=1, max_size=4, unique=True))
    arenas = tuple(Arena(name, draw(st.sampled_from(Place)), draw(arena_sizes)) for name in names)
    places = st.sampled_from([Slot(a.name, i) for a in arenas for i in range(len(a.slot_bytes))])
    micro_batch, n_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from(Kind), max_size=12))
    steps: list[Op] = []
    for kind in kinds:
        others = [i for i, other in enumerate(kinds) if LANE_OF[other] is not LANE_OF[kind]]
        some_waits = st.lists(st.builds(Wait, st.sampled_from(others), st.integers(0, 1)), max_size=3)
        steps.append(
            Op(
                kind,
                draw(st.integers(0, n_layers + 1)),
                draw(st.none() | st.integers(0, n_micro_batches - 1)),
                draw(operands_of(kind, places)),
                tuple(draw(some_waits)) if others else (),
            )
        )
    semantics = Semantics(
        draw(st.integers(1, 10**6)),
        micro_batch * n_micro_batches - (draw(st.integers(0, micro_batch - 1)) if n_micro_batches > 1 else 0),
        micro_batch,
        draw(st.sampled_from(("bf16", "fp32"))),
        clip_norm=draw(st.none() | st.floats(1e-300, 1e300)),
    )
    n_products = draw(st.integers(0, n_layers))
    policy = Policy(
        draw(st.integers(1, 9)),
        update=draw(st.sampled_from(Update)),
        save=saves(products=range(1, n_products + 1), all=range(n_products + 1, n_layers), attention=(n_layers + 1,)),
        boundary_stride=draw(st.integers(1, 9)),
        speculate_blocks=tuple(range(draw(st.integers(0, n_layers)))),
    )
    model = Model({"text": draw(st.text(max_size=9)), "n": draw(st.floats(allow_nan=False, allow_infinity=False))})
    workload = Workload(blocks, blocks if semantics.n_left else ())
    return Plan(semantics, policy, model, workload, arenas, {"name": draw(st.text(max_size=5))}, tuple(steps))


# The text


@given(ops())
def test_an_op_is_read_back_from_its_line(op: Op) -> None:
    assert Op.parse(str(op)) == op
    assert "\n" not in str(op)


@pytest.mark.drawn
@given(plans())
def test_a_plan_is_read_back_from_its_text(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@pytest.mark.drawn
@given(plan=plans())
def test_a_plan_is_read_back_from_its_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    PlanFile(plan, {"step_s": 2.5}).write(path)
    assert PlanFile.read(path) == PlanFile(plan, {"step_s": 2.5})


@pytest.mark.drawn
@given(plan=plans())
def test_text_and_json_hold_the_same_ops(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    PlanFile(plan, None).write(path)
    in_text = [line.partition(": ")[2] for line in str(plan).splitlines() if line.partition(":")[0].isdigit()]
    assert json.loads(path.read_text())["ops"] == in_text


def test_the_line_of_an_op_is_the_one_in_the_documentation() -> None:
    line = "forward gpu b2 m0 weights=weights[1] x=activations[4] y=activations[8] ^ 3 17@1"
    assert line in (Op.__doc__ or "")
    op = Op.parse(line)
    assert str(op) == line
    assert (op.kind, op.lane, op.block, op.micro_batch) == (Kind.FORWARD, Lane.GPU, 2, 0)
    assert op.name == "forward gpu b2 m0"
    assert op.reads == (Slot("weights", 1), Slot("activations", 4))
    assert op.writes == (Slot("activations", 8),)
    assert op.waits == (Wait(3), Wait(17, 1))
    assert op["x"] == op.get("x") == Slot("activations", 4)
    assert op.get("sum") is None
    with pytest.raises(PlanError, match=r"^forward gpu b2 m0: has no `sum`; .*penstock plan") as caught:
        op["sum"]
    _assert_one_line(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "load",
        "load h2d",
        "load h2d 3",
        LOAD.replace("b1", "b-1"),
        LOAD.replace("b1", "b1 m"),
        LOAD.replace("b1", "b1 c1"),
        LOAD.replace("b1", "m0 b1"),
        LOAD.replace("b1", "b1 m0 m0"),
        LOAD.replace("h2d", "gpu"),
        LOAD.replace("h2d", "sky"),
        LOAD.replace("load h2d", "fly gpu"),
        "recompute h2d b1 m0 weights=weights[0] x=activations[0] y=activations[1]",
        "speculate gpu b1 arrived=host_gradients[1] state=state[1] shadow=state[3]",
        "settle d2h b1 arrived=host_gradients[1] norm=norm[0] state=state[1] shadow=state[3]",
        "load h2d b1 < state[1] > weights[0]",  # of an older Penstock
        "load h2d b1 state=state[1] weights=",
        "load h2d b1 state=state[1] weights",
        "load h2d b1 state=state[1] weights[0]",
        "load h2d b1 state=state[1] =weights[0]",
        "load h2d b1 state=state[1] weights=weights",
        "load h2d b1 state=state[1] weights=weights[]",
        "load h2d b1 state=state[1] weights=weights[x]",
        "load h2d b1 state=state[1] weights=weights[-1]",
        "load h2d b1 state=state[1] weights=Weights[1]",
        "load h2d b1 state=state[1] weights=weights[1]=weights[1]",
        "load h2d b1 state=state[1] weights=weights[99999999999]",
        "load h2d b1 state=state[1] Weights=weights[1]",
        "load h2d b1 state=state[1],weights=weights[1]",
        "load h2d b1 state = state[1] weights = weights[1]",
        f"{LOAD} ^ 3@2",
        f"{LOAD} ^ 3@0",
        f"{LOAD} ^ 3~2",
        f"{LOAD} ^ 3@1~1",
        f"{LOAD} ^ -3",
        f"{LOAD} ^ x",
        f"{LOAD} ^ ",
        f"{LOAD} ^",
        f"{LOAD}\n",
        LOAD.replace(" weights", "\tweights"),
        LOAD.replace(" weights", "\u2003weights"),
        f"{LOAD} ",
        f" {LOAD}",
        LOAD.replace(" ", "  ", 1),
        LOAD.replace(" state", "  state"),
        LOAD.replace("b1", "b99999999999999999999"),
        LOAD.replace("b1", "b\u0661"),
        LOAD.replace("b1", "b1" + " m0" * 5000),
        LOAD + " weights=weights[0]" * 5000,
        f"{LOAD} {'a' * 5000}=weights[0]",
    ],
)
def test_a_line_that_is_no_op_is_refused_in_one_line(line: str) -> None:
    with pytest.raises(PlanError) as caught:
        Op.parse(line)
    _assert_one_line(caught.value)


def test_the_line_of_which_the_others_are_edits_is_an_op() -> None:
    assert str(Op.parse(LOAD)) == LOAD


# What each kind reads and changes at once, and what its ops may lack or have several of
CHANGED = {
    Kind.LOSS: {"x", "sum", "into"},
    Kind.BACKWARD: {"x", "sum", "into"},
    Kind.ACCUMULATE: {"arrived", "into"},
    Kind.NORM: {"norm"},
    Kind.UPDATE: {"state"},
    Kind.UPDATE_ON_DEVICE: {"state"},
    Kind.SETTLE: {"state", "shadow"},
    Kind.GATHER: {"weights"},
    Kind.SHARE_NORM: {"norm"},
}
REPEATED = {Kind.LOSS: {"into"}, Kind.BACKWARD: {"into"}, Kind.ACCUMULATE: {"into"}, Kind.NORM: {"squares"}}
OPTIONAL = {
    Kind.LOAD: {"tied"},
    Kind.GATHER: {"tied"},
    Kind.FORWARD: {"trained", "x", "y", "saved"},
    Kind.RECOMPUTE: {"trained"},
    Kind.LOSS: {"trained", "sum", "into", "gradient"},
    Kind.BACKWARD: {"weights", "trained", "x", "saved", "sum", "into", "gradient"},
    Kind.ACCUMULATE: {"into"},
    Kind.OFFLOAD_GRADIENT: {"squares", "norm"},
    Kind.NORM: {"arrived", "tied", "squares"},
    Kind.SPECULATE: {"tied"},
    Kind.UPDATE: {"tied", "norm"},
    Kind.SETTLE: {"tied"},
}


def line_of(kind: Kind, names: Sequence[str]) -> str:
    """An op with these operands, each in an arena of its own name."""
    return " ".join([f"{kind} {LANE_OF[kind]} b1", *(f"{name}={name}s[{i}]" for i, name in enumerate(names))])


def legal_operands(kind: Kind) -> Iterator[tuple[str, ...]]:
    """All the names that an op of the kind can have, with repeated ones up to twice."""
    contract = CONTRACT[kind]
    counts = [range(name in contract.required, 2 + (name in contract.repeated)) for name in contract.names]
    for chosen in product(*counts):
        yield tuple(name for name, n in zip(contract.names, chosen, strict=True) for _ in range(n))


def test_the_contract_says_of_every_kind_where_it_runs_and_what_it_reads_and_writes() -> None:
    assert {*CONTRACT} == {*Kind} == {*LANE_OF}
    for kind, contract in CONTRACT.items():
        assert LANE_OF[kind] is contract.lane
        assert {*contract.names} == contract.reads | contract.writes
        assert len({*contract.names}) == len(contract.names)
        assert contract.reads & contract.writes == CHANGED.get(kind, set()), kind
        assert {*contract.names} - contract.required == OPTIONAL.get(kind, set()), kind
        assert contract.repeated == REPEATED.get(kind, set())
        assert contract.reads
        assert contract.writes


@pytest.mark.parametrize("kind", Kind)
def test_the_operands_of_every_kind_are_parsed_and_printed(kind: Kind) -> None:
    contract = CONTRACT[kind]
    for names in legal_operands(kind):
        line = line_of(kind, names)
        op = Op.parse(line)
        assert str(op) == line
        assert op.operands == tuple((name, Slot(f"{name}s", i)) for i, name in enumerate(names))
        assert op.reads == tuple(slot for name, slot in op.operands if name in contract.reads)
        assert op.writes == tuple(slot for name, slot in op.operands if name in contract.writes)
        assert {*op.reads} | {*op.writes} == {slot for _, slot in op.operands}
        for name in contract.names:
            every = op.every(name)
            assert len(every) == names.count(name)
            assert op.get(name) == (every[0] if every else None)
            if every:
                assert op[name] == every[0]


@pytest.mark.parametrize("kind", Kind)
def test_operands_that_the_contract_does_not_have_are_refused_with_those_it_has(kind: Kind) -> None:
    """Unknown, missing, out of order, repeated."""
    contract, others = CONTRACT[kind], {name for of in CONTRACT.values() for name in of.names} | {"surprise"}
    whole = contract.names
    wrong = [(*whole[:at], name, *whole[at:]) for name in others - {*whole} for at in range(len(whole) + 1)]
    wrong += [tuple(n for n in whole if n != name) for name in contract.required]
    wrong += [tuple(order) for order in permutations(whole) if order != whole]
    wrong += [(*whole[: at + 1], *whole[at:]) for at, name in enumerate(whole) if name not in contract.repeated]
    Op.parse(line_of(kind, whole))
    for names in wrong:
        with pytest.raises(PlanError) as caught:
            Op.parse(line_of(kind, names))
        _assert_one_line(caught.value)
        assert f"operands of {kind} are {', '.join(whole)}, in this order" in str(caught.value)


@given(st.text(max_size=200))
def test_no_text_can_make_reading_an_op_fail_in_another_way(text: str) -> None:
    try:
        op = Op.parse(text)
    except PlanError as error:
        _assert_one_line(error)
    else:
        assert Op.parse(str(op)) == op


@given(st.integers(0, 2000), st.text(max_size=3))
def test_no_edit_of_a_plan_text_can_make_reading_fail_in_another_way(at: int, insertion: str) -> None:
    text = str(PLAN)
    edited = text[: at % len(text)] + insertion + text[(at + 1) % len(text) :]
    try:
        plan = Plan.parse(edited)
    except PlanError as error:
        _assert_one_line(error)
    else:
        assert Plan.parse(str(plan)) == plan


# The file


def _fields(tmp_path: Path) -> dict[str, Any]:
    PlanFile(PLAN, {"prediction": {}}).write(tmp_path / "whole.json")
    fields: dict[str, Any] = json.loads((tmp_path / "whole.json").read_text())
    return fields


def _refused(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        PlanFile.read(path)
    _assert_one_line(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def _assert_one_line(error: PenstockError) -> None:
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 500
    assert error.exit_code == 2


def test_writing_leaves_nothing_half_written(tmp_path: Path) -> None:
    PlanFile(PLAN, None).write(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nowhere"):
        PlanFile(PLAN, None).write(tmp_path / "nowhere" / "plan.json")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "penstock plan" in _refused(tmp_path / "none.json")


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    _refused(tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    PlanFile(PLAN, None).write(tmp_path / "whole.json")
    whole = (tmp_path / "whole.json").read_bytes()
    cut = tmp_path / "cut.json"
    for end in range(0, len(whole) - 2, 17):
        cut.write_bytes(whole[:end])
        _refused(cut)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\x00" * 100, b"null", b"[]", b"3", b'"plan"', b"{}", b"\x1f\x8b"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    _refused(tmp_path / "other")


KEYS = [
    "semantics",
    "policy",
    "model",
    "workload",
    "profile",
    "arenas",
    "ops",
    "format_version",
    "fingerprint",
    "claim",
]


def test_a_plan_file_holds_these_keys(tmp_path: Path) -> None:
    assert sorted(_fields(tmp_path)) == sorted(KEYS)


@pytest.mark.parametrize("key", [key for key in KEYS if key != "format_version"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    fields = _fields(tmp_path)
    del fields[key]
    (tmp_path / "cut.json").write_text(json.dumps(fields))
    assert key in _refused(tmp_path / "cut.json")


@pytest.mark.parametrize("place", ["", "semantics", "policy", "model", "workload", "arenas.0", "workload.blocks.1"])
def test_an_unknown_key_is_refused_by_name(tmp_path: Path, place: str) -> None:
    fields = _fields(tmp_path)
    at: Any = fields
    for step in filter(None, place.split(".")):
        at = at[int(step)] if step.isdigit() else at[step]
    at["surprise"] = 1
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    assert "surprise" in _refused(tmp_path / "plan.json")


def _put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        at: Any = fields
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return edit


def _nested(depth: int) -> list[Any]:
    outer: list[Any] = []
    for _ in range(depth):
        outer = [outer]
    return outer


TIER = {
    "saved": "input", "saved_bytes": 0, "transient_bytes": 9, "n_matmuls": 1, "attention": True, "pointwise_bytes": 9,
    "n_kernels": 3,
}  # fmt: skip
EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "version": _put("format_version", value=3),
    "version of before": _put("format_version", value=1),
    "version as text": _put("format_version", value="2"),
    "fingerprint": _put("fingerprint", value="0" * 64),
    "configuration": _put("model", "config", "hidden_size", value=9),
    "configuration kind": _put("model", "config", value=[]),
    "claim kind": _put("claim", value=[1]),
    "zero batch": _put("semantics", "batch_size", value=0),
    "ragged batch without what its last micro-batch takes": _put("semantics", "batch_size", value=5),
    "negative length": _put("semantics", "seq_len", value=-8),
    "length as text": _put("semantics", "seq_len", value="8"),
    "length as fraction": _put("semantics", "seq_len", value=8.5),
    "length as truth": _put("semantics", "seq_len", value=True),
    "endless length": _put("semantics", "seq_len", value=10**30),
    "dtype": _put("semantics", "compute_dtype", value="fp8"),
    "clip none of a number": _put("semantics", "clip_norm", value=float("nan")),
    "clip infinite": _put("semantics", "clip_norm", value=float("inf")),
    "clip zero": _put("semantics", "clip_norm", value=0.0),
    "rounding": _put("semantics", "weight_rounding", value="nearest"),
    "depth zero": _put("policy", "prefetch_depth", value=0),
    "stride zero": _put("policy", "boundary_stride", value=0),
    "a choice that is gone": _put("policy", "storage", value="split"),
    "truth as number": _put("workload", "blocks", 1, "tiers", value=[TIER | {"attention": 1}]),
    "speculating block below none": _put("policy", "speculate_blocks", value=[-1]),
    "update": _put("policy", "update", value="sometimes"),
    "no blocks": _put("workload", "blocks", value=[]),
    "kind of block": _put("workload", "blocks", 1, "kind", value="head"),
    "negative shape": _put("workload", "blocks", 1, "parameters", 0, "shape", value=[-1]),
    "zero matmul": _put("workload", "blocks", 1, "matmuls", 0, "m", value=0),
    "negative bytes": _put("workload", "blocks", 1, "kept_bytes", value=-1),
    "long name": _put("workload", "blocks", 1, "name", value="x" * 10**5),
    "profile kind": _put("profile", value="h200"),
    "arena name": _put("arenas", 0, "name", value="../up"),
    "arena twice": _put("arenas", 1, "name", value="weights"),
    "arena place": _put("arenas", 0, "place", value="moon"),
    "arena negative": _put("arenas", 0, "slot_bytes", value=[-1]),
    "arena endless": _put("arenas", 0, "slot_bytes", value=[2**60]),
    "op kind": _put("ops", 0, value={"kind": "load"}),
    "op text": _put("ops", 0, value="load it"),
    "op lane": _put("ops", 0, value=LOAD.replace("h2d", "gpu")),
    "op block": _put("ops", 0, value=LOAD.replace("b1", "b3")),
    "op micro-batch": _put("ops", 1, value="forward gpu b0 m2 weights=weights[2] y=activations[0]"),
    "slot out of range": _put("ops", 0, value=LOAD.replace("weights[0]", "weights[3]")),
    "slot of no arena": _put("ops", 0, value=LOAD.replace("weights[0]", "clouds[0]")),
    "op operand missing": _put("ops", 0, value="load h2d b1 weights=weights[0]"),
    "op operand unknown": _put("ops", 0, value=f"{LOAD} surprise=weights[0]"),
    "wait out of range": _put("ops", 0, value=f"{LOAD} ^ 8"),
    "wait on its own lane": _put("ops", 2, value=f"{LINES[2]} ^ 1"),
    "wait on itself": _put("ops", 0, value=f"{LOAD} ^ 0@1"),
    "wait two steps back": _put("ops", 0, value=f"{LOAD} ^ 7@2"),
    "deep": _put("ops", 0, value=_nested(300)),
    "deep profile": _put("profile", "device", value=_nested(800)),
    "deep configuration": _put("model", "config", "hidden_size", value=_nested(400)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_a_hand_edited_plan_is_refused_in_one_line(tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    fields = _fields(tmp_path)
    edit(fields)
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    _refused(tmp_path / "plan.json")


def test_what_a_hand_edited_plan_is_refused_for_is_the_edit_alone(tmp_path: Path) -> None:
    """Where most of it stays, what else is there must be right."""
    for edit in (
        _put("ops", 0, value=LOAD),
        _put("ops", 0, value=f"{LOAD} ^ 7@1 6"),
        _put("ops", 0, value=LOAD.replace("weights[0]", "weights[2]")),
        _put("ops", 1, value="forward gpu b0 m1 weights=weights[2] y=activations[0]"),
        _put("workload", "blocks", 1, "tiers", value=[TIER]),
    ):
        fields = _fields(tmp_path)
        edit(fields)
        (tmp_path / "plan.json").write_text(json.dumps(fields))
        PlanFile.read(tmp_path / "plan.json")


def test_a_plan_of_an_older_penstock_is_refused_in_one_line_that_says_to_plan_again(tmp_path: Path) -> None:
    """Whatever else it holds: the version is read first."""
    fields = _fields(tmp_path) | {"format_version": 1}
    fields["policy"] |= {"storage": "split", "early_stop": True, "transfer_chunk_bytes": None}
    fields["ops"] = ["load h2d b1 < host_weights[1] > weights[0] ^ 7@1"]
    (tmp_path / "old.json").write_text(json.dumps(fields))
    refusal = _refused(tmp_path / "old.json")
    assert "a plan of format 1" in refusal
    assert "plan again with `penstock plan`" in refusal


def test_a_plan_text_of_an_older_penstock_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(str(PLAN).replace("penstock-plan 2", "penstock-plan 1", 1))
    _assert_one_line(caught.value)
    assert "format_version" in str(caught.value)


@pytest.mark.parametrize("name", ["number of many digits", "nesting without end", "half a character"])
def test_json_made_to_break_readers_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    evil = {
        "number of many digits": '{"claim": null, "fingerprint": "", "n": ' + "9" * 5000 + "}",
        "nesting without end": "[" * 10**5,
        "half a character": '{"claim": null, "fingerprint": "", "\\ud800": 1}',
    }
    (tmp_path / "plan.json").write_text(evil[name])
    _refused(tmp_path / "plan.json")


def test_the_unedited_plan_is_read(tmp_path: Path) -> None:
    _fields(tmp_path)
    assert PlanFile.read(tmp_path / "whole.json") == PlanFile(PLAN, {"prediction": {}})


# The values


@pytest.mark.parametrize(
    "value",
    [
        PLAN,
        PLAN.ops[0],
        PLAN.semantics,
        PLAN.policy,
        PLAN.arenas[0],
        PLAN.workload,
        PLAN.workload.blocks[0],
        PLAN.model,
        Slot("weights", 0),
        Wait(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_plan_is_made_of_is_frozen(value: Any) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    with pytest.raises((AttributeError, TypeError)):
        value.surprise = 1


@given(st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=6), st.sets(st.integers(0, 5)))
def test_parameters_lie_in_a_slot_in_order_aligned_and_apart(shapes: list[list[int]], tied: set[int]) -> None:
    parameters = tuple(Parameter(f"p{i}", tuple(shape), "embed" if i in tied else None) for i, shape in enumerate(shapes))
    block = Block("b", BlockKind.LAYER, parameters)
    for owned_only in (False, True):
        inside = [p for p in parameters if not (owned_only and p.tied_to)]
        offsets, n_elements = block.offsets(owned_only)
        assert list(offsets) == [p.name for p in inside]
        assert all(at % ALIGN_ELEMENTS == 0 for at in offsets.values())
        ends = [offsets[p.name] + p.n_elements for p in inside]
        starts = [*[offsets[p.name] for p in inside][1:], n_elements]
        assert all(end <= start < end + ALIGN_ELEMENTS for end, start in zip(ends, starts if inside else [], strict=True))
    assert block.n_params == sum(p.n_elements for p in parameters if not p.tied_to)


@given(st.integers(1, 40), st.none() | st.integers(1, 50))
def test_attention_flop_count_the_visible_pairs(seq_len: int, window: int | None) -> None:
    visible = sum(1 for q in range(seq_len) for k in range(seq_len) if k <= q and (window is None or q - k < window))
    assert Attention(3, 2, 8, seq_len, window).flop == 2 * 2 * 3 * 2 * 8 * visible  # two products, multiply and add


def test_two_models_of_equal_shapes_have_different_fingerprints() -> None:
    config = {"hidden_size": 8, "rms_norm_eps": 1e-5}
    same = {"rms_norm_eps": 1e-5, "hidden_size": 8}
    assert Model(config).fingerprint == Model(same, path="elsewhere", name="other").fingerprint
    assert Model(config).fingerprint != Model(config | {"rms_norm_eps": 1e-6}).fingerprint


# The timeline


def test_a_step_ends_with_its_last_op_and_lasts_from_end_to_end() -> None:
    spans = (
        Span(0, 0, 0.0, 1.0),
        Span(1, 0, 1.0, 4.0),
        Span(0, 1, 1.0, 2.0),
        Span(1, 1, 4.0, 6.5),
        Span(1, 2, 6.5, 7.5),
    )
    timeline = Timeline(spans)
    assert timeline.step_ends_s == [4.0, 6.5, 7.5]
    assert timeline.step_times_s == [2.5, 1.0]
    assert timeline.total_s == 7.5
    assert timeline.from_step(1).spans == spans[2:]
    assert Timeline(()).total_s == 0.0
    assert Timeline(()).step_times_s == []


def test_busy_time_is_the_median_over_the_steps_for_each_lane() -> None:
    spans = [Span(0, step, 10.0 * step, 10.0 * step + length) for step, length in enumerate((1.0, 5.0, 2.0))]
    spans += [Span(1, step, 10.0 * step, 10.0 * step + 1) for step in range(3)]
    spans += [Span(2, step, 10.0 * step + 1, 10.0 * step + 3) for step in range(3)]
    busy_s = Timeline(tuple(spans)).busy_s(PLAN)
    assert busy_s == {Lane.H2D: 2.0, Lane.GPU: 3.0, Lane.D2H: 0.0, Lane.CPU: 0.0}


def test_the_trace_has_a_process_per_timeline_a_thread_per_lane_and_counts_in_microseconds() -> None:
    predicted, measured = Timeline((Span(0, 0, 0.5, 0.75), Span(2, 0, 0.75, 1.0))), Timeline((Span(0, 3, 1.0, 3.0),))
    trace = json.loads(chrome_trace(PLAN, {"predicted": predicted, "measured": measured}))
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(processes.values()) == ["measured", "predicted"]
    assert sorted(threads.values()) == sorted([str(lane) for lane in PLAN.lanes] * 2)
    drawn = [
        (processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["step"])
        for e in events
        if e["ph"] == "X"
    ]
    assert drawn == [
        ("predicted", "h2d", "load h2d b1", 500_000.0, 250_000.0, 0),
        ("predicted", "gpu", "forward gpu b1 m0", 750_000.0, 250_000.0, 0),
        ("measured", "h2d", "load h2d b1", 1_000_000.0, 2_000_000.0, 3),
    ]


# Sizes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("80GB", 80 * GB),
        ("1.5TB", 15 * TB // 10),
        ("24GiB", 24 * GiB),
        ("24gib", 24 * GiB),
        (" 0.5 MiB ", MiB // 2),
        ("1024", None),
        ("128G", 128 * GB),
        ("1B", 1),
        ("1.5e", None),
        ("", None),
        ("GB", None),
        ("-1GB", None),
        ("0", None),
        ("0.0TB", None),
        ("0.1B", None),
        ("1e9", None),
        ("nan", None),
        ("inf", None),
        ("1,5TB", None),
        ("80 GB each", None),
        ("80GG", None),
        ("9" * 400, None),
        ("\u0663GB", None),
    ],
)
def test_sizes_are_read_or_refused_with_an_example(text: str, n_bytes: int | None) -> None:
    if n_bytes is None:
        with pytest.raises(PenstockError, match="80GB"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == n_bytes


def test_sizes_times_and_rates_are_shown_with_three_digits() -> None:
    assert show_bytes(1_635_200_000_000) == "1.64 TB"
    assert show_bytes(12) == "12 B"
    assert show_seconds(2.913) == "2.91 s"
    assert show_seconds(0.0341) == "34.1 ms"
    assert show_seconds(22e-6) == "22 µs"
    assert show_seconds(0) == "0 s"
    assert show_seconds(1234.5) == "1234 s"
    assert show_rate(4.12e14, "FLOP") == "412 TFLOP/s"
    assert show_rate(5.59e10, "B") == "55.9 GB/s"


def test_what_layers_save_may_be_said_in_words_as_a_file_has_it_or_as_it_is_kept() -> None:
    kept = Policy(save=saves(all=(1, 3), products=(2,)))
    assert kept == Policy(save={"all": [3, 1], "products": [2]}) == Policy(save=("all", "products", "all"))  # type: ignore[arg-type]
    assert Policy(**kept.to_json()) == kept
    with pytest.raises(ValueError, match="some"):
        Policy(save=("some",))  # type: ignore[arg-type]


def test_however_it_is_said_what_layers_save_is_kept_as_a_tuple() -> None:
    """A policy is a key of what the search knows; and what is read once is gone."""
    kept = Policy(save=(Saved.ALL, Saved.PRODUCTS))
    assert Policy(save=[Saved.ALL, Saved.PRODUCTS]) == kept  # type: ignore[arg-type]
    assert Policy(save={"all": (1,), "products": (2,)}) == kept  # type: ignore[arg-type]
    for once in (iter(kept.save), iter(["all", "products"])):
        policy = Policy(save=once)  # type: ignore[arg-type]
        assert (policy, policy.saved(2), hash(policy)) == (kept, Saved.PRODUCTS, hash(kept))


def test_blocks_given_as_lists_are_kept_as_tuples() -> None:
    """A policy is a key of what the search knows."""
    kept = Policy(square_blocks=(1, 2), device_blocks=(2,))
    policy = Policy(square_blocks=[1, 2], device_blocks=iter([2]))  # type: ignore[arg-type]
    assert (policy, hash(policy)) == (kept, hash(kept))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"all": (0, -2)}, "save names layers, which are numbered from 1 to 65536"),
        ({"products": (0, 3)}, "save names layers, which are numbered from 1 to 65536"),
        ({"attention": (2, 1.5)}, "save names layers, which are numbered from 1 to 65536"),
        ({"attention": (2**16 + 1,)}, "save names layers, which are numbered from 1 to 65536"),
        ({"all": (1,), "products": (2, 1)}, "save names layer 1 twice; a layer saves one of attention, products, all"),
        ({"all": (3, 3)}, "save names layer 3 twice; a layer saves one of attention, products, all"),
    ],
)
def test_layers_that_there_cannot_be_are_not_dropped_and_none_saves_in_two_ways(layers: dict[str, Any], said: str) -> None:
    for ask in (lambda: saves(**layers), lambda: Policy(save=layers)):  # type: ignore[arg-type]
        with pytest.raises(PlanError) as caught:
            ask()
        assert str(caught.value) == said
