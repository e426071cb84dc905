"""The processes of a run: how they come up, what they do once, alike, and together."""
