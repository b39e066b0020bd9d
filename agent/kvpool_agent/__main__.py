"""`python -m kvpool_agent`: see `main`."""

import sys

from kvpool_agent.main import main

if __name__ == "__main__":
    sys.exit(main())
