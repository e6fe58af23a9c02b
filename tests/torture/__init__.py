"""A run that is killed again and again, and must end as if nothing had happened: `python -m tests.torture --help`."""
