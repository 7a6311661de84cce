"""Distributions of actions and of tokens, and drawing from them."""
