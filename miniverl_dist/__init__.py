"""Training service for tool-using language models: GRPO and cross-tokenizer OPD in one loop."""

__version__ = "0.1.0"
