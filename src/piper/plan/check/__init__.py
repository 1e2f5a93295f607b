"""Run all plans together on paper, and compare them with the DAG."""
