"""What transformer layers are made of, in few passes over memory: linear layers, norms, rotary embedding, gates."""
