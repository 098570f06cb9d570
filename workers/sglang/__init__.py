"""The real engine, SGLang, behind the worker's engine interface."""
