"""Environment protocol and the registry that `actors` fills."""
