"""Score batches through SGLang."""
