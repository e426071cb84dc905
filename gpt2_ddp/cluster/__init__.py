"""The check of new machines (scripts/check_cluster.py)."""
