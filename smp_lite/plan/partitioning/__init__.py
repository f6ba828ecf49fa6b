"""Where modules go: which stage holds which of them."""
