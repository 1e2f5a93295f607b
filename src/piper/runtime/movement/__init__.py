"""State that moves to the devices of another strategy, without a checkpoint on disk."""
