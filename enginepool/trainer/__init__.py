"""A trainer's side of weight updates: `WeightPublisher` and its parts. Needs torch."""
