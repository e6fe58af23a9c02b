"""What benchmarks and tests measure with, and what they measure on."""
