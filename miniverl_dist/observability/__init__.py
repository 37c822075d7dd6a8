"""Run directory, event and metric names, progress: what a run leaves behind and shows."""
