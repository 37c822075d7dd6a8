"""Trackers: optional places, beside the run directory, where a run's numbers can be looked at."""
