"""Many layouts, drawn at random, on a process group with NCCL's rules: `make nccl-rules`."""
