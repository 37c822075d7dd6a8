"""Tokenizers, their fingerprints, and the bytes that each token stands for."""
