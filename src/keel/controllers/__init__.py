"""Controllers: what changes hyperparameters between updates."""
