"""A run on disk: its directory and lock, the registry of metrics, their file, and its readers.

Torch is not imported here, so that listing and reading runs is quick.
"""
