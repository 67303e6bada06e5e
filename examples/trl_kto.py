"""KTO on single answers, good and bad, in the script that people have for TRL.

    python trl_kto.py Qwen3-8B answers.jsonl tuned 100

For TRL itself, import KTOTrainer from there instead: one line differs.
"""

import sys

from datasets import load_dataset
from trl import KTOConfig

from penstock.hf import KTOTrainer

MODEL, ANSWERS, OUT, STEPS = *sys.argv[1:4], int(sys.argv[4])


def main() -> None:
    args = KTOConfig(
        output_dir=OUT,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        beta=0.1,
        max_length=256,
        bf16=False,
        logging_steps=1,
        report_to="none",
    )
    trainer = KTOTrainer(MODEL, args=args, train_dataset=load_dataset("json", data_files=ANSWERS, split="train"))
    trainer.train()
    trainer.save_model(f"{OUT}/final")
    print(f"loss {trainer.state.log_history[0]['loss']:.4f} -> {trainer.state.log_history[-2]['loss']:.4f}")


if __name__ == "__main__":
    main()
