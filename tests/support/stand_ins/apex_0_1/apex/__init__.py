"""Stand-in for NVIDIA Apex: what megatron-core 0.16.1 imports of it. Nothing of it may be used.

Names: `import apex`, `from apex` and `import amp_C` and the like in megatron/core of that version.
"""
