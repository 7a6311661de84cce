"""Token-level policy optimization for language models."""
