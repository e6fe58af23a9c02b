"""Boundaries: which rank holds which rows (ownership), the moves between two ownerships (plan), and their execution
(communicator).
"""
