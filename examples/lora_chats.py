"""Fine-tune chats with LoRA and merge the adapter into the model.

    python lora_chats.py Qwen3-8B chats.jsonl out 200 rtx4090-server

`chats.jsonl` has rows such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}; loss is
computed on the assistant's tokens.
"""

import subprocess
import sys

import penstock

MODEL, CHATS, OUT, STEPS = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
MACHINE = sys.argv[5] if len(sys.argv) > 5 else "cpu-2core"


def main() -> None:
    planned = penstock.plan(MODEL, MACHINE, train="lora:r=16", seq_len=256, batch_size=8)
    print(planned)
    trained = penstock.train(planned, CHATS, steps=STEPS, lr=1e-4, out=OUT, settings={"model": MODEL})
    print(f"loss {trained.metrics[0].loss:.3f} -> {trained.metrics[-1].loss:.3f}")
    adapter = f"{OUT}/checkpoint-{STEPS}"  # PEFT's files
    subprocess.run([sys.executable, "-m", "penstock", "merge", MODEL, adapter, "--out", f"{OUT}/merged"], check=True)


if __name__ == "__main__":
    main()
