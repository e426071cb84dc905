"""Several runs of one command: the variants of a sweep, the sizes of a ladder."""
