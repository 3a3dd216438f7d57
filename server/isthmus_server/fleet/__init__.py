"""Who takes part in a server now: kept by the server, shown by its commands."""
