"""Stand-ins for libraries that run on GPUs alone: their signatures and checks, results by plain PyTorch."""
