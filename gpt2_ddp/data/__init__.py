"""Text to tokens to windows: everything between the user's files and a batch."""
