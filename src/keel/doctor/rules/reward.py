"""Rules of the family `reward`."""
