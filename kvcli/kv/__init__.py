"""Caches that several methods share: dense, sliding, paged, by tokens, pruned, recurrent."""
