"""A deterministic engine without a model, with faults on demand."""
