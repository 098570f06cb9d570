"""Parts of `bench.coordinator_streams`."""
