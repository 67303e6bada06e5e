"""A custom training loop: evaluate on held-out data, halve the learning rate on a plateau, keep the best checkpoint.

python custom_loop.py Qwen3-8B chats.jsonl held-out.jsonl out 100 h100-sxm
"""

import sys

import penstock

MODEL, DATA, HELD_OUT, OUT, STEPS = *sys.argv[1:5], int(sys.argv[5])
MACHINE = sys.argv[6] if len(sys.argv) > 6 else "cpu-2core"


def main() -> None:
    planned = penstock.plan(MODEL, MACHINE, seq_len=256, batch_size=4)
    settings = {"model": MODEL, "evaluation.data": HELD_OUT}
    best = float("inf")
    for turn in penstock.stream(planned, DATA, every=2, steps=STEPS, lr=1e-5, out=OUT, settings=settings):
        loss = turn.evaluate()["eval_loss"]
        print(f"step {turn.step}: loss {turn.loss:.3f}, held-out loss {loss:.3f}, rate {turn.lr:.1e}")
        if loss < best:
            best = loss
            turn.save()
        else:
            turn.lr /= 2  # from the next step on


if __name__ == "__main__":
    main()
