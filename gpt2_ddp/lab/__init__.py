"""Short experiments that show what goes wrong with data parallelism."""
