"""What encoders take: the protocol of item types, and a folder for each type."""
