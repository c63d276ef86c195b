"""Model configurations, weights and the decoder."""
