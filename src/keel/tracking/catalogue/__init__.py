"""The entries of the metric registry, by what they describe; `keel.tracking.metrics` reads them."""
