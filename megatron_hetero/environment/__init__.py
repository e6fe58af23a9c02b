"""What the environment variables of a process say: its rank and where to meet, CUDA, the allocator and NCCL."""
