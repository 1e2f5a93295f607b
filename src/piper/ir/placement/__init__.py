"""Which devices hold a value: devices, replicas, and how parameters and regions are divided."""
