"""Messages to tokens by the template of a tokenizer."""
