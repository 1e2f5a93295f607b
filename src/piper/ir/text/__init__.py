"""The text of a DAG: printed, and read back."""
