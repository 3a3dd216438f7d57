"""New projects from templates: ``isthmus new``."""
