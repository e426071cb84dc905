"""The small supervised jobs: one fit() and what each job is made of."""
