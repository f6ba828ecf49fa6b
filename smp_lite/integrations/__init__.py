"""Other libraries' ways to train, over this one. Nothing here is imported unless a script asks for it."""
