"""Pictures: their files, sizes, patches, and where patches and rows are."""
