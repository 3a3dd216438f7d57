"""What watches runs from outside: sinks of events, metrics, health and trackers."""
