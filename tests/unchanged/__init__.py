"""`python -m tests.unchanged`: whether a refactoring left every bit of training as it was."""
