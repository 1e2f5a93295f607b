"""Checkpoints: files that any strategy reads and writes, and that run no code."""
