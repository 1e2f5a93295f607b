"""Trace the whole forward pass into one clean graph. Errors for what a trace cannot see."""
