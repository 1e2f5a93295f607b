"""Execute all plans together symbolically, and compare the result with the DAG."""
