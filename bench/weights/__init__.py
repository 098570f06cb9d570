"""What `python -m bench.weights_gpu` is made of: trainer, receivers, the load meanwhile, and what it amounts to."""
