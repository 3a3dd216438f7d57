"""Fewer and shorter elements of an update, which add up like the update itself."""
