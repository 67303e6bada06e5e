"""What happens inside a layer: kernels, adapters, packed weights, recompute, tiles, packed documents."""
