"""Plan language: text, JSON and memory hold the same plan, and a damaged plan raises a one-line error."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.errors import PenstockError, PlanError
from penstock.runtime.plan import OPS, Arena, Kind, Lane, Op, Place, Plan, PlanFile, Policy, Semantics, Slot, Update, Wait, saves
from penstock.runtime.plan.ops import LANE_OF
from penstock.runtime.plan.plan import FORMAT_VERSION
from penstock.runtime.plan.timeline import Span, Timeline, chrome_trace
from penstock.runtime.plan.workload import ALIGN_ELEMENTS, Attention, Block, BlockKind, Matmul, Model, Parameter, Saved, Workload
from penstock.runtime.units import GB, TB, GiB, MiB, parse_bytes
from tests.lanes import examples
from tests.strategies import plans

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
    """Return a plan with one layer between embedding and head; it is impractical, but uses every field."""
    parts = (Parameter("w", (8, 16)), Parameter("norm", (8,))), (Matmul(4, 8, 16, 2),), Attention(1, 2, 4, 8, 4)
    layer = Block("model.layers.0", BlockKind.LAYER, *parts, 100, 7, 64, 512, 1024)
    embedding = Block("model.embed_tokens", BlockKind.EMBEDDING, (Parameter("embed", (96, 8)),), boundary_bytes=64)
    head = Block("lm_head", BlockKind.HEAD, (Parameter("lm_head", (96, 8), tied_to="embed"),))
    sizes: dict[Place, dict[str, tuple[int, ...]]] = {
        Place.DEVICE: {"weights": (512, 512, 1536), "activations": (64, 64), "gradients": (512, 3072)},
        Place.HOST: {"state": (1, 2, 3), "host_gradients": (1, 2, 3), "norm": (1, 2, 3)},
    }
    return Plan(
        Semantics(8, 4, 2, clip_norm=None, mlp_tile_tokens=16, gradient_dtype="fp32"),
        Policy(2, 1, 2, saves(all=(1,)), update=Update.DEFERRED),
        Model({"model_type": "llama", "hidden_size": 8, "rope": {"theta": 1e4}, "note": "ø"}, "models/small", "small"),
        Workload((embedding, layer, head)),
        tuple(Arena(name, place, slots) for place, arenas in sizes.items() for name, slots in arenas.items()),
        {"name": "h", "device": {"memory_bytes": {"value": 1e9, "spread_fraction": 0.0, "source": "a"}}},
        tuple(map(Op.parse, LINES)),
    )


PLAN = small_plan()


def _is_one_line(error: PenstockError) -> None:
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 500
    assert error.exit_code == 2


def legal_operands(kind: Kind) -> Iterator[tuple[str, ...]]:
    """Return all operand names of the kind, with repeated ones up to twice."""
    row = OPS[kind]
    counts = [range(name in row.required, 2 + (name in row.repeated)) for name in row.names]
    for chosen in product(*counts):
        yield tuple(name for name, n in zip(row.names, chosen, strict=True) for _ in range(n))


def line_of(kind: Kind, names: Sequence[str]) -> str:
    """Return an op with these operands, each in an arena of the same name."""
    return " ".join([f"{kind} {LANE_OF[kind]} b1", *(f"{name}={name}s[{i}]" for i, name in enumerate(names))])


def test_the_line_of_an_op_is_the_one_in_the_documentation() -> None:
    line = "forward gpu b2 m0 weights=weights[1] x=activations[4] y=activations[8] ^ 3 17@1"
    assert line in (Op.__doc__ or "")
    op = Op.parse(line)
    assert (op.kind, op.lane, op.block, op.micro_batch, op.name) == (Kind.FORWARD, Lane.GPU, 2, 0, "forward gpu b2 m0")
    assert op.waits == (Wait(3), Wait(17, 1))
    assert op["x"] == Slot("activations", 4)
    with pytest.raises(PlanError, match=r"^forward gpu b2 m0: has no `sum`; .*penstock plan"):
        op["sum"]


NO_OPS = [
    *("", "load h2d", f" {LOAD}", f"{LOAD}\n", f"{LOAD} ^ ", f"{LOAD} ^ 3@2", f"{LOAD} ^ 3@1~1", f"{LOAD} ^ 17~2", f"{LOAD} ^ -3"),
    *(LOAD.replace("b1", text) for text in ("b-1", "b1 c1", "b1 m0 m0", "b\u0661", "b1" + " m0" * 5000)),
    *(LOAD.replace("h2d", text) for text in ("gpu", "sky")),
    *(LOAD.replace("=weights[0]", text) for text in ("=", "", "=weights[-1]", "=w[1]=w[1]", "=w[99999999999]", " = weights[0]")),
    LOAD.replace("load h2d", "fly gpu"),
    LOAD.replace(" weights", "\u2003weights"),
    "load h2d b1 < state[1] > weights[0]",  # a field of an older Penstock
    f"{LOAD} {'a' * 5000}=weights[0]",
]


@pytest.mark.parametrize("line", NO_OPS)
def test_a_line_that_is_no_op_is_refused(line: str) -> None:
    with pytest.raises(PlanError) as caught:
        Op.parse(line)
    _is_one_line(caught.value)


@pytest.mark.parametrize("kind", Kind)
def test_operands_of_every_kind_are_parsed_and_printed(kind: Kind) -> None:
    row = OPS[kind]
    assert row.reads or kind is Kind.READ  # which reads a disk
    assert row.writes
    assert {*row.names} == row.reads | row.writes
    for names in legal_operands(kind):
        line = line_of(kind, names)
        op = Op.parse(line)
        assert str(op) == line
        assert op.operands == tuple((name, Slot(f"{name}s", i)) for i, name in enumerate(names))
        assert op.reads == tuple(slot for name, slot in op.operands if name in row.reads)
        assert op.writes == tuple(slot for name, slot in op.operands if name in row.writes)
        for name in row.names:
            every = op.every(name)
            assert len(every) == names.count(name)
            assert op.get(name) == (every[0] if every else None)


@pytest.mark.parametrize("kind", Kind)
def test_operands_that_a_kind_does_not_have_are_refused(kind: Kind) -> None:
    """Try unknown, missing, misplaced and repeated operands; the message lists the valid ones."""
    row, valid = OPS[kind], OPS[kind].names
    all_names = {name for entry in OPS.values() for name in entry.names} | {"surprise"}
    wrong = [(*valid, name) for name in all_names - {*valid}] + [valid[::-1]] * (len(valid) > 1)
    wrong += [tuple(n for n in valid if n != name) for name in row.required]
    wrong += [(*valid[:i], valid[i + 1], valid[i], *valid[i + 2 :]) for i in range(len(valid) - 1)]
    wrong += [(*valid[: i + 1], *valid[i:]) for i, name in enumerate(valid) if name not in row.repeated]
    Op.parse(line_of(kind, valid))
    for names in wrong:
        with pytest.raises(PlanError, match=f"operands of {kind} are {', '.join(valid)}, in this order") as caught:
            Op.parse(line_of(kind, names))
        _is_one_line(caught.value)


@settings(max_examples=examples(40))
@given(plan=plans(), text=st.text(max_size=9), number=st.floats(allow_nan=False, allow_infinity=False))
def test_a_plan_is_read_back_from_text_and_file(plan: Plan, text: str, number: float, tmp_path_factory: Any) -> None:
    plan = dataclasses.replace(plan, model=Model({"text": text, "n": number}), profile={"name": text})
    assert Plan.parse(str(plan)) == plan
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    PlanFile(plan, {"step_s": 2.5}).write(path)
    assert PlanFile.read(path) == PlanFile(plan, {"step_s": 2.5})
    assert json.loads(path.read_text())["ops"] == [str(op) for op in plan.ops]


@given(st.integers(0, 2000), st.text(max_size=3))
def test_no_edit_of_a_plan_text_fails_in_another_way(place: int, insertion: str) -> None:
    text = str(PLAN)
    edited = text[: place % len(text)] + insertion + text[(place + 1) % len(text) :]
    try:
        plan = Plan.parse(edited)
    except PlanError as error:
        _is_one_line(error)
    else:
        assert Plan.parse(str(plan)) == plan


def _fields(tmp_path: Path) -> dict[str, Any]:
    PlanFile(PLAN, {"prediction": {}}).write(tmp_path / "whole.json")
    fields: dict[str, Any] = json.loads((tmp_path / "whole.json").read_text())
    return fields


def _refused(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        PlanFile.read(path)
    _is_one_line(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_cut_anywhere_or_missing_is_refused(tmp_path: Path) -> None:
    PlanFile(PLAN, None).write(tmp_path / "whole.json")
    content = (tmp_path / "whole.json").read_bytes()
    for end in range(0, len(content) - 2, 303):
        (tmp_path / "cut.json").write_bytes(content[:end])
        _refused(tmp_path / "cut.json")
    assert "penstock plan" in _refused(tmp_path / "none.json")
    _refused(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"[]", b"{}"),
        pytest.param(b'{"claim": null, "fingerprint": "", "n": ' + b"9" * 5000 + b"}", id="number of many digits"),
        pytest.param(b"[" * 10**5, id="nesting without end"),
        pytest.param(b'{"claim": null, "claim": null}', id="a key twice"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    _refused(tmp_path / "other")


def _put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        tree: Any = fields
        for step in path[:-1]:
            tree = tree[step]
        tree[path[-1]] = value

    return edit


TIER = {
    "saved": "input", "saved_bytes": 0, "transient_bytes": 9, "n_matmuls": 1, "attention": True, "pointwise_bytes": 9,
    "n_kernels": 3,
}  # fmt: skip
EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "fingerprint": _put("fingerprint", value="0" * 64),
    "configuration": _put("model", "config", "hidden_size", value=9),
    "claim kind": _put("claim", value=[1]),
    "ragged batch without sizes of its last micro-batch": _put("semantics", "batch_size", value=5),
    "length as text": _put("semantics", "seq_len", value="8"),
    "endless length": _put("semantics", "seq_len", value=10**30),
    "clip none of a number": _put("semantics", "clip_norm", value=float("nan")),
    "depth zero": _put("policy", "prefetch_depth", value=0),
    "truth as number": _put("workload", "blocks", 1, "tiers", value=[TIER | {"attention": 1}]),
    "no blocks": _put("workload", "blocks", value=[]),
    "long name": _put("workload", "blocks", 1, "name", value="x" * 10**5),
    "arena name": _put("arenas", 0, "name", value="../up"),
    "arena twice": _put("arenas", 1, "name", value="weights"),
    "arena endless": _put("arenas", 0, "slot_bytes", value=[2**60]),
    "op text": _put("ops", 0, value="load it"),
    "op block": _put("ops", 0, value=LOAD.replace("b1", "b3")),
    "op micro-batch": _put("ops", 1, value="forward gpu b0 m2 weights=weights[2] y=activations[0]"),
    "slot out of range": _put("ops", 0, value=LOAD.replace("weights[0]", "weights[3]")),
    "wait out of range": _put("ops", 0, value=f"{LOAD} ^ 8"),
    "wait on its own lane": _put("ops", 2, value=f"{LINES[2]} ^ 1"),
    "wait two steps back": _put("ops", 0, value=f"{LOAD} ^ 7@2"),
    "repetitions": _put("repeat", value={"start": 0, "end": 2, "times": 1.5, "micro_batches": 1}),
    "deep profile": _put("profile", "device", value=json.loads("[" * 800 + "]" * 800)),
    "unknown key": _put("workload", "blocks", 1, "surprise", value=1),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_hand_edited_plan_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    fields = _fields(tmp_path)
    EDITS[name](fields)
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    assert "surprise" in _refused(tmp_path / "plan.json") or name != "unknown key"


def test_a_hand_edited_plan_that_is_well_formed_is_read(tmp_path: Path) -> None:
    """Only the edit makes the plans above invalid."""
    _fields(tmp_path)
    assert PlanFile.read(tmp_path / "whole.json") == PlanFile(PLAN, {"prediction": {}})
    for edit in (_put("ops", 0, value=f"{LOAD} ^ 7@1 6"), _put("workload", "blocks", 1, "tiers", value=[TIER])):
        fields = _fields(tmp_path)
        edit(fields)
        (tmp_path / "plan.json").write_text(json.dumps(fields))
        PlanFile.read(tmp_path / "plan.json")


def test_a_plan_of_an_older_penstock_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """The version is read before other fields."""
    fields = _fields(tmp_path) | {"format_version": 3}
    fields["semantics"] |= {"loss": "fused"}
    del fields["semantics"]["lora_products"]
    fields["policy"] |= {"storage": "split", "early_stop": True, "transfer_chunk_bytes": None}
    fields["ops"] = ["load h2d b1 < host_weights[1] > weights[0] ^ 7@1"]
    (tmp_path / "old.json").write_text(json.dumps(fields))
    assert f"plan of format 3, and this Penstock reads {FORMAT_VERSION}; plan again" in _refused(tmp_path / "old.json")
    with pytest.raises(PlanError, match="a plan of format 2") as caught:
        Plan.parse(json.dumps(json.loads(str(PLAN)) | {"format_version": 2}))
    _is_one_line(caught.value)


@given(st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=6), st.sets(st.integers(0, 5)))
def test_parameters_lie_in_a_slot_in_order_aligned_and_apart(shapes: list[list[int]], tied: set[int]) -> None:
    parameters = tuple(Parameter(f"p{i}", tuple(shape), "embed" if i in tied else None) for i, shape in enumerate(shapes))
    block = Block("b", BlockKind.LAYER, parameters)
    for owned_only in (False, True):
        inside = sorted((p for p in parameters if not (owned_only and p.tied_to)), key=lambda p: p.tied_to is not None)
        offsets, n_elements = block.offsets(owned_only)
        assert list(offsets) == [p.name for p in inside]
        assert all(offset % ALIGN_ELEMENTS == 0 for offset in offsets.values())
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


def test_a_policy_is_kept_as_tuples_however_it_is_said() -> None:
    """The search uses policies as keys; an iterator is exhausted after one read."""
    expected = Policy(save=saves(all=(1, 3), products=(2,)), device_blocks=(2,))
    for save in ({"all": [3, 1], "products": [2]}, ("all", "products", "all"), list(expected.save), iter(expected.save)):
        policy = Policy(save=save, device_blocks=iter([2]))  # type: ignore[arg-type]
        assert (policy, policy.saved(2), hash(policy)) == (expected, Saved.PRODUCTS, hash(expected))
    assert Policy(**expected.to_json()) == expected
    for wrong, message in ((("some",), "some"), ({"all": (0, -2)}, "numbered from 1 to 65536")):
        with pytest.raises(ValueError, match=message):
            Policy(save=wrong)  # type: ignore[arg-type]


def test_a_step_ends_with_its_last_op_and_lasts_from_end_to_end() -> None:
    spans = (Span(0, 0, 0.0, 1.0), Span(1, 0, 1.0, 4.0), Span(0, 1, 1.0, 2.0), Span(1, 1, 4.0, 6.5), Span(1, 2, 6.5, 7.5))
    timeline = Timeline(spans)
    assert timeline.step_ends_s == [4.0, 6.5, 7.5]
    assert timeline.step_times_s == [2.5, 1.0]
    assert timeline.total_s == 7.5
    assert timeline.from_step(1).spans == spans[2:]
    assert (Timeline(()).total_s, Timeline(()).step_times_s) == (0.0, [])
    # busy time is the median over the steps, for each lane
    spans = [Span(0, step, 10.0 * step, 10.0 * step + length) for step, length in enumerate((1.0, 5.0, 2.0))]
    spans += [Span(op, step, 10.0 * step, 10.0 * step + op) for op in (1, 2) for step in range(3)]
    assert Timeline(tuple(spans)).busy_s(PLAN) == {Lane.H2D: 2.0, Lane.GPU: 3.0, Lane.D2H: 0.0, Lane.CPU: 0.0}


def test_a_trace_has_processes_for_timelines_threads_for_lanes() -> None:
    """Times are in microseconds, as the format requires."""
    predicted, measured = Timeline((Span(0, 0, 0.5, 0.75), Span(2, 0, 0.75, 1.0))), Timeline((Span(0, 3, 1.0, 3.0),))
    events = json.loads(chrome_trace(PLAN, {"predicted": predicted, "measured": measured}))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(threads.values()) == sorted([str(lane) for lane in PLAN.lanes] * 2)
    spans = [e for e in events if e["ph"] == "X"]
    assert [(processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["step"]) for e in spans] == [
        ("predicted", "h2d", "load h2d b1", 500_000.0, 250_000.0, 0),
        ("predicted", "gpu", "forward gpu b1 m0", 750_000.0, 250_000.0, 0),
        ("measured", "h2d", "load h2d b1", 1_000_000.0, 2_000_000.0, 3),
    ]


def test_sizes_are_read_in_units_of_links_and_of_memory() -> None:
    """The error of an invalid size has an example."""
    read = {"80GB": 80 * GB, "1.5TB": 15 * TB // 10, "24gib": 24 * GiB, " 0.5 MiB ": MiB // 2, "1B": 1, "128G": 128 * GB}
    assert {text: parse_bytes(text) for text in read} == read
    for text in ("1024", "", "-1GB", "0", "0.1B", "nan", "1,5TB", "80 GB each", "9" * 400, "\u0663GB"):
        with pytest.raises(PenstockError, match="80GB"):
            parse_bytes(text)
