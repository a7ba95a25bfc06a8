"""Corpora and images: files, downloads, encoding, the cache, and the order of batches."""
