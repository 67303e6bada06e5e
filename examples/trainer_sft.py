"""Supervised fine-tuning of all weights, in the script that people have for transformers.

    python trainer_sft.py Qwen3-8B texts.jsonl out 100

For transformers itself, import Trainer from there instead: one line differs.
"""

import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from penstock.hf import Trainer

MODEL, TEXTS, OUT, STEPS = *sys.argv[1:4], int(sys.argv[4])


def main() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = load_dataset("json", data_files=TEXTS, split="train")
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=256), remove_columns=rows.column_names)
    args = TrainingArguments(
        output_dir=OUT,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        weight_decay=0.1,
        logging_steps=1,
        report_to="none",
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model, args, data_collator=collator, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(f"{OUT}/final")
    print(f"loss {trainer.state.log_history[0]['loss']:.4f} -> {trainer.state.log_history[-2]['loss']:.4f}")


if __name__ == "__main__":
    main()
