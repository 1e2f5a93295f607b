"""Rewrites of the DAG that the compiler decides on, without a directive."""
