"""The commands of the server's package: ``run``, ``report``, ``server``, ``runs``, and others."""
