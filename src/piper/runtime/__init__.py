"""Runs plans. Knows instructions, never strategies."""
