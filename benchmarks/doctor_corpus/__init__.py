"""The calibration corpus of the doctor: healthy runs and planted faults in real trainers.

`healthy.yaml` and `faults*.yaml` say what is run, `*_runs.py` train, each in the environment of its
trainer, `making` runs what is missing and packs it, `judging` asks the doctor about every log.
"""
