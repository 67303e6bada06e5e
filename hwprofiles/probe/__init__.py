"""The probe: micro-benchmarks that measure a machine."""
