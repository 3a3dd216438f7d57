"""The web console: pages about the runs and the fleet, read from their logs while they go on."""
