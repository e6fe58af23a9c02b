"""Inputs of encoders: the interfaces of item types, and the item types of pictures and videos."""
