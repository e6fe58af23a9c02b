"""Environment variables of a process: its rank and rendezvous, CUDA, the allocator and NCCL."""
