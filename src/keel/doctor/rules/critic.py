"""Critic, targets and advantages."""
