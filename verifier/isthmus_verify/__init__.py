"""Checks the transcript of a run of Isthmus. It shares no code with what has written it."""
