"""The tasks: pretraining of a GPT, small supervised jobs; and the uses of their checkpoints."""
