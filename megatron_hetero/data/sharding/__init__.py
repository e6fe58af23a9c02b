"""Who works on what: tokens and pieces of items on ranks. Pure."""
