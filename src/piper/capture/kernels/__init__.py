"""Graphs as functions that the runtime calls, and as data that other processes get."""
