"""What families share about pictures: sizes and patches, and where patches and rows are."""
