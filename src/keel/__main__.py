"""`python -m keel`."""

import sys

from keel.cli import main
from keel.processes import watch_lifeline

if __name__ == "__main__":
    watch_lifeline()
    sys.exit(main())
