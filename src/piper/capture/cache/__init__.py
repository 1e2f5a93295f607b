"""Derivatives of regions, kept on disk by what they are derived from."""
