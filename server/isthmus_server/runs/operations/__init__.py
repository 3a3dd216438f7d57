"""Operate a server over the years: backups, retention of runs, and checks of a machine."""
