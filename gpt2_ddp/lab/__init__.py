"""Short experiments on common mistakes in data parallelism."""
