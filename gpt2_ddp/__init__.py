"""GPT-2 pretraining on HuggingFace Accelerate. Importing the package imports nothing heavy."""
