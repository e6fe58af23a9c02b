"""Command-line tools for inspecting data, importing and exporting models, and merging and splitting adapters."""
