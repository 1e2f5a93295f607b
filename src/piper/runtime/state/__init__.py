"""What outlives a step: parameters, their shards and optimizers, checkpoints."""
