"""Ranks and process groups: how they start, meet, agree and fail together."""
