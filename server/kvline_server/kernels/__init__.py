"""The operations under the model; the only place that knows a backend."""
