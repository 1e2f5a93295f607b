"""One graph of the whole forward pass, cleaned up; what a trace cannot see is refused."""
