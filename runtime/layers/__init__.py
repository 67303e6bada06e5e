"""Parts of a layer's work: kernels, adapters, packed weights, recompute, tiles, packed documents."""
