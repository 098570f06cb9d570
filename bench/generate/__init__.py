"""Parts of `bench.generate_gpu`."""
