"""Texts to tokens and back: tokenizers of folders, chat templates, tokens that begin and end, stop strings."""
