"""LLaVA-style data: records, mixtures of data sets, pictures, chat text, and packing.

Independent of ranks: ``mixture[i]`` is the i-th sample of one infinite stream on every rank.
"""
