"""Shards to batches: manifest, shards, order, feed. Reading only."""
