"""What the tests of secure aggregation share is imported from their own folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
