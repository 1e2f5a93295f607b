"""Rewrites that nobody has to ask for."""
