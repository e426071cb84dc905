"""Evaluation tasks: items that a model answers by likelihood, by the rules of lm-eval (docs/evaluation.md)."""
