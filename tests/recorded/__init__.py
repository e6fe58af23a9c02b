"""`python -m tests.recorded`: whether a refactoring left every bit of training as it was."""
