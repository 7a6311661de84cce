"""Experiments on Keel itself: deliberate bugs, to measure them and to see them detected."""
