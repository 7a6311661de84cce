"""Losses: per element, then reduced once."""
