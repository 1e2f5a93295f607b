"""State that outlives a step: parameters, shards, optimizers."""
