"""Runs of a model and its loss on numbers, to try what graphs do not prove."""
