"""Memory that a plan takes on device and host, by use.

One account for everybody: what the planner books is what the checker adds up and what a run asks for before it starts. It leaves
out what a process has before a plan is begun: a GPU's context, and Python with its libraries.
"""

from .plan import Plan
from .setup import Place, Setup
from .workload import ITEM_BYTES, Saved

# Of the types whose attention can be a fused one, all can attend document by document
DOCUMENT_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "ernie4_5", "smollm3", "internlm3", "mixtral", "qwen3_moe")
WIDE_TABLES = ("ernie4_5",)  # types whose layers keep cosines and sines of their own, in fp32: a plan books those of one sequence
# Of which lengths are multiples: whole blocks of queries, as torch's kernel for processors cuts them (32 below 192 tokens, 64 below
# 768, 256 from there), but no more lengths than that below 192. Its keys come in blocks of 512.
SHORT_BLOCK, LONG_BLOCK, LONG_TOKENS = 64, 256, 768
USUAL_WORKSPACE_BYTES = 2**30  # assumed, of a GPU whose profile is not at hand
CUDA_HEAD_ELEMENTS = 8  # of which a head's width is a multiple, or torch pads it before it calls the kernel


def device_needs(plan: Setup, on_cuda: bool, workspace_bytes: float | None) -> dict[str, int]:
    """Bytes of the device's memory at the peak, by what they are for.

    `workspace_bytes`: what kernels and libraries take once they have been used. None: a profile from before that was a number of
    its own, whose plans book neither that nor documents.
    """
    needs = {a.name: a.n_bytes for a in plan.arenas if a.place is Place.DEVICE}
    needs |= {"kept activations": plan.kept_bytes, "block being computed": plan.transient_bytes}
    if workspace_bytes is not None:
        needs |= {"documents": document_bytes(plan, on_cuda), "kernels and workspaces": round(workspace_bytes)}
    return needs


def planned_device_needs(plan: Plan, on_cuda: bool | None = None) -> dict[str, int]:
    """The same on the machine of the plan's own profile; or on the other kind of device, of which the profile knows nothing."""
    device = plan.profile["device"]
    of_cuda, workspace = device["kind"] == "cuda", device.get("workspace_bytes")
    if on_cuda is not None and on_cuda != of_cuda:
        return device_needs(plan, on_cuda, USUAL_WORKSPACE_BYTES if on_cuda else 0.0)
    return device_needs(plan, of_cuda, None if workspace is None else workspace["value"])


def host_needs(plan: Setup) -> dict[str, int]:
    """Bytes of the host's memory, by arena."""
    return {a.name: a.n_bytes for a in plan.arenas if a.place is Place.HOST}


def document_bytes(plan: Setup, on_cuda: bool) -> int:
    """Device memory that documents take at most beyond what a plan books, whatever their lengths.

    Of each layer under `keep`, for each micro-batch of a group, the cosines and sines of positions; and while a layer attends to
    one document, what that makes, and on a processor what is padded for it. Where torch has no fused attention to call for each
    document, autograd keeps what attention made a second time: as the results of documents, and joined.
    """
    of, config = plan.semantics, plan.model.config
    if config.get("model_type") not in DOCUMENT_TYPES or of.attention != "sdpa":
        return 0
    item_bytes, kept_bytes, turn_bytes = ITEM_BYTES[of.compute_dtype], 0, 0
    pads = not on_cuda and of.compute_dtype == "bf16"
    n_computed, keeping = padded_tokens(of.seq_len) if pads else of.seq_len, {*plan.policy.saving(Saved.ALL)}
    for alike in plan.workload.classes:
        if (attention := plan.workload.blocks[alike[0]].attention) is None:
            continue
        n_keeping = len(keeping.intersection(alike))
        n_heads, width = attention.n_heads, attention.head_dim
        said = config.get("num_key_value_heads")
        n_kv_heads = said if isinstance(said, int) and 0 < said <= n_heads else n_heads
        if n_keeping:
            n_joined = 0 if _calls_fused(plan, width, on_cuda) else n_heads
            wide = config.get("model_type") in WIDE_TABLES
            table_bytes = 2 * (ITEM_BYTES["fp32"] * (attention.n_sequences - 1) if wide else item_bytes * attention.n_sequences)
            kept_bytes += n_keeping * of.seq_len * width * (table_bytes + attention.n_sequences * n_joined * item_bytes)
        # Most in backward: gradients of queries, keys, values, a copy of the sums; padded, those three too, results, its gradient.
        n_made, n_padded = n_heads + 2 * n_kv_heads, 3 * n_heads + 2 * n_kv_heads
        token_bytes = (n_made + pads * n_padded) * width * item_bytes + n_heads * ITEM_BYTES["fp32"]
        turn_bytes = max(turn_bytes, n_computed * token_bytes)
    return plan.policy.accumulation_group * kept_bytes + turn_bytes


def _calls_fused(plan: Setup, head_dim: int, on_cuda: bool) -> bool:
    """Whether the plan's documents have fused attention there."""
    if plan.model.config.get("attention_dropout"):
        return False
    return not on_cuda or (plan.semantics.compute_dtype != "fp32" and head_dim % CUDA_HEAD_ELEMENTS == 0)


def padded_tokens(n_tokens: int) -> int:
    """The length class of a document."""
    block = SHORT_BLOCK if n_tokens < LONG_TOKENS else LONG_BLOCK
    return -(-n_tokens // block) * block
