"""The DAG as its devices see it: one by one, by role, and in time steps."""
