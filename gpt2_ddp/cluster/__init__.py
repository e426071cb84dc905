"""What one runs first on new machines."""
