"""What a run folder records: rows, status, numbers for people."""
