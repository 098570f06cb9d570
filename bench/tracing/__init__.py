"""Timestamps at the boundaries that a request passes, taken in all processes of a pool. Only `bench.breakdown` starts these."""
