"""The API on real ranks."""
