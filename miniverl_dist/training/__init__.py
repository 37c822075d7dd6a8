"""The training loop and what it stands on; torch-free, knows only ports."""
