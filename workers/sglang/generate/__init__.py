"""Continue prompts through SGLang."""
