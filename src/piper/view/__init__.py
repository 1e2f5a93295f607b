"""DAG, plan or trace -> something a person looks at."""
