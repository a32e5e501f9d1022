"""Tokens and text: the tokenizer of a checkpoint, prompt styles, and text as it grows."""
