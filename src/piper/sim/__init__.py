"""Simulate plans: run them on a clock."""
