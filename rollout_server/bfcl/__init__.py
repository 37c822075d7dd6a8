"""BFCL V3 multi-turn: tasks, environment, verdict, reward."""
