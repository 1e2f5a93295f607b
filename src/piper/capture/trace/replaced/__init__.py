"""Functions of torch that a trace replaces."""
