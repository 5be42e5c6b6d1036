"""`python -m pagedkern.autotune`: see `cli`."""

import sys

from pagedkern.autotune.cli import main

if __name__ == "__main__":
    sys.exit(main())
