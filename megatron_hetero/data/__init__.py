"""LLaVA-style data: records, mixtures of data sets, pictures, chat text, and packing.

Nothing here knows about ranks: ``mixture[i]`` is the i-th sample of one infinite stream, whoever asks.
"""
