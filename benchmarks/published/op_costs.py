"""The cost model's price of a single published op, copy or collective.

Each row of measurements is put as what a plan would ask of the same machine: products and pieces of a layer as blocks of nothing
else, attention as a kernel is asked for it. Ops alone are costed without what a step's load takes from products.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.hwprofiles.op_laws import AttentionLaw
from penstock.hwprofiles.quantity import Dtype
from penstock.hwprofiles.schema import BACKWARD_ATTENTION, AttentionCall, AttentionKernel, Collective, NormKernel, Profile
from penstock.planner.model.kernels import FUSED
from penstock.planner.model.tape import FP32, Call, Tape, Tensor
from penstock.planner.model.workload import build_workload, log_softmax_bytes, read_model
from penstock.planner.predict.cost import CostModel
from penstock.runtime.errors import PenstockError
from penstock.runtime.plan import Kernel, Semantics
from penstock.runtime.plan.workload import Block, BlockKind, Matmul

from . import op_steps
from .op_rows import RATE, OpRow

BF16 = 2
SERVING = ("vllm-fused", "trtllm-fmha", "trtllm-gen")
ATTENTION_NAMES: Mapping[str, AttentionKernel] = {"flash": "flash", "cudnn": "cudnn", "fa3": "fa3", "aiter": "aiter"}
NORMS: Mapping[str, NormKernel] = {"torch-fused": "torch-fused", "torch-compile": "torch-compile"}
COLLECTIVES: Mapping[str, Collective] = {
    **{"nccl-all_gather": "all_gather", "nccl-reduce_scatter": "reduce_scatter"},
    **{"nccl-all_reduce": "all_reduce", "nccl-alltoall": "alltoall"},
}
ALONE = Semantics(1, 1, 1)


class CannotSayError(PenstockError):
    """Why an op is not predicted."""


def predict(row: OpRow, profile: Profile) -> float:
    """What the cost model says of a row, in its unit. CannotSayError where nothing does."""
    if row.kernel in SERVING:
        raise CannotSayError(f"{row.kernel} is a serving engine's kernel, which no trainer calls")
    if row.dtype == "fp8":
        raise CannotSayError("profiles have no rates in fp8")
    if row.kind == "host_dram":
        return profile.host.dram_bytes_per_s.value
    if row.kind in ("copy_h2d", "copy_d2h", "copy_duplex", "device_copy"):
        return _copy(row, profile)
    if row.kind == "collective":
        return _collective_s(row, profile)
    if row.model is not None:
        return _in_a_model_s(row, profile, row.model)
    alone = profile.model_copy(update={"device": profile.device.model_copy(update={"sustained_fraction": None})})
    if row.kind.startswith("attention_"):
        return _attention_s(row, alone)
    return _block_s(row, alone)


def _copy(row: OpRow, profile: Profile) -> float:
    n_bytes, link = row.sizes["bytes"], profile.link
    match row.kind:
        case "copy_duplex":
            rate = link.duplex_bytes_per_s.value
        case "device_copy":
            rate = profile.device.memory_bytes_per_s.value
        case _:
            rate = n_bytes / profile.copy_s("h2d" if row.kind == "copy_h2d" else "d2h", n_bytes)
    return rate if row.unit == RATE else n_bytes / rate


def _collective_s(row: OpRow, profile: Profile) -> float:
    of = COLLECTIVES.get(row.kernel)
    law = None if of is None or profile.peers is None else profile.peers.collectives.get(of)
    if law is None:
        raise CannotSayError(f"the profile says nothing of {row.kernel} among devices of one host")
    return law.latency_of(row.sizes["gpus"]) + law.moving_s(row.sizes["gpus"], row.sizes["bytes"])


def _attention_s(row: OpRow, profile: Profile) -> float:
    """One call, as a kernel is asked for it: FLOP of the causal half, or of the whole."""
    name, _, ordered = row.kernel.partition("-")
    kernel = ATTENTION_NAMES.get(name)
    dtype: Dtype = "fp32" if row.dtype == "fp32" else "bf16"
    if kernel is None or ordered not in ("", "deterministic") or kernel not in profile.device.attention:
        raise CannotSayError(f"the profile has no rates of {row.kernel}; it has {', '.join(profile.device.attention)}")
    d, causal, backward = row.sizes, bool(row.sizes.get("causal", 1)), row.kind == "attention_backward"
    n_pairs = d["seq"] * (d["seq"] + 1) // 2 if causal else d["seq"] ** 2
    flop = 4 * d["batch"] * d["heads"] * d["head_dim"] * n_pairs
    call = AttentionCall(dtype, d["seq"], d["head_dim"], d["kv_heads"] < d["heads"], causal)
    rate = profile.attention_rate(call, backward, kernel).value
    if ordered and backward:
        rate *= profile.deterministic_fraction(kernel, call.dtype)
    law = profile.device.attention[kernel].get(dtype)
    passes = law.pass_of(backward).paged_passes if row.is_paged and isinstance(law, AttentionLaw) else 0.0
    kv_bytes = 2 * d["batch"] * d["kv_heads"] * d["head_dim"] * d["seq"] * BF16
    cached_s = passes * kv_bytes / profile.device.memory_bytes_per_s.value
    return flop * (BACKWARD_ATTENTION if backward else 1.0) / rate + cached_s + profile.device.kernel_overhead_s.value


def _block_s(row: OpRow, profile: Profile) -> float:
    """A piece of a block, by the calls that it consists of."""
    if row.kernel in NORMS:
        rates = profile.device.norms.get(NORMS[row.kernel])
        if rates is None:
            raise CannotSayError(f"the profile has no rates of norms by {row.kernel}")
        profile = profile.model_copy(update={"device": profile.device.model_copy(update={"norms": {"torch-fused": rates}})})
    cost, block = CostModel(profile), block_of(row)
    of = replace(ALONE, compute_dtype="fp32" if row.kind == "matmul" and row.dtype == "fp32" else "bf16")
    if row.kind == "head_forward_backward":
        return cost.loss_s(block, of)
    return cost.backward_s(block, of) if row.kind.endswith("_backward") else cost.forward_s(block, of)


def block_of(row: OpRow) -> Block:
    """What a row asks for, as a block of nothing else."""
    d, tape = row.sizes, Tape(BF16)
    kernel: Kernel = "fused" if row.kernel.endswith(("-fused", "-compile")) else "eager"
    tokens, width = d.get("tokens", 0), d.get("width", 0)
    match row.kind.removesuffix("_forward").removesuffix("_backward"):
        case "matmul":
            return _of(matmuls=(Matmul(d["m"], d["k"], d["n"]),), n_kernels=1)
        case "rms_norm":
            op_steps.rms_norm(tape, Tensor(tokens * width, BF16, ours=False), width, kernel)
        case "rope":
            table = Tensor(tokens * d["head_dim"], BF16, ours=False, differentiable=False)
            for heads in (d["heads"], d["kv_heads"]):
                x = Tensor(tokens * heads * d["head_dim"], BF16, ours=False)
                op_steps.rotation(tape, x, table, kernel)
        case "swiglu":
            gate, up = (Tensor(tokens * d["inner"], BF16, ours=False) for _ in range(2))
            act = gate if kernel == "fused" else tape.step([gate], gate.n_elements)
            tape.step([act, up], gate.n_elements, call=Call.FUSED if kernel == "fused" else Call.POINTWISE)
        case "mlp":
            x = Tensor(tokens * width, BF16, ours=False)
            op_steps.gated_mlp(tape, x, tokens, width, d["inner"], kernel)
        case "add":
            tape.step([Tensor(tokens * width, BF16, ours=False) for _ in range(2)], tokens * width, call=Call.FUSED)
        case "cross_entropy":
            n_bytes = log_softmax_bytes(tokens, d["vocab"])
            return _of(pointwise_bytes=n_bytes, fused_bytes=n_bytes, n_kernels=2)
        case "head_forward":  # and backward
            n_bytes, logits = log_softmax_bytes(tokens, d["vocab"]), tokens * d["vocab"]
            matmuls = (Matmul(tokens, width, d["vocab"]),)
            return _of(matmuls=matmuls, pointwise_bytes=n_bytes + logits * (BF16 + FP32), fused_bytes=n_bytes, n_kernels=4)
        case _:
            raise CannotSayError(f"nothing predicts {row.kind}")
    return _of(matmuls=tuple(tape.matmuls), **tape.work._asdict())


def _of(**work: Any) -> Block:
    return Block("op", BlockKind.LAYER, (), **work)


def _in_a_model_s(row: OpRow, profile: Profile, name: str) -> float:
    """A layer, or a step's computing, as a plan has it that recomputes nothing, with the kernels that the row names."""
    of, profile = _as_named(row, profile)
    cost, (embedding, *layers, head) = CostModel(profile), build_workload(read_model(name), of).blocks
    vocabulary_s = cost.forward_s(embedding, of) + cost.loss_s(head, of)
    if row.kind.startswith("layer_"):
        way, _, part = row.kind.removeprefix("layer_").partition("_")
        return _parts_s(cost, layers[0], of, (way,))[part]
    found = [_parts_s(cost, layer, of, ("forward", "backward")) for layer in layers]
    whole_s, attention_s = (sum(parts[part] for parts in found) for part in ("", "attention"))
    kinds = {"model_attention_step": attention_s, "model_rest_step": whole_s - attention_s + vocabulary_s}
    return kinds.get(row.kind, whole_s + vocabulary_s)


