"""Probes: environments so small that what goes wrong in them can only have one cause."""
