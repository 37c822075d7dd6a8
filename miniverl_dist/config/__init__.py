"""Run configuration: strict models and the loader."""
