"""Kept inputs that leave memory between forward and backward."""
