"""``python -m isthmus`` is the command ``isthmus``."""

from isthmus.cli import main

main()
