"""Rollouts: collecting, batching, demonstrations, and the targets of an update."""
