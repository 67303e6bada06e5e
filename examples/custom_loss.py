"""Train with a custom loss: focal loss per token.

    python custom_loss.py Qwen3-8B text.jsonl out 100 h100-sxm

A loss is a function of logits (N, vocabulary) and targets (N) that returns N losses. It is called on a tile of positions at a time
and must not mix positions; Penstock checks this on a small call.
"""

import sys

import torch
import torch.nn.functional as F

import penstock


def focal(logits: torch.Tensor, targets: torch.Tensor, gamma: float = 2.0) -> torch.Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (1 - (-losses).exp()) ** gamma * losses


def main() -> None:
    model, data, out, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    machine = sys.argv[5] if len(sys.argv) > 5 else "cpu-2core"
    planned = penstock.plan(model, machine, loss=focal, seq_len=256, batch_size=4)
    trained = penstock.train(planned, data, steps=steps, lr=1e-5, out=out, loss=focal, settings={"model": model})
    print(f"focal loss {trained.metrics[0].loss:.3f} -> {trained.metrics[-1].loss:.3f}")


if __name__ == "__main__":
    main()
