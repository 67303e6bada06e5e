"""A reward model from pairs, in the script that people have for TRL.

    python trl_reward.py Qwen3-8B pairs.jsonl tuned 100

For TRL itself, import RewardTrainer from there instead: one line differs.
"""

import sys

from datasets import load_dataset
from trl import RewardConfig

from penstock.hf import RewardTrainer

MODEL, PAIRS, OUT, STEPS = *sys.argv[1:4], int(sys.argv[4])


def main() -> None:
    args = RewardConfig(
        output_dir=OUT,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        max_length=256,
        bf16=False,
        logging_steps=1,
        report_to="none",
    )
    trainer = RewardTrainer(MODEL, args=args, train_dataset=load_dataset("json", data_files=PAIRS, split="train"))
    trainer.train()
    trainer.save_model(f"{OUT}/final")
    print(f"loss {trainer.state.log_history[0]['loss']:.4f} -> {trainer.state.log_history[-2]['loss']:.4f}")


if __name__ == "__main__":
    main()
