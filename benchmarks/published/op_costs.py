"""Cost of a single published op, copy or collective in the cost model.

A row of measurements is converted to a plan's request: products and pieces of a layer to blocks of nothing else, attention to a
kernel call. Single ops are costed without the slowdown of products under a step's load.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.hwprofiles.components import BACKWARD_ATTENTION, AttentionCall, AttentionKernel, Collective, NormKernel
from penstock.hwprofiles.op_laws import AttentionLaw
from penstock.hwprofiles.quantity import Dtype
from penstock.hwprofiles.schema import Profile
from penstock.planner.model.kernels import FUSED
from penstock.planner.model.memory_replay import FP32, Call, Tape, Tensor
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
    """Reason why an op cannot be predicted."""


def predict(row: OpRow, profile: Profile) -> float:
    """Return the predicted value of a row, in its unit. CannotSayError without a prediction."""
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
    name = COLLECTIVES.get(row.kernel)
    law = None if name is None or profile.peers is None else profile.peers.collectives.get(name)
    if law is None:
        raise CannotSayError(f"the profile has no rates of {row.kernel} among devices of one host")
    return law.latency_of(row.sizes["gpus"]) + law.moving_s(row.sizes["gpus"], row.sizes["bytes"])


def _attention_s(row: OpRow, profile: Profile) -> float:
    """Return seconds of one attention call: FLOP of the causal half, or of the whole."""
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
    """Return seconds of a piece of a block, summed over its calls."""
    if row.kernel in NORMS:
        rates = profile.device.norms.get(NORMS[row.kernel])
        if rates is None:
            raise CannotSayError(f"the profile has no rates of norms by {row.kernel}")
        profile = profile.model_copy(update={"device": profile.device.model_copy(update={"norms": {"torch-fused": rates}})})
    cost, block = CostModel(profile), block_of(row)
    semantics = replace(ALONE, compute_dtype="fp32" if row.kind == "matmul" and row.dtype == "fp32" else "bf16")
    if row.kind == "head_forward_backward":
        return cost.loss_s(block, semantics)
    return cost.backward_s(block, semantics) if row.kind.endswith("_backward") else cost.forward_s(block, semantics)


def block_of(row: OpRow) -> Block:
    """Convert a row to a block that contains nothing else."""
    d, tape = row.sizes, Tape(BF16)
    kernel: Kernel = "fused" if row.kernel.endswith(("-fused", "-compile")) else "eager"
    tokens, width = d.get("tokens", 0), d.get("width", 0)
    match row.kind.removesuffix("_forward").removesuffix("_backward"):
        case "matmul":
            return _block(matmuls=(Matmul(d["m"], d["k"], d["n"]),), n_kernels=1)
        case "rms_norm":
            op_steps.rms_norm(tape, Tensor(tokens * width, BF16, internal=False), width, kernel)
        case "rope":
            table = Tensor(tokens * d["head_dim"], BF16, internal=False, differentiable=False)
            for heads in (d["heads"], d["kv_heads"]):
                x = Tensor(tokens * heads * d["head_dim"], BF16, internal=False)
                op_steps.rotation(tape, x, table, kernel)
        case "swiglu":
            gate, up = (Tensor(tokens * d["inner"], BF16, internal=False) for _ in range(2))
            act = gate if kernel == "fused" else tape.step([gate], gate.n_elements)
            tape.step([act, up], gate.n_elements, call=Call.FUSED if kernel == "fused" else Call.POINTWISE)
        case "mlp":
            x = Tensor(tokens * width, BF16, internal=False)
            op_steps.gated_mlp(tape, x, tokens, width, d["inner"], kernel)
        case "add":
            tape.step([Tensor(tokens * width, BF16, internal=False) for _ in range(2)], tokens * width, call=Call.FUSED)
        case "cross_entropy":
            n_bytes = log_softmax_bytes(tokens, d["vocab"])
            return _block(pointwise_bytes=n_bytes, fused_bytes=n_bytes, n_kernels=2)
        case "head_forward":  # and backward
            n_bytes, logits = log_softmax_bytes(tokens, d["vocab"]), tokens * d["vocab"]
            matmuls = (Matmul(tokens, width, d["vocab"]),)
            return _block(matmuls=matmuls, pointwise_bytes=n_bytes + logits * (BF16 + FP32), fused_bytes=n_bytes, n_kernels=4)
        case _:
            raise CannotSayError(f"nothing predicts {row.kind}")
    return _block(matmuls=tuple(tape.matmuls), **tape.work._asdict())


def _block(**work: Any) -> Block:
    return Block("op", BlockKind.LAYER, (), **work)


def _in_a_model_s(row: OpRow, profile: Profile, name: str) -> float:
    """Return seconds of a layer, or of a step's compute, without recompute and with the row's kernels."""
    semantics, profile = _as_named(row, profile)
    cost, (embedding, *layers, head) = CostModel(profile), build_workload(read_model(name), semantics).blocks
    vocabulary_s = cost.forward_s(embedding, semantics) + cost.loss_s(head, semantics)
    if row.kind.startswith("layer_"):
        way, _, part = row.kind.removeprefix("layer_").partition("_")
        return _parts_s(cost, layers[0], semantics, (way,))[part]
    times = [_parts_s(cost, layer, semantics, ("forward", "backward")) for layer in layers]
    whole_s, attention_s = (sum(parts[part] for parts in times) for part in ("", "attention"))
    kinds = {"model_attention_step": attention_s, "model_rest_step": whole_s - attention_s + vocabulary_s}
    return kinds.get(row.kind, whole_s + vocabulary_s)


def _as_named(row: OpRow, profile: Profile) -> tuple[Semantics, Profile]:
    """Return the semantics with the kernels named in a row, and the profile with the rates of its attention."""
    kernels: dict[str, Any] = dict.fromkeys(FUSED, "eager") if "eager" in row.kernel else FUSED
    rates, flash = profile.device.attention, any(name in row.kernel for name in ("fa2", "flash", "transformers"))
    fastest = next((name for name in ATTENTION_NAMES.values() if name in ("fa3", "cudnn") and name in rates), None)
    semantics = Semantics(row.sizes["seq"], row.sizes["batch"], row.sizes["batch"], **kernels)
    if flash or fastest is None:
        return semantics, profile
    # Plans name the fastest kernel `cudnn`
    named = rates | {"cudnn": rates["fa3" if "fa3" in row.kernel and "fa3" in rates else fastest]}
    device = profile.device.model_copy(update={"attention": named})
    return replace(semantics, attention_kernel="cudnn"), profile.model_copy(update={"device": device})


def _parts_s(cost: CostModel, layer: Block, semantics: Semantics, ways: tuple[str, ...]) -> dict[str, float]:
    """Return seconds of a layer and its parts, by the names in a row's kind."""

    def seconds(block: Block) -> float:
        costs = {"forward": cost.forward_s, "backward": cost.backward_s}
        return sum(costs[way](block, semantics) for way in ways)

    whole_s, bare_s, products_s = seconds(layer), seconds(replace(layer, attention=None)), seconds(_block(matmuls=layer.matmuls))
    return {"": whole_s, "products": products_s, "attention": whole_s - bare_s, "pointwise": bare_s - products_s}
