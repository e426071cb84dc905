"""Predict the classes of images with a trained classifier.

python scripts/predict.py runs/photos photo.jpg folder                        # one line per image
python scripts/predict.py runs/photos folder --output predictions.jsonl       # with the probabilities of all classes
"""

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.tools import PredictConfig

if __name__ == "__main__":
    run_command(PredictConfig, "gpt2_ddp.tasks.checkpoints:predict")
