"""Rollouts: engines, chat formats, tool-call parsers, BFCL, episodes, curriculum."""
