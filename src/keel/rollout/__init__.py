"""From environments to rows: collecting, batching, and what the update learns from."""
