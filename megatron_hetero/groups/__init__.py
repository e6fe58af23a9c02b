"""Process groups: platform, topology, launch, watchdog, and the adapter to Megatron-Core's and torch's internals."""
