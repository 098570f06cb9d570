"""Texts of requests to token ids, by the tokenizer of the model. No SGLang here."""
