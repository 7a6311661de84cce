"""`make bench`: every measurement that needs no long training."""

from benchmarks import functional

for line in functional.run():
    print(line, flush=True)
