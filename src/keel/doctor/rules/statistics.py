"""Rules of the family `statistics`."""
