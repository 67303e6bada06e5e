"""GRPO on given rollouts, as a script for TRL, with a `rollout_func` that returns them.

    python trl_grpo_rollouts.py Qwen3-8B rollouts.jsonl out 100

A row has a prompt, its prompt_ids, and a group of completion_ids, logprobs and rewards. For TRL itself, import GRPOTrainer from
there instead: one line differs.
"""

import sys

from datasets import load_dataset
from trl import GRPOConfig

from penstock.hf import GRPOTrainer

MODEL, ROLLOUTS, OUT, STEPS = *sys.argv[1:4], int(sys.argv[4])
ROWS = load_dataset("json", data_files=ROLLOUTS, split="train")
GROUPS = {row["prompt"]: row for row in ROWS}
GROUP = len(ROWS[0]["completion_ids"])  # completions of a prompt


def rollouts(prompts, trainer):
    chosen = [(GROUPS[prompt], i % GROUP) for i, prompt in enumerate(prompts)]
    output = {name: [group[name][i] for group, i in chosen] for name in ("completion_ids", "logprobs", "rewards")}
    return output | {"prompt_ids": [group["prompt_ids"] for group, _ in chosen]}


def reward(rewards, **columns):
    return rewards


def main() -> None:
    batch = {"per_device_train_batch_size": len(ROWS) * GROUP, "num_generations": GROUP, "num_iterations": STEPS}
    args = GRPOConfig(OUT, max_steps=STEPS, learning_rate=1e-4, bf16=False, logging_steps=1, report_to="none", **batch)
    prompts = ROWS.select_columns(["prompt"])
    trainer = GRPOTrainer(MODEL, reward_funcs=reward, args=args, train_dataset=prompts, rollout_func=rollouts)
    trainer.train()
    trainer.save_model(f"{OUT}/final")
    print(f"loss {trainer.state.log_history[0]['loss']:.4f} -> {trainer.state.log_history[-2]['loss']:.4f}")


if __name__ == "__main__":
    main()
