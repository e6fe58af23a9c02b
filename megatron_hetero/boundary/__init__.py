"""Boundaries: who holds which rows (ownership), the moves between two ownerships (plan), and their execution
(communicator).
"""
