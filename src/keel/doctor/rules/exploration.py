"""Rules of the family `exploration`."""
