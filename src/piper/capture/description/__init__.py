"""Regions with their graphs, and what the rest of Piper has to know of them, as data."""
