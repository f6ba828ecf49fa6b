"""Jobs as users start them, and what their processes do together."""
