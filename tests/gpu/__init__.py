"""What only a GPU can show; skipped by name where there is none."""
