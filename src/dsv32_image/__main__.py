"""`python -m dsv32_image`."""

import sys

from dsv32_image.cli import main

sys.exit(main())
