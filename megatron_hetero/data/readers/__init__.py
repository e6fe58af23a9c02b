"""What tokenizes records and decodes their items: in this process, or in others."""
