"""Annotated reference models, used by tests, examples and benchmarks."""
