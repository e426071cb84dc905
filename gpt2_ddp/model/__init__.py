"""What is trained: the model, its optimizer, and what is done with them: evaluating, generating."""
