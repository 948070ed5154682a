"""Speculative decoding: proposing draft tokens, and accepting or rejecting them."""
