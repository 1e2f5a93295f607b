"""Graphs as functions that the runtime calls, and as data for other processes."""
