"""Cost model, discrete-event simulator, memory footprint and prediction intervals."""
