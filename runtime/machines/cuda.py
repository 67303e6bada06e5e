"""The CUDA machine: the lanes of compute and of the link's two directions own a stream each, which their threads issue ops to."""

import os
from collections.abc import Callable

import torch

from runtime.batch import Batch
from runtime.layers.attention import use_attention
from runtime.plan import Lane, Plan
from runtime.plan.optimizer import Hyperparameters
from runtime.ranks import Ranks

from .lanes import Lanes, split_beside_gpu
from .streams import CudaStreams
from .torch_machine import TorchMachine


class CudaMachine(TorchMachine):
    """Performs a plan on a GPU. The optimizer has the host's cores; a lane that issues ops needs little of one."""

    def __init__(
        self,
        plan: Plan,
        batches: Callable[[int], Batch],
        settings: Callable[[int], Hyperparameters],
        seed: int = 0,
        streams: CudaStreams | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Every arena of the host's is pinned. `streams`: those of the first CUDA device, without it."""
        # A product is rounded once, at its end, whatever the process did before. Else cuBLAS, where it splits the inner dimension
        # (a weight's gradient has one of all tokens), adds the parts in bf16.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        use_attention(plan.semantics.attention_kernel)
        to_issue, for_host = split_beside_gpu(sorted(os.sched_getaffinity(0)))
        lanes = Lanes(dict.fromkeys(plan.lanes, to_issue) | {Lane.CPU: for_host}, pins=True, streams=streams or CudaStreams())
        super().__init__(plan, batches, settings, lanes, seed, ranks=ranks)
