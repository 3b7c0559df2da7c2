"""`python -m jattn ...` is `jattn ...`."""

import sys

from jattn.cli import main

sys.exit(main())
