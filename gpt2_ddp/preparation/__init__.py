"""Text to token shards: sources, tokenizers, encoding (scripts/prepare_data.py). A training loads
none of it."""
