"""`python -m dsv32_image`."""

import sys

from dsv32_image.cli import main
from dsv32_image.proc import stop_cleanly

stop_cleanly()
sys.exit(main())
