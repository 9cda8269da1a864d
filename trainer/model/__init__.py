"""The model and its tokenizer."""
