"""CUDA kernels, as source files and the code that compiles them with NVRTC."""
