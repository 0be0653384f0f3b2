"""Parts of arithmetic_grpo.py that are not in penstock: task, tokenizer, model, warm-up, exam, display, run folder."""
