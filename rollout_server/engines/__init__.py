"""Inference engines that speak the `/generate` contract."""
