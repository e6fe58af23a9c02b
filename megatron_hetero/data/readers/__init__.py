"""What tokenizes records and decodes their pictures: in this process, or in others."""
