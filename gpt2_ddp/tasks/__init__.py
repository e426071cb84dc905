"""What is trained: pretraining a GPT, the small supervised jobs; and what is done with their checkpoints."""
