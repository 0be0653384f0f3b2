"""What verl 0.9.1 writes of a rollout, as recorded from its agent loop worker; `make test-verl` compares it."""

from __future__ import annotations

FIELDS = {
    "extra_fields": "dict",
    "global_steps": "int",
    "input_ids": "int64 [P + R]",
    "loss_mask": "int64 [R]",
    "metrics": "dict",
    "multi_modal_inputs": "dict",
    "num_turns": "int",
    "position_ids": "int64 [P + R]",
    "prompts": "int64 [P]",
    "response_mask": "int64 [R]",
    "responses": "int64 [R]",
    "rm_scores": "float32 [R]",
    "rollout_log_probs": "float32 [R]",
    "session_id": "int",
    "uid": "str",
}
"""The fields of a row, but for those of the data set."""

TAG = {
    "status": "success",
    "prompt_len": 2,
    "response_len": 6,
    "seq_len": 8,
    "global_steps": 5,
    "min_global_steps": 4,
    "max_global_steps": 4,
}
"""The tag of a row: of 2 and 6 tokens, asked for in step 5, sampled with the weights of step 4."""
