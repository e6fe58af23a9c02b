"""Data pipeline from records to the device: mixtures of data sets, items, chat text, packs, plans of steps, loading.

Independent of ranks: ``mixture[i]`` is the i-th sample of one infinite stream on every rank.
"""
