"""Composition: command line, local runtime; later Ray pools."""
