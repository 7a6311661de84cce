"""Rules of the family `thermometer`."""
