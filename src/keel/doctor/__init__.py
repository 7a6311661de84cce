"""The doctor: from the log of a run to its cause, the evidence and the fix."""
