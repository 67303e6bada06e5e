"""Supervised fine-tuning of LoRA adapters, in the script that people have for TRL.

    python trl_sft_lora.py Qwen3-8B chats.jsonl out 100

For TRL itself, import SFTTrainer from there instead: one line differs.
"""

import sys

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, set_seed
from trl import SFTConfig

from penstock.hf import SFTTrainer

MODEL, CHATS, OUT, STEPS = *sys.argv[1:4], int(sys.argv[4])


def main() -> None:
    set_seed(0)  # random adapters
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    args = SFTConfig(
        output_dir=OUT,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=2e-3,
        max_length=256,
        assistant_only_loss=True,
        bf16=False,
        logging_steps=1,
        report_to="none",
    )
    trainer = SFTTrainer(model, args, train_dataset=load_dataset("json", data_files=CHATS, split="train"))
    trainer.train()
    trainer.save_model(f"{OUT}/final")
    print(f"loss {trainer.state.log_history[0]['loss']:.4f} -> {trainer.state.log_history[-2]['loss']:.4f}")


if __name__ == "__main__":
    main()
