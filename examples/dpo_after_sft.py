"""Supervised fine-tuning on chats, then DPO on preferences, with the fine-tuned model as reference.

    python dpo_after_sft.py Qwen3-8B chats.jsonl preferences.jsonl out 100 h100-sxm

`preferences.jsonl` has rows with "prompt", "chosen" and "rejected".
"""

import sys

import penstock

MODEL, CHATS, PREFERENCES, OUT, STEPS = *sys.argv[1:5], int(sys.argv[5])
MACHINE = sys.argv[6] if len(sys.argv) > 6 else "cpu-2core"


def main() -> None:
    sft = penstock.plan(MODEL, MACHINE, seq_len=256, batch_size=4)
    penstock.train(sft, CHATS, steps=STEPS, lr=1e-5, out=f"{OUT}/sft", settings={"model": MODEL})
    tuned = f"{OUT}/sft/checkpoint-{STEPS}"  # loads in transformers, and is the start of the next run
    dpo = penstock.plan(tuned, MACHINE, loss="dpo:beta=0.1", seq_len=256, batch_size=4)
    # The log-probabilities of the reference, here the fine-tuned model, are computed before the first step
    trained = penstock.train(dpo, PREFERENCES, steps=STEPS, lr=1e-6, out=f"{OUT}/dpo", settings={"model": tuned})
    print(f"DPO loss {trained.metrics[0].loss:.4f} (0.6931 before the first update) -> {trained.metrics[-1].loss:.4f}")


if __name__ == "__main__":
    main()
