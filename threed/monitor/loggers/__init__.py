"""Loggers: where metrics go besides metrics.jsonl: wandb, tensorboard, mlflow, trackio, prometheus."""
