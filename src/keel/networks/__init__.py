"""Policies and critics: distributions, networks, and the agent that holds them together."""
