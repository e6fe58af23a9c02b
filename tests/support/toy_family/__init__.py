"""A family of a user's own, in this folder alone: kinds of MLP, a type of items, a view of ranks."""
