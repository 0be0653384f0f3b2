"""What arithmetic_grpo.py needs besides penstock: task, tokenizer, model, warm-up, exam, live view and run folder."""
