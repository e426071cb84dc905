"""What a training takes and what would be refused, before it is started."""
