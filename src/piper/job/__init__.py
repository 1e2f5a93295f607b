"""A model, a loss and a strategy: captured, compiled, checked, and sent to all ranks."""
