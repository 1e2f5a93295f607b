"""The batch of a step: as loaders give it, as replicas share it, and as microbatches see it."""
