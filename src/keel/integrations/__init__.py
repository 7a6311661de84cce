"""Keel's mathematics and records inside other people's trainers; nothing here is imported by Keel.

* `keel.integrations.verl`: policy losses, advantages and KL estimates, under names of verl's
  configuration.
* `keel.integrations.trl`: a callback that writes a Keel run from a TRL trainer.
"""
