"""Pure tensor functions: log-probabilities, policy loss, reductions."""
