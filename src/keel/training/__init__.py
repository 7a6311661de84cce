"""The training loop, runs on disk, checkpoints, evaluation and export."""
