"""What runs inside the image: DSA kernels, model configuration, training."""
