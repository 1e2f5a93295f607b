"""From a scheduled DAG to one plan per device."""