def _as_named(row: OpRow, profile: Profile) -> tuple[Semantics, Profile]:
    """The semantics with the kernels that a row's text names, and the profile with the rates of its attention."""
    kernels: dict[str, Any] = dict.fromkeys(FUSED, "eager") if "eager" in row.kernel else FUSED
    rates, flash = profile.device.attention, any(name in row.kernel for name in ("fa2", "flash", "transformers"))
    own = next((name for name in ATTENTION_NAMES.values() if name in ("fa3", "cudnn") and name in rates), None)
    of = Semantics(row.sizes["seq"], row.sizes["batch"], row.sizes["batch"], **kernels)
    if flash or own is None:
        return of, profile
    # Plans know the fastest kernel by the name of cuDNN's
    named = rates | {"cudnn": rates["fa3" if "fa3" in row.kernel and "fa3" in rates else own]}
    device = profile.device.model_copy(update={"attention": named})
    return replace(of, attention_kernel="cudnn"), profile.model_copy(update={"device": device})


def _parts_s(cost: CostModel, layer: Block, of: Semantics, ways: tuple[str, ...]) -> dict[str, float]:
    """Seconds of a layer as a whole, and of its parts by their names in a row's kind."""

    def seconds(block: Block) -> float:
        each = {"forward": cost.forward_s, "backward": cost.backward_s}
        return sum(each[way](block, of) for way in ways)

    whole_s, bare_s, products_s = seconds(layer), seconds(replace(layer, attention=None)), seconds(_of(matmuls=layer.matmuls))
    return {"": whole_s, "products": products_s, "attention": whole_s - bare_s, "pointwise": bare_s - products_s}
