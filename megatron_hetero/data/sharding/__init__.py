"""Who works on what: layers on stages, tokens and images on ranks. Pure."""
