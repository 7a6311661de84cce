"""The trust region: measured, gated, certified."""
