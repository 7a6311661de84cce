"""The entries of the metric registry, by what they describe; `keel.runs.metrics` reads them."""
