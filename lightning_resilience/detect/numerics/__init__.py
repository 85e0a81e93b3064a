"""Losses and gradients that are not finite, spikes, and replicas that differ."""
