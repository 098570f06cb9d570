"""Parts of `bench.in_flight_gpu`."""
