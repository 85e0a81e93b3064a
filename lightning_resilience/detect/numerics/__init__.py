"""Finds losses and gradients that are not finite, spikes of the loss, and replicas that differ."""
